//! The controllers that a world without Kubernetes lacks: Deployments become pods. Local mode, scripts and the
//! simulator call [`World::settle`] after each execution; a cluster never does.

use std::collections::BTreeMap;

use k8s_openapi::api::apps::v1::{Deployment, DeploymentStatus};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use crate::naming::{digest, random_part};
use crate::object::{Key, Kind, Object};
use crate::world::World;

/// Label with the hash of the pod's template, as the Deployment controller writes it.
const TEMPLATE_HASH: &str = "pod-template-hash";

/// Pods of a Deployment, by what is to become of them.
struct Members {
    /// Of the present template, by name.
    current: Vec<Member>,
    /// Of older templates, by name.
    old: Vec<Member>,
}

struct Member {
    name: String,
    ready: bool,
    created: String,
}

impl World {
    /// Lets every Deployment make and remove pods until it has what it wants. Ready pods of an old template go only
    /// as new ones become ready.
    pub fn settle(&mut self) {
        let deployments: Vec<Deployment> = self.deployments().cloned().collect();
        for deployment in deployments {
            self.settle_deployment(&deployment);
        }
    }

    fn settle_deployment(&mut self, deployment: &Deployment) {
        let (Some(name), Some(spec)) = (&deployment.metadata.name, &deployment.spec) else {
            return;
        };
        let wanted = usize::try_from(spec.replicas.unwrap_or(1)).unwrap_or(0);
        let hash = digest(&spec.template, 8);
        let members = self.members(deployment, &hash);
        let (surge, unavailable) = rolling(spec, wanted);
        let ready = |list: &[Member]| list.iter().filter(|m| m.ready).count();
        let total = members.current.len() + members.old.len();
        // New pods, up to the surge.
        let room = (wanted + surge).saturating_sub(total);
        for _ in 0..wanted.saturating_sub(members.current.len()).min(room) {
            self.make_pod(deployment, &hash);
        }
        // Too many of the present template: not ready first, then youngest.
        let mut surplus: Vec<&Member> = members.current.iter().collect();
        surplus.sort_by(|a, b| (a.ready, &b.created, &b.name).cmp(&(b.ready, &a.created, &a.name)));
        for member in surplus.iter().take(members.current.len().saturating_sub(wanted)) {
            self.end_pod(&member.name, "scaled down");
        }
        // Old ones: those that are not ready at once, ready ones as far as enough stay ready.
        let minimum = wanted.saturating_sub(unavailable);
        let mut spare = (ready(&members.current).min(wanted) + ready(&members.old)).saturating_sub(minimum);
        for member in &members.old {
            if !member.ready {
                self.end_pod(&member.name, "replaced by a new template");
            } else if spare > 0 {
                spare -= 1;
                self.end_pod(&member.name, "replaced by a new template");
            }
        }
        self.write_deployment_status(name, &hash, deployment);
    }

    fn members(&self, deployment: &Deployment, hash: &str) -> Members {
        let uid = deployment.metadata.uid.as_deref();
        let mut members = Members { current: Vec::new(), old: Vec::new() };
        for object in self.of(Kind::Pod) {
            let Object::Pod(pod) = object else { continue };
            if uid.is_none() || object.controller_uid() != uid || object.is_deleted() || has_ended(pod) {
                continue;
            }
            let created = pod.metadata.creation_timestamp.as_ref().map(|t| t.0.to_string());
            let member = Member {
                name: object.name().to_owned(),
                ready: is_ready(pod),
                created: created.unwrap_or_default(),
            };
            let current = object.label(TEMPLATE_HASH) == Some(hash);
            if current { members.current.push(member) } else { members.old.push(member) }
        }
        members
    }

    fn make_pod(&mut self, deployment: &Deployment, hash: &str) {
        let (Some(name), Some(spec)) = (&deployment.metadata.name, &deployment.spec) else {
            return;
        };
        let template = spec.template.metadata.clone().unwrap_or_default();
        let mut labels: BTreeMap<String, String> = template.labels.unwrap_or_default();
        labels.insert(TEMPLATE_HASH.to_owned(), hash.to_owned());
        let part = random_part(self.seed, self.writes);
        let pod = Pod {
            metadata: ObjectMeta {
                name: Some(format!("{name}-{hash}-{part}")),
                labels: Some(labels),
                annotations: template.annotations,
                owner_references: Some(vec![Object::from(deployment.clone()).owner_reference()]),
                ..ObjectMeta::default()
            },
            spec: spec.template.spec.clone(),
            status: None,
        };
        let _ = self.apply(&crate::action::Action::Create(Box::new(pod.into())));
    }

    fn end_pod(&mut self, name: &str, why: &str) {
        let _ = self.apply(&crate::action::Action::Delete {
            key: Key::new(Kind::Pod, name),
            uid: None,
            grace_seconds: None,
            why: why.to_owned(),
        });
    }

    fn write_deployment_status(&mut self, name: &str, hash: &str, deployment: &Deployment) {
        let members = self.members(deployment, hash);
        let count = |n: usize| i32::try_from(n).unwrap_or(i32::MAX);
        let ready = members.current.iter().chain(&members.old).filter(|m| m.ready).count();
        let status = DeploymentStatus {
            observed_generation: deployment.metadata.generation,
            replicas: Some(count(members.current.len() + members.old.len())),
            ready_replicas: Some(count(ready)),
            available_replicas: Some(count(ready)),
            updated_replicas: Some(count(members.current.len())),
            ..DeploymentStatus::default()
        };
        if let Some(Object::Deployment(live)) = self.objects.get_mut(&Key::new(Kind::Deployment, name)) {
            live.status = Some(status);
        }
    }
}

/// Whether the pod's Ready condition is true.
pub fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.as_ref().and_then(|s| s.conditions.as_deref()).unwrap_or_default();
    conditions.iter().any(|c| c.type_ == "Ready" && c.status == "True")
}

/// Whether the pod's containers have ended for good.
pub fn has_ended(pod: &Pod) -> bool {
    matches!(pod.status.as_ref().and_then(|s| s.phase.as_deref()), Some("Failed" | "Succeeded"))
}

/// Pods above and below the wanted number during a change of template. Percentages: as Kubernetes' default, 25 %,
/// surge rounded up and unavailability down.
fn rolling(spec: &k8s_openapi::api::apps::v1::DeploymentSpec, wanted: usize) -> (usize, usize) {
    let rolling = spec.strategy.as_ref().and_then(|s| s.rolling_update.as_ref());
    let count = |value: Option<&IntOrString>, up: bool| match value {
        Some(IntOrString::Int(n)) => usize::try_from(*n).unwrap_or(0),
        _ if up => wanted.div_ceil(4),
        _ => wanted / 4,
    };
    let surge = count(rolling.and_then(|r| r.max_surge.as_ref()), true);
    let unavailable = count(rolling.and_then(|r| r.max_unavailable.as_ref()), false);
    if surge == 0 && unavailable == 0 { (1, 0) } else { (surge, unavailable) }
}
