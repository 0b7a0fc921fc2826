//! The kinds that belong to a cluster, read without knowing their types.
//! Invariant: kinds that an API server does not serve are no error.

use anyhow::{Result, anyhow};
use deepinfer_crds::names::{self, label};
use kube::Api;
use kube::api::{ApiResource, DynamicObject, ListParams};
use kube::core::GroupVersionKind;
use serde_json::Value;

use super::redact;
use crate::client::Session;

/// A kind to read.
#[derive(Clone, Copy, Debug)]
pub struct ObjectKind {
    group: &'static str,
    version: &'static str,
    kind: &'static str,
    plural: &'static str,
    /// Whether only objects with the cluster's label are read, or all of the namespace.
    labelled: bool,
}

impl ObjectKind {
    /// Its folder in the archive.
    pub fn folder(&self) -> String {
        match self.group {
            "" | names::GROUP => self.plural.to_owned(),
            group => format!("{}.{group}", self.plural),
        }
    }
}

const fn kind(
    group: &'static str,
    version: &'static str,
    kind: &'static str,
    plural: &'static str,
) -> ObjectKind {
    ObjectKind { group, version, kind, plural, labelled: true }
}

const fn all(mut kind: ObjectKind) -> ObjectKind {
    kind.labelled = false;
    kind
}

/// All of them. Secrets are not among them.
pub const KINDS: &[ObjectKind] = &[
    kind(names::GROUP, names::VERSION, "DeepInferPool", "deepinferpools"),
    kind(names::GROUP, names::VERSION, "Supernode", "supernodes"),
    kind(names::GROUP, names::VERSION, "ExpertPlacement", "expertplacements"),
    kind("", "v1", "Pod", "pods"),
    kind("", "v1", "Service", "services"),
    kind("", "v1", "ConfigMap", "configmaps"),
    kind("", "v1", "PersistentVolumeClaim", "persistentvolumeclaims"),
    kind("discovery.k8s.io", "v1", "EndpointSlice", "endpointslices"),
    kind("apps", "v1", "Deployment", "deployments"),
    kind("apps", "v1", "StatefulSet", "statefulsets"),
    kind("apps", "v1", "ControllerRevision", "controllerrevisions"),
    kind("policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets"),
    kind("networking.k8s.io", "v1", "NetworkPolicy", "networkpolicies"),
    kind("scheduling.k8s.io", "v1alpha2", "PodGroup", "podgroups"),
    kind("scheduling.k8s.io", "v1beta1", "PodGroup", "podgroups"),
    kind("scheduling.volcano.sh", "v1beta1", "PodGroup", "podgroups"),
    kind("scheduling.run.ai", "v2alpha2", "PodGroup", "podgroups"),
    kind("resource.nvidia.com", "v1beta1", "ComputeDomain", "computedomains"),
    // Written by users, so they carry no label of ours.
    all(kind("", "v1", "ResourceQuota", "resourcequotas")),
    all(kind("", "v1", "PodTemplate", "podtemplates")),
    all(kind("autoscaling", "v2", "HorizontalPodAutoscaler", "horizontalpodautoscalers")),
];

/// Objects of a kind by name, redacted.
///
/// # Errors
/// What the API server answers, unless it does not serve the kind.
pub async fn read(session: &Session, kind: &ObjectKind, cluster: &str) -> Result<Vec<(String, Value)>> {
    let gvk = GroupVersionKind::gvk(kind.group, kind.version, kind.kind);
    let resource = ApiResource::from_gvk_with_plural(&gvk, kind.plural);
    let api: Api<DynamicObject> = Api::namespaced_with(session.client.clone(), &session.namespace, &resource);
    let mut params = ListParams::default();
    if kind.labelled {
        params = params.labels(&format!("{}={cluster}", label::CLUSTER));
    }
    let list = match api.list(&params).await {
        Ok(list) => list.items,
        Err(kube::Error::Api(status)) if status.code == 404 => return Ok(Vec::new()),
        Err(error) => return Err(anyhow!("{error}")),
    };
    let mut found = Vec::with_capacity(list.len());
    for object in list {
        let name = object.metadata.name.clone().unwrap_or_default();
        let mut value = serde_json::to_value(object)?;
        // Lists leave the kind of their elements out.
        value["apiVersion"] = resource.api_version.clone().into();
        value["kind"] = resource.kind.clone().into();
        match kind.kind {
            "ConfigMap" => {
                let owned = value["metadata"]["ownerReferences"].as_array().is_some_and(|o| !o.is_empty());
                // The engine's configuration is the user's text in a ConfigMap of ours.
                redact::config_map(&mut value, owned && !name.contains("-engine-"));
            }
            _ => redact::object(&mut value),
        }
        found.push((name, value));
    }
    found.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(found)
}
