//! The CEL rules: the server and the process give the same verdict in the same words.

use std::collections::BTreeSet;

use deepinfer_crds::cel;
use deepinfer_crds::crd::{Kind, definition};
use kube::api::PostParams;
use serde_json::{Value, json};

use crate::cases::{all_cases, cluster, placement, supernode, transitions, with};
use crate::kit::{Refusal, object, refusal, server};

/// Writes nothing, validates all.
fn dry() -> PostParams {
    PostParams { dry_run: true, ..PostParams::default() }
}

/// Messages of all rules of a kind.
fn messages(kind: Kind) -> BTreeSet<String> {
    fn walk(schema: &Value, into: &mut BTreeSet<String>) {
        for entry in schema["x-kubernetes-validations"].as_array().into_iter().flatten() {
            into.insert(entry["message"].as_str().expect("a message").to_owned());
        }
        let below = schema["properties"].as_object().into_iter().flat_map(|p| p.values());
        below
            .chain(["items", "additionalProperties"].iter().filter_map(|k| schema.get(*k)))
            .for_each(|s| walk(s, into));
    }
    let mut all = BTreeSet::new();
    walk(definition(kind).schema(), &mut all);
    all
}

/// Fields and messages of broken rules, as the server tells them.
fn by_rules(kind: Kind, refusal: Option<&Refusal>) -> BTreeSet<(String, String)> {
    let known = messages(kind);
    let causes = refusal.into_iter().flat_map(|r| &r.causes);
    causes
        .filter_map(|(field, text)| {
            let message = known.iter().filter(|m| text.ends_with(m.as_str())).max_by_key(|m| m.len())?;
            Some((field.clone(), message.clone()))
        })
        .collect()
}

fn in_process(kind: Kind, new: &Value, old: Option<&Value>) -> BTreeSet<(String, String)> {
    let broken = cel::validate_kind(kind, new, old);
    broken.into_iter().filter(|v| !v.unevaluated).map(|v| (v.path.to_string(), v.message)).collect()
}

#[tokio::test]
async fn every_rule_is_enforced_by_the_server_in_the_words_that_validate_uses() {
    let Some(server) = server().await else { return };
    let namespace = server.namespace("rules").await;
    let api = server.api(Kind::Cluster, &namespace).await;
    let mut wrong = Vec::new();
    for case in all_cases() {
        let accepts = case.accepts.iter().map(|changes| (changes, false));
        let refuses = case.refuses.iter().map(|changes| (changes, true));
        for (changes, refuse) in accepts.chain(refuses) {
            let new = with(cluster(), changes);
            let answer = refusal(api.create(&dry(), &object(new.clone())).await);
            let found = by_rules(Kind::Cluster, answer.as_ref());
            let wanted = in_process(Kind::Cluster, &new, None);
            let blamed = found.contains(&(case.blames.to_owned(), case.rule.message.to_owned()));
            if found != wanted
                || blamed != refuse
                || (refuse && answer.as_ref().is_none_or(|a| a.code != 422))
            {
                let said = answer.map_or_else(|| "accepted".to_owned(), |a| a.message);
                wrong.push(format!("{changes}\n  server: {said}\n  process: {wanted:?}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{} cases differ:\n{}", wrong.len(), wrong.join("\n"));
}

#[tokio::test]
async fn a_sound_object_of_each_kind_is_accepted() {
    let Some(server) = server().await else { return };
    let namespace = server.namespace("sound").await;
    let sound = [(Kind::Cluster, cluster()), (Kind::Supernode, supernode()), (Kind::Placement, placement())];
    for (kind, value) in sound {
        let answer = refusal(server.api(kind, &namespace).await.create(&dry(), &object(value)).await);
        assert!(answer.is_none(), "{}: {}", kind.name(), answer.map(|a| a.message).unwrap_or_default());
    }
}

#[tokio::test]
async fn what_can_not_be_changed_is_refused_at_an_update_and_everything_else_is_not() {
    let Some(server) = server().await else { return };
    let namespace = server.namespace("updates").await;
    for (n, (kind, rule, old, new, blamed)) in transitions().into_iter().enumerate() {
        let name = json!({"/metadata/name": format!("t{n}")});
        let (old, new) = (with(old, &name), with(new, &name));
        let api = server.api(kind, &namespace).await;
        let live =
            api.create(&PostParams::default(), &object(old.clone())).await.expect("the old one is sound");
        let version = json!({"/metadata/resourceVersion": live.metadata.resource_version});
        let name = format!("t{n}");
        let same = api.replace(&name, &dry(), &object(with(old.clone(), &version))).await;
        assert!(same.is_ok(), "nothing changed: {same:?}");
        let answer = refusal(api.replace(&name, &dry(), &object(with(new.clone(), &version))).await);
        let found = by_rules(kind, answer.as_ref());
        assert_eq!(found, in_process(kind, &new, Some(&old)), "{new}");
        assert!(found.contains(&(blamed.to_owned(), rule.message.to_owned())), "{found:?}");
    }
    let api = server.api(Kind::Cluster, &namespace).await;
    let live = api.create(&PostParams::default(), &object(cluster())).await.expect("a sound cluster");
    let other = json!({
        "/metadata/resourceVersion": live.metadata.resource_version,
        "/spec/accelerator/acceleratorsPerNode": 4, "/spec/engine/image": "registry.example/deepinfer:2",
        "/spec/model/name": "n", "/spec/prefill/replicas": 3, "/spec/decode/supernode/nodes": 16,
    });
    let name = live.metadata.name.clone().expect("a name");
    api.replace(&name, &dry(), &object(with(cluster(), &other)))
        .await
        .expect("everything else can be changed");
}

#[tokio::test]
async fn a_value_of_the_wrong_type_or_size_is_refused_with_its_field() {
    let Some(server) = server().await else { return };
    let namespace = server.namespace("types").await;
    let api = server.api(Kind::Cluster, &namespace).await;
    let cases = [
        (json!({"/spec/decode/supernode/nodes": "eight"}), "spec.decode.supernode.nodes"),
        (json!({"/spec/decode/supernode/nodes": 129}), "spec.decode.supernode.nodes"),
        (json!({"/spec/prefill/replicas": -1}), "spec.prefill.replicas"),
        (json!({"/spec/accelerator/vendor": "tpu"}), "spec.accelerator.vendor"),
        (json!({"/spec/model": {"name": "m"}}), "spec.model.source"),
        (json!({"/spec/engine/env": [{"name": "A"}, {"name": "A"}]}), "spec.engine.env[1]"),
        (
            json!({"/spec/prefill/pod": {"resources": {"limits": {"cpu": "much"}}}}),
            "spec.prefill.pod.resources.limits.cpu",
        ),
    ];
    for (changes, field) in cases {
        let answer =
            refusal(api.create(&dry(), &object(with(cluster(), &changes))).await).expect("a refusal");
        let fields: Vec<&str> = answer.causes.iter().map(|(field, _)| field.as_str()).collect();
        assert!(fields.contains(&field), "{changes}: {}", answer.message);
    }
}
