//! Everything of one cluster at one moment.

#[cfg(test)]
pub mod fixture;

use anyhow::{Result, bail};
use deepinfer_crds::names::label;
use deepinfer_crds::{DeepInferCluster, DeepInferPool, ExpertPlacement, ObjectMeta, Supernode};
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use serde::Serialize;

use crate::client::{Session, now};

/// A cluster with its children.
#[derive(Clone, Debug, Serialize)]
pub struct View {
    /// When it was read, in seconds since 1970.
    pub now: i64,
    /// The cluster.
    pub cluster: DeepInferCluster,
    /// Its pools by name.
    pub pools: Vec<DeepInferPool>,
    /// Its supernodes by name.
    pub supernodes: Vec<Supernode>,
    /// Its placements by name.
    pub placements: Vec<ExpertPlacement>,
    /// Its pods by name.
    pub pods: Vec<Pod>,
}

/// All clusters of the namespace by name.
///
/// # Errors
/// What the API server answers.
pub async fn clusters(session: &Session) -> Result<Vec<DeepInferCluster>> {
    let mut all = session.list(&session.api(), ListParams::default(), "DeepInferClusters").await?;
    all.sort_by_key(|c: &DeepInferCluster| c.metadata.name.clone());
    Ok(all)
}

/// The named cluster, or the only one.
///
/// # Errors
/// If there is none, or there are several.
pub async fn choose(session: &Session, name: Option<&str>) -> Result<DeepInferCluster> {
    let mut all = clusters(session).await?;
    match name {
        Some(wanted) => match all.iter().position(|c| name_of(&c.metadata) == wanted) {
            Some(at) => Ok(all.swap_remove(at)),
            None => bail!("{}", missing("DeepInferCluster", wanted, &session.namespace, &names(&all))),
        },
        None => match all.len() {
            1 => Ok(all.remove(0)),
            0 => bail!("{}", none(&session.namespace)),
            _ => bail!(
                "several clusters are in namespace {}, name one: {}",
                session.namespace,
                names(&all).join(", ")
            ),
        },
    }
}

/// A cluster with its children.
///
/// # Errors
/// What the API server answers.
pub async fn gather(session: &Session, cluster: DeepInferCluster) -> Result<View> {
    let name = name_of(&cluster.metadata).to_owned();
    let of_cluster = ListParams::default().fields(&format!("spec.clusterName={name}"));
    let labelled = ListParams::default().labels(&format!("{}={name}", label::CLUSTER));
    let (pool_api, supernode_api, placement_api, pod_api) =
        (session.api(), session.api(), session.api(), session.api());
    let (pools, supernodes, placements, pods) = tokio::try_join!(
        session.list(&pool_api, of_cluster.clone(), "DeepInferPools"),
        session.list(&supernode_api, of_cluster, "Supernodes"),
        session.list(&placement_api, ListParams::default(), "ExpertPlacements"),
        session.list(&pod_api, labelled, "pods"),
    )?;
    let placements =
        placements.into_iter().filter(|p: &ExpertPlacement| p.spec.cluster_name == name).collect();
    let mut view = View { now: now(), cluster, pools, supernodes, placements, pods };
    view.sort();
    Ok(view)
}

impl View {
    fn sort(&mut self) {
        self.pools.sort_by_key(|o| o.metadata.name.clone());
        self.supernodes.sort_by_key(|o| o.metadata.name.clone());
        self.placements.sort_by_key(|o| o.metadata.name.clone());
        self.pods.sort_by_key(|o| o.metadata.name.clone());
    }

    /// Pods of a supernode.
    pub fn pods_of(&self, supernode: &str) -> impl Iterator<Item = &Pod> {
        self.pods.iter().filter(move |pod| label_of(&pod.metadata, label::SUPERNODE) == Some(supernode))
    }

    /// Pods of no supernode: prefill workers, gateways.
    pub fn other_pods(&self) -> impl Iterator<Item = &Pod> {
        self.pods.iter().filter(|pod| label_of(&pod.metadata, label::SUPERNODE).is_none())
    }
}

/// Name of an object.
pub fn name_of(meta: &ObjectMeta) -> &str {
    meta.name.as_deref().unwrap_or_default()
}

/// A label of an object.
pub fn label_of<'a>(meta: &'a ObjectMeta, name: &str) -> Option<&'a str> {
    meta.labels.as_ref()?.get(name).map(String::as_str)
}

fn names(all: &[DeepInferCluster]) -> Vec<&str> {
    all.iter().map(|c| name_of(&c.metadata)).collect()
}

/// What to say when a name is not there.
pub fn missing(kind: &str, wanted: &str, namespace: &str, known: &[&str]) -> String {
    let others = match known {
        [] => "there is none".to_owned(),
        known => format!("there is {}", known.join(", ")),
    };
    format!("no {kind} {wanted} in namespace {namespace}: {others}; -n chooses another namespace")
}

/// What to say when there is no cluster.
pub fn none(namespace: &str) -> String {
    format!(
        "no DeepInferCluster in namespace {namespace}: -n chooses another namespace, kubectl apply -f makes one"
    )
}
