//! The admission policies: who may write what the operator owns, and what a refused person learns.

use deepinfer_crds::crd::Kind;
use deepinfer_crds::names::rbac;
use k8s_openapi::api::admissionregistration::v1::ValidatingAdmissionPolicy;
use kube::api::{DeleteParams, DynamicObject, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::{Value, json};

use crate::cases::{cluster, placement, supernode, with};
use crate::kit::{Server, api, object, refusal, server};

/// A person with every right on our kinds in a namespace, and nothing else.
async fn editor(server: &Server, namespace: &str) -> Client {
    let rights = format!(
        "apiVersion: rbac.authorization.k8s.io/v1\nkind: Role\nmetadata: {{name: editor, namespace: {namespace}}}\n\
         rules: [{{apiGroups: [deepinfer.io], resources: ['*'], verbs: ['*']}}]\n---\n\
         apiVersion: rbac.authorization.k8s.io/v1\nkind: RoleBinding\nmetadata: {{name: editor, namespace: {namespace}}}\n\
         roleRef: {{apiGroup: rbac.authorization.k8s.io, kind: Role, name: editor}}\n\
         subjects: [{{apiGroup: rbac.authorization.k8s.io, kind: User, name: alice}}]\n"
    );
    server.plane.apply_yaml(&rights).await.expect("rights for alice");
    server.client_as("alice", &[]).await
}

fn pool() -> Value {
    json!({
        "apiVersion": "deepinfer.io/v1alpha1", "kind": "DeepInferPool", "metadata": {"name": "v41-decode", "labels": {"a": "b"}},
        "spec": {
            "clusterName": "v41", "role": "decode", "replicas": 2, "mode": "External", "minReplicas": 1,
            "maxReplicas": 4, "nodesPerReplica": 8, "revision": "v41-1", "kvEpoch": "a81f03", "templateHash": "0f",
            "rollout": {"maxSurge": 1}, "drain": {"timeoutSeconds": 600},
        },
    })
}

fn owned() -> [(Kind, Value); 3] {
    [(Kind::Pool, pool()), (Kind::Supernode, supernode()), (Kind::Placement, placement())]
}

async fn merge(api: &Api<DynamicObject>, name: &str, patch: Value) -> Option<String> {
    refusal(api.patch(name, &PatchParams::default(), &Patch::Merge(patch)).await).map(|r| {
        assert_eq!(r.code, 403, "{}", r.message);
        r.message
    })
}

fn name(value: &Value) -> &str {
    value["metadata"]["name"].as_str().expect("a name")
}

#[tokio::test]
async fn the_server_finds_no_fault_in_the_policies() {
    let Some(server) = server().await else { return };
    let all: Api<ValidatingAdmissionPolicy> = Api::all(server.plane.client());
    for policy in deepinfer_crds::policy::policies(rbac::OPERATOR_USER) {
        let name = policy.policy.metadata.name.expect("a name");
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(30);
        loop {
            let live = all.get(&name).await.expect("installed");
            let checked =
                live.status.as_ref().and_then(|s| s.observed_generation) == live.metadata.generation;
            if checked {
                let warnings = live.status.and_then(|s| s.type_checking).and_then(|t| t.expression_warnings);
                assert_eq!(warnings.unwrap_or_default(), [], "{name}");
                break;
            }
            assert!(std::time::Instant::now() < deadline, "{name} is not checked");
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        }
    }
}

#[tokio::test]
async fn a_person_with_edit_rights_can_not_make_change_or_delete_what_the_operator_owns() {
    let Some(server) = server().await else { return };
    let ns = server.namespace("owned").await;
    let alice = editor(server, &ns).await;
    for (kind, value) in owned() {
        let theirs = api(alice.clone(), kind, &ns);
        let made =
            refusal(theirs.create(&PostParams::default(), &object(value.clone())).await).expect("refused");
        assert_eq!(made.code, 403);
        let wanted =
            format!("a {} is made by the operator: create or edit a DeepInferCluster instead", kind.name());
        assert!(
            made.message.contains(&wanted) && made.message.contains("deepinfer:admins"),
            "{}",
            made.message
        );
        server
            .api(kind, &ns)
            .await
            .create(&PostParams::default(), &object(value.clone()))
            .await
            .expect("made by an admin");
        let label = merge(&theirs, name(&value), json!({"metadata": {"labels": {"x": "y"}}})).await;
        let label = label.expect("labels choose pods and children");
        let wanted = if kind == Kind::Pool {
            "kubectl scale dip v41-decode"
        } else {
            "edit the DeepInferCluster instead"
        };
        assert!(label.contains(wanted), "{label}");
        let status = json!({"status": {"observedGeneration": 1}});
        let status =
            refusal(theirs.patch_status(name(&value), &PatchParams::default(), &Patch::Merge(status)).await);
        assert!(status.expect("refused").message.contains("is written by the operator only"));
        let gone = refusal(theirs.delete(name(&value), &DeleteParams::default()).await).expect("refused");
        assert!(
            gone.message.contains(&format!("a {} is deleted by the operator", kind.name())),
            "{}",
            gone.message
        );
    }
}

#[tokio::test]
async fn of_a_pool_everybody_may_write_the_replicas_and_only_them() {
    let Some(server) = server().await else { return };
    let ns = server.namespace("replicas").await;
    let alice = api(editor(server, &ns).await, Kind::Pool, &ns);
    server.api(Kind::Pool, &ns).await.create(&PostParams::default(), &object(pool())).await.expect("made");
    assert_eq!(merge(&alice, "v41-decode", json!({"spec": {"replicas": 3}})).await, None);
    assert_eq!(
        merge(&alice, "v41-decode", json!({"spec": {"replicas": null}})).await,
        None,
        "and take them away"
    );
    let scale = json!({"spec": {"replicas": 4}});
    alice
        .patch_scale("v41-decode", &PatchParams::default(), &Patch::Merge(scale))
        .await
        .expect("as an autoscaler does");
    let others = [
        json!({"spec": {"replicas": 5, "maxReplicas": 9}}),
        json!({"spec": {"drain": {"timeoutSeconds": 1}}}),
        json!({"spec": {"recovery": {"maxRestarts": 1}}}),
        json!({"metadata": {"labels": {"a": "c"}}}),
        json!({"metadata": {"labels": null}}),
        json!({"metadata": {"finalizers": ["x/y"]}}),
        json!({"metadata": {"annotations": {"a": "b"}}}),
    ];
    for patch in others {
        let said = merge(&alice, "v41-decode", patch.clone()).await;
        let said = said.unwrap_or_else(|| panic!("{patch} was accepted"));
        assert!(said.contains("only spec.replicas of a DeepInferPool can be changed"), "{said}");
    }
}

#[tokio::test]
async fn the_operator_the_control_plane_and_administrators_may_do_it_all() {
    let Some(server) = server().await else { return };
    let ns = server.namespace("trusted").await;
    let trusted: [(&str, &[&str]); 4] = [
        (rbac::OPERATOR_USER, &["system:masters"]),
        ("system:serviceaccount:kube-system:generic-garbage-collector", &["system:masters"]),
        ("system:serviceaccount:kube-system:namespace-controller", &["system:masters"]),
        ("root", &["system:masters", rbac::ADMINS_GROUP]),
    ];
    for (user, groups) in trusted {
        let client = server.client_as(user, groups).await;
        for (kind, value) in owned() {
            let api = api(client.clone(), kind, &ns);
            api.create(&PostParams::default(), &object(value.clone()))
                .await
                .unwrap_or_else(|e| panic!("{user}: {e}"));
            assert_eq!(
                merge(&api, name(&value), json!({"metadata": {"labels": {"x": "y"}}})).await,
                None,
                "{user}"
            );
            let status = Patch::Merge(json!({"status": {"observedGeneration": 1}}));
            api.patch_status(name(&value), &PatchParams::default(), &status)
                .await
                .unwrap_or_else(|e| panic!("{user}: {e}"));
            api.delete(name(&value), &DeleteParams::default())
                .await
                .unwrap_or_else(|e| panic!("{user}: {e}"));
        }
    }
}

#[tokio::test]
async fn children_of_a_deleted_cluster_are_collected_although_nobody_may_delete_them() {
    let Some(server) = server().await else { return };
    let ns = server.namespace("collected").await;
    let alice = editor(server, &ns).await;
    let clusters = api(alice, Kind::Cluster, &ns);
    let parent = clusters.create(&PostParams::default(), &object(cluster())).await.expect("her own cluster");
    let owner = json!([{
        "apiVersion": "deepinfer.io/v1alpha1", "kind": "DeepInferCluster", "name": "v41-flash",
        "uid": parent.metadata.uid, "controller": true, "blockOwnerDeletion": true,
    }]);
    let children = server.api(Kind::Supernode, &ns).await;
    let child = with(supernode(), &json!({"/metadata/ownerReferences": owner}));
    children.create(&PostParams::default(), &object(child)).await.expect("made");
    clusters.delete("v41-flash", &DeleteParams::foreground()).await.expect("her own cluster");
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while children.get_opt("v41-decode-bcdfg").await.expect("an answer").is_some()
        || clusters.get_opt("v41-flash").await.expect("an answer").is_some()
    {
        assert!(std::time::Instant::now() < deadline, "the garbage collector is kept out");
        tokio::time::sleep(std::time::Duration::from_millis(200)).await;
    }
}

#[tokio::test]
async fn a_protected_cluster_is_not_deleted_until_the_annotation_goes() {
    let Some(server) = server().await else { return };
    let ns = server.namespace("protected").await;
    let api = server.api(Kind::Cluster, &ns).await;
    let protected = with(cluster(), &json!({"/metadata/annotations": {"deepinfer.io/protect": "true"}}));
    api.create(&PostParams::default(), &object(protected)).await.expect("made");
    let said = refusal(api.delete("v41-flash", &DeleteParams::default()).await).expect("refused").message;
    let command = format!("kubectl annotate dic v41-flash -n {ns} deepinfer.io/protect-");
    assert!(said.contains(&command), "{said}");
    let all =
        refusal(api.delete_collection(&DeleteParams::default(), &kube::api::ListParams::default()).await);
    assert!(
        all.is_some() || api.get_opt("v41-flash").await.expect("an answer").is_some(),
        "deleted with all others"
    );
    assert_eq!(
        merge(&api, "v41-flash", json!({"metadata": {"annotations": {"deepinfer.io/protect": "no"}}})).await,
        None
    );
    api.delete("v41-flash", &DeleteParams::default()).await.expect("no longer protected");
}

#[tokio::test]
async fn a_namespace_that_goes_takes_protected_clusters_and_owned_objects_with_it() {
    let Some(server) = server().await else { return };
    let ns = server.namespace("going").await;
    let protected = with(cluster(), &json!({"/metadata/annotations": {"deepinfer.io/protect": "true"}}));
    server
        .api(Kind::Cluster, &ns)
        .await
        .create(&PostParams::default(), &object(protected))
        .await
        .expect("made");
    for (kind, value) in owned() {
        server.api(kind, &ns).await.create(&PostParams::default(), &object(value)).await.expect("made");
    }
    server.kubectl(&["delete", "namespace", &ns, "--timeout=90s"]).await;
}
