//! The object that tells a backend of a gang.

use deepinfer_crds::PoolRole;
use deepinfer_crds::cluster::SchedulingBackend;
use deepinfer_crds::names::label;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::{Value, json};

use super::{Gang, ascend};
use crate::naming::{self, Component};
use crate::nodes::NativeVersion;
use crate::object::Foreign;

/// The PodGroup of an incarnation, which has its name; `None` for backends without one, and for a native API that is
/// not served (any more). Made before the pods, never changed: schedulers forbid it.
pub(crate) fn object(gang: &Gang<'_>) -> Option<Foreign> {
    let (api_version, spec) = match gang.supernode.spec.backend {
        SchedulingBackend::Native => native(gang, gang.apis.native_gang?),
        SchedulingBackend::Volcano => ("scheduling.volcano.sh/v1beta1", volcano(gang)),
        SchedulingBackend::Kai => ("scheduling.run.ai/v2alpha2", kai(gang)),
        SchedulingBackend::Kueue | SchedulingBackend::Builtin | SchedulingBackend::Auto => return None,
    };
    let mut metadata = json!({"name": gang.name(), "labels": labels(gang)});
    if gang.supernode.spec.backend == SchedulingBackend::Volcano && gang.super_pod() {
        ascend::super_pod(&mut metadata, gang.accelerators());
    }
    let metadata: ObjectMeta = crate::cluster::children::typed(metadata);
    Some(Foreign {
        api_version: api_version.to_owned(),
        kind: "PodGroup".to_owned(),
        metadata,
        spec,
        status: Value::Null,
    })
}

fn labels(gang: &Gang<'_>) -> std::collections::BTreeMap<String, String> {
    let spec = &gang.supernode.spec;
    let component = match spec.role {
        PoolRole::Prefill => Some(Component::Prefill),
        PoolRole::Decode => Some(Component::Decode),
        PoolRole::Vision => None,
    };
    let mut labels = naming::labels(&spec.cluster_name, component);
    labels.insert(label::SUPERNODE.to_owned(), gang.name().to_owned());
    labels
}

fn native(gang: &Gang<'_>, version: NativeVersion) -> (&'static str, Value) {
    let mut spec = json!({"schedulingPolicy": {"gang": {"minCount": gang.pods()}}});
    if let Some(key) = gang.domain_label().filter(|_| gang.apis.native_topology) {
        spec["schedulingConstraints"] = json!({"topology": [{"key": key}]});
    }
    if let Some(class) = gang.priority_class {
        spec["priorityClassName"] = json!(class);
    }
    // Preempting one pod is losing all: the scheduler should know.
    match version {
        NativeVersion::V1Alpha2 => {
            spec["disruptionMode"] = json!("PodGroup");
            ("scheduling.k8s.io/v1alpha2", spec)
        }
        NativeVersion::V1Beta1 => {
            spec["disruptionMode"] = json!({"all": {}});
            ("scheduling.k8s.io/v1beta1", spec)
        }
    }
}

fn volcano(gang: &Gang<'_>) -> Value {
    let mut spec = json!({"minMember": gang.pods()});
    if let Some(queue) = gang.queue {
        spec["queue"] = json!(queue);
    }
    if let Some(class) = gang.priority_class {
        spec["priorityClassName"] = json!(class);
    }
    // So that a queue admits the whole gang or nothing of it.
    if let Some((resource, amount)) = gang.resource {
        spec["minResources"] = json!({resource: (amount * i64::from(gang.pods())).to_string()});
    }
    if gang.profile.has_domains() && gang.profile.volcano_tier > 0 {
        spec["networkTopology"] = json!({"mode": "hard", "highestTierAllowed": gang.profile.volcano_tier});
    }
    spec
}

fn kai(gang: &Gang<'_>) -> Value {
    let mut spec = json!({"minMember": gang.pods()});
    if let Some(queue) = gang.queue {
        spec["queue"] = json!(queue);
    }
    if let Some(class) = gang.priority_class {
        spec["priorityClassName"] = json!(class);
    }
    let topology = &gang.profile.kai_topology;
    if let Some(key) = gang.domain_label().filter(|_| !topology.is_empty()) {
        spec["topologyConstraint"] = json!({"topology": topology, "requiredTopologyLevel": key});
    }
    spec
}
