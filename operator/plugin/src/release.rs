//! `release`: takes our finalizers off a deleted cluster whose operator is gone.
//! Invariants: nothing is changed without --yes; only objects that are being deleted, or whose cluster is, are let go;
//! finalizers of others stay.

use std::fmt::Write as _;

use anyhow::{Result, bail};
use deepinfer_crds::names::finalizer;
use deepinfer_crds::{DeepInferCluster, ObjectMeta, Supernode};
use k8s_openapi::api::coordination::v1::Lease;
use kube::api::{ListParams, Patch, PatchParams};
use kube::{Api, ResourceExt};
use serde_json::{Value, json};

use crate::args::ReleaseArgs;
use crate::client::{Session, now};
use crate::output::{self, Outcome};
use crate::view::name_of;
use deepinfer_crds::table::since;

/// Name of the operator's Lease.
const LEASE: &str = "deepinfer-operator";
/// A Lease renewed within this many seconds has a living holder.
const ALIVE_SECONDS: i64 = 60;

/// Says what would be let go; with --yes does it.
///
/// # Errors
/// If there is nothing to let go, or the API server refuses.
pub async fn run(session: &Session, args: &ReleaseArgs) -> Result<Outcome> {
    let name = args.name.as_str();
    let clusters = session.api::<DeepInferCluster>();
    let cluster = clusters
        .get_opt(name)
        .await
        .map_err(|e| session.explain(e, &format!("cannot read DeepInferCluster {name}")))?;
    let of_cluster = ListParams::default().fields(&format!("spec.clusterName={name}"));
    let supernodes: Vec<Supernode> = session.list(&session.api(), of_cluster, "Supernodes").await?;
    let held = held(cluster.as_ref(), &supernodes, name, &session.namespace)?;
    let operator = operator(session, &args.operator_namespace).await;
    output::print(&warning(name, &held, operator.as_deref(), args.yes))?;
    if !args.yes {
        return Ok(Outcome::Problem);
    }
    // Supernodes first: they hold what the cluster's end would wait for.
    for supernode in held.supernodes {
        let patch = without(&supernode.metadata, finalizer::DRAIN);
        let name = name_of(&supernode.metadata);
        let api = session.api::<Supernode>();
        patched(
            session,
            api.patch(name, &PatchParams::default(), &Patch::Merge(patch)).await,
            "Supernode",
            name,
        )?;
        output::print(&format!("Supernode {name} released\n"))?;
    }
    if let Some(cluster) = held.cluster {
        let patch = without(&cluster.metadata, finalizer::TEARDOWN);
        patched(
            session,
            clusters.patch(name, &PatchParams::default(), &Patch::Merge(patch)).await,
            "DeepInferCluster",
            name,
        )?;
        output::print(&format!("DeepInferCluster {name} released\n"))?;
    }
    Ok(Outcome::Good)
}

/// Objects that our finalizers hold.
#[derive(Debug)]
struct Held<'a> {
    cluster: Option<&'a DeepInferCluster>,
    supernodes: Vec<&'a Supernode>,
}

fn held<'a>(
    cluster: Option<&'a DeepInferCluster>,
    supernodes: &'a [Supernode],
    name: &str,
    namespace: &str,
) -> Result<Held<'a>> {
    let with = |meta: &ObjectMeta, ours: &str| meta.finalizers.iter().flatten().any(|f| f == ours);
    if let Some(cluster) = cluster
        && cluster.metadata.deletion_timestamp.is_none()
    {
        bail!(
            "DeepInferCluster {name} is not being deleted: kubectl delete dic {name} -n {namespace} first; release is \
             for a deletion that hangs because the operator is gone"
        );
    }
    let going = |s: &&Supernode| cluster.is_some() || s.metadata.deletion_timestamp.is_some();
    let supernodes: Vec<&Supernode> =
        supernodes.iter().filter(going).filter(|s| with(&s.metadata, finalizer::DRAIN)).collect();
    let cluster = cluster.filter(|c| with(&c.metadata, finalizer::TEARDOWN));
    if cluster.is_none() && supernodes.is_empty() {
        bail!(
            "nothing of DeepInferCluster {name} in namespace {namespace} is held by a finalizer of the operator"
        );
    }
    Ok(Held { cluster, supernodes })
}

/// Who holds the operator's Lease, if somebody living does. An unreadable Lease tells nothing.
async fn operator(session: &Session, namespace: &str) -> Option<String> {
    let lease = Api::<Lease>::namespaced(session.client.clone(), namespace).get_opt(LEASE).await.ok()??;
    let spec = lease.spec?;
    let renewed = spec.renew_time?.0.as_second();
    let holder = spec.holder_identity.filter(|h| !h.is_empty())?;
    (now() - renewed < ALIVE_SECONDS).then_some(holder)
}

fn warning(name: &str, held: &Held<'_>, operator: Option<&str>, yes: bool) -> String {
    let mut text = String::new();
    if let Some(holder) = operator {
        let _ = writeln!(
            text,
            "warning: an operator lives ({holder} holds its Lease) and deletes {name} itself; to skip its drains:\n  \
             kubectl annotate dic {name} {}=true",
            deepinfer_crds::names::annotation::FORCE_DELETE
        );
    }
    let _ = writeln!(text, "These are let go without draining; answers that still run on them are cut:");
    let age = |meta: &ObjectMeta| {
        meta.deletion_timestamp
            .as_ref()
            .map_or_else(String::new, |t| format!(", deleted {} ago", since(t, now())))
    };
    for supernode in &held.supernodes {
        let _ = writeln!(text, "  Supernode {}{}", supernode.name_any(), age(&supernode.metadata));
    }
    if let Some(cluster) = held.cluster {
        let _ = writeln!(text, "  DeepInferCluster {name}{}", age(&cluster.metadata));
    }
    if !yes {
        let _ = writeln!(text, "Nothing has been changed. Run again with --yes to let them go.");
    }
    text
}

/// A patch that takes one finalizer off, and fails if the object has changed meanwhile.
fn without(meta: &ObjectMeta, ours: &str) -> Value {
    let others: Vec<&String> = meta.finalizers.iter().flatten().filter(|f| *f != ours).collect();
    json!({"metadata": {"finalizers": others, "resourceVersion": meta.resource_version}})
}

fn patched<K>(session: &Session, outcome: kube::Result<K>, kind: &str, name: &str) -> Result<()> {
    match outcome {
        Ok(_) => Ok(()),
        // It went by itself.
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        Err(error) => Err(session.explain(error, &format!("cannot release {kind} {name}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cluster(meta: Value) -> DeepInferCluster {
        let spec = json!({
            "accelerator": {"vendor": "cpu"}, "engine": {"image": "i"},
            "model": {"name": "m", "source": {"uri": "file:///m"}},
            "prefill": {"replicas": 1}, "decode": {"replicas": 1, "supernode": {"nodes": 1}},
        });
        let object = json!({
            "apiVersion": "deepinfer.io/v1alpha1", "kind": "DeepInferCluster", "metadata": meta, "spec": spec
        });
        serde_json::from_value(object).expect("a cluster")
    }

    #[test]
    fn a_living_cluster_is_not_released() {
        let living = cluster(json!({"name": "a", "finalizers": ["deepinfer.io/teardown"]}));
        let error = held(Some(&living), &[], "a", "serving").expect_err("not deleted");
        assert!(error.to_string().contains("kubectl delete dic a -n serving first"), "{error}");
        assert!(held(None, &[], "a", "serving").is_err());
    }

    #[test]
    fn finalizers_of_others_stay() {
        let going = cluster(json!({
            "name": "a", "finalizers": ["x/y", "deepinfer.io/teardown"], "resourceVersion": "7",
            "deletionTimestamp": "2026-05-01T10:00:00Z"
        }));
        let held = held(Some(&going), &[], "a", "serving").expect("held");
        let patch = without(&held.cluster.expect("the cluster").metadata, finalizer::TEARDOWN);
        assert_eq!(patch, json!({"metadata": {"finalizers": ["x/y"], "resourceVersion": "7"}}));
        let text = warning("a", &held, Some("operator-1"), false);
        assert!(text.contains("force-delete=true") && text.contains("--yes"), "{text}");
    }
}
