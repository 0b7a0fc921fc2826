//! The place of an incarnation: one domain with room for the whole gang, or nothing at all (operator.md 6).
//!
//! Without room nothing is made and no accelerator is held. With the built-in backend pods are made behind a gate,
//! bound to one domain; when all are there and the room still is, all gates are lifted in one plan.

use std::collections::{BTreeMap, BTreeSet};

use deepinfer_crds::Supernode;
use deepinfer_crds::cluster::SchedulingBackend;
use deepinfer_crds::condition::{self, kind, reason};
use deepinfer_crds::supernode::PlacementStatus;
use k8s_openapi::api::core::v1::{Pod, Toleration};
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::gang::{self, Gang};
use super::phase::{Failure, Seen, failure, is_gated};
use super::{fabric, pods};
use crate::action::{Action, EventKind, PodChange};
use crate::cluster::resolve::{Placing, Resolved};
use crate::cluster::template::Template;
use crate::nodes::Promise;
use crate::object::{Key, Kind, Object};
use crate::step::Step;
use crate::topology::{self, Need, Placement, Survey, Verdict};

/// Annotation of a pod with the domain that its gang was given: label and value.
pub(crate) const DOMAIN: &str = "deepinfer.io/domain";

/// Failure of a gang whose room somebody else took before it began. It is followed after the usual wait and never uses
/// up the retries: where many ask for the same room nothing is wrong with those that come late.
pub(crate) const ROOM_TAKEN: &str = "RoomTaken";

/// What the pool knows that the incarnation does not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Surroundings {
    pub excluded_nodes: BTreeSet<String>,
    pub excluded_domains: BTreeSet<String>,
    /// Domains by supernode of the pool.
    pub domains: BTreeMap<String, String>,
}

/// What an incarnation with this template needs.
pub(crate) fn need(
    step: &Step<'_>,
    resolved: &Resolved,
    placing: &Placing,
    template: &Template,
    around: &Surroundings,
    supernode: Option<&Supernode>,
) -> Need {
    let spec = &template.pod["spec"];
    let name = supernode.and_then(|sn| sn.metadata.name.clone()).unwrap_or_default();
    let replaced = supernode.and_then(|sn| sn.spec.domain_preference.first().cloned());
    let tolerations: Vec<Toleration> = read(&spec["tolerations"]);
    let others =
        around.domains.iter().filter(|(sn, domain)| **sn != name && replaced.as_ref() != Some(domain));
    let compute_domain = match supernode {
        Some(supernode) => supernode.spec.compute_domain == Some(true),
        None => {
            let apis = &step.world.apis;
            fabric::wanted(placing.compute_domain, resolved.vendor, &placing.profile, apis).unwrap_or(false)
        }
    };
    Need {
        me: (step.world.namespace.clone(), name.clone()),
        pods: template.nodes,
        resource: resource(resolved, template),
        tolerations,
        node_selector: read(&spec["nodeSelector"]),
        excluded_nodes: around.excluded_nodes.clone(),
        excluded_domains: around.excluded_domains.clone(),
        compute_domain,
        per_clique: placing.per_clique,
        preferred: replaced.clone(),
        occupied: others.map(|(_, domain)| domain.clone()).collect(),
        spread_required: placing.spread_required,
        gated: false,
    }
}

fn read<T: DeserializeOwned + Default>(value: &Value) -> T {
    serde_json::from_value(value.clone()).unwrap_or_default()
}

/// The device resource of a pod and how much of it.
fn resource(resolved: &Resolved, template: &Template) -> Option<(String, i64)> {
    let name = resolved.resource.clone()?;
    let containers = template.pod["spec"]["containers"].as_array()?;
    let limit = |container: &Value| container["resources"]["limits"][&name].as_str()?.parse::<i64>().ok();
    let count = containers.iter().filter_map(limit).sum();
    Some((name, count))
}

/// Whether another member of the pool could be placed now. Where the scheduler decides, the answer is yes.
pub(crate) fn has_room(
    step: &Step<'_>,
    resolved: &Resolved,
    template: &Template,
    around: &Surroundings,
) -> bool {
    let Some(placing) = &resolved.placing else { return true };
    let need = need(step, resolved, placing, template, around, None);
    matches!(topology::survey(step.nodes(), &placing.profile, &need).verdict, Verdict::Fits(_))
}

/// After binding: all pods sit in one domain. A scheduler that got it wrong shows here.
pub(crate) fn violated(step: &Step<'_>, placing: &Placing, seen: &Seen) -> Result<Option<String>, Failure> {
    let bound: Vec<(String, String)> =
        seen.nodes.iter().filter_map(|pod| Some((pod.pod.clone(), pod.node.clone()?))).collect();
    topology::one_domain(step.nodes(), &placing.profile, &bound).map_err(|message| {
        let pod = bound.first().map_or("", |(pod, _)| pod.as_str());
        failure(pod, "PlacementViolated", &message, None)
    })
}

/// A gang behind our gate whose room was found taken by an earlier look. Its pods are bound to their domain and can
/// only be made anew elsewhere: it is given up at once if another domain has room, else after its time-out. `None`: it
/// waits on, or its room is there again.
pub(crate) fn outrun(
    step: &Step<'_>,
    supernode: &Supernode,
    seen: &Seen,
    (resolved, placing): (&Resolved, &Placing),
    template: &Template,
    around: &Surroundings,
) -> Option<Failure> {
    if !seen.no_room || seen.gated == 0 || seen.gated < seen.made || seen.made < supernode.spec.nodes {
        return None;
    }
    let made = pods_of(step, supernode);
    let chosen = made.iter().find_map(chosen)?;
    let mut need = need(step, resolved, placing, template, around, Some(supernode));
    (need.preferred, need.gated) = (Some(chosen.domain.clone()), true);
    let pod = seen.nodes.first().map_or("", |pod| pod.pod.as_str());
    match topology::survey(step.nodes(), &placing.profile, &need).verdict {
        Verdict::Fits(Some(found)) if found.domain != chosen.domain => {
            let message = format!("its room in {} was taken, and {} has room", chosen.domain, found.domain);
            Some(failure(pod, ROOM_TAKEN, &message, None))
        }
        Verdict::Fits(_) => None,
        Verdict::NotNow { .. } | Verdict::Never { .. } => {
            let limit = placing.gang_timeout;
            let message = format!("its room in {} was taken, and none came within {limit} s", chosen.domain);
            let waited = step.world.now - seen.first_made.unwrap_or(seen.created);
            (waited > limit).then(|| failure(pod, "GangTimeout", &message, None))
        }
    }
}

/// Plans the place and the pods of an incarnation that is not placed yet; gives what is said about it.
pub(crate) fn plan(
    step: &mut Step<'_>,
    supernode: &Supernode,
    seen: &Seen,
    (resolved, placing): (&Resolved, &Placing),
    template: &Template,
    around: &Surroundings,
) -> PlacementStatus {
    let before = supernode.status.clone().unwrap_or_default().placement.unwrap_or_default();
    let made: Vec<Pod> = pods_of(step, supernode);
    if seen.placed() {
        return PlacementStatus { domain: before.domain, ..PlacementStatus::default() };
    }
    let chosen = made.iter().find_map(chosen);
    let mut need = need(step, resolved, placing, template, around, Some(supernode));
    if let Some(placement) = &chosen {
        need.preferred = Some(placement.domain.clone());
    }
    need.gated = made.len() as u32 >= supernode.spec.nodes && seen.gated == seen.made;
    let survey = step.survey(&placing.profile, need, made.is_empty());
    let mut said = PlacementStatus {
        domain: chosen.as_ref().map(|placement| placement.domain.clone()),
        candidates: survey.candidates.clone(),
        ..PlacementStatus::default()
    };
    let complete = made.len() as u32 >= supernode.spec.nodes;
    if !complete {
        let known = supernode.status.as_ref().is_some_and(|status| !status.nodes.is_empty());
        if !known {
            let placement = if made.is_empty() { None } else { Some(chosen) };
            said.domain = create(step, supernode, (resolved, placing), template, around, &survey, placement);
        }
        return said;
    }
    if seen.gated > 0 {
        let same = match &survey.verdict {
            Verdict::Fits(found) => found.as_ref().map(|p| &p.domain) == chosen.as_ref().map(|p| &p.domain),
            Verdict::NotNow { .. } | Verdict::Never { .. } => false,
        };
        if same || seen.gated < seen.made {
            lift(step, &made);
        } else {
            let key = Object::from(supernode.clone()).key();
            let message = "the room that it was made for is taken; it is given up when another domain has room, or \
                           after the gang's time-out";
            step.wait(&key, topology::reason::NOT_ENOUGH_FREE, seen.created, message);
        }
        return said;
    }
    // Somebody else binds the pods; their scheduler says what it waits for.
    let gang = match step.world.get(Kind::Gang, supernode.metadata.name.as_deref().unwrap_or_default()) {
        Some(Object::Gang(gang)) => Some(gang),
        _ => None,
    };
    let unbound: Vec<&Pod> = made.iter().filter(|pod| super::phase::node_of(pod).is_none()).collect();
    said.scheduler_message = gang::scheduler_message(&unbound, gang);
    let key = Object::from(supernode.clone()).key();
    let message =
        said.scheduler_message.clone().unwrap_or_else(|| "the scheduler has not said why".to_owned());
    let message = format!("{} of {} pods have a node: {message}", seen.bound, seen.made);
    step.wait(&key, "SchedulerPending", seen.created, message);
    said
}

/// Makes everything that a new incarnation needs, in order: fabric, gang object, pods. Gives the domain.
fn create(
    step: &mut Step<'_>,
    supernode: &Supernode,
    (resolved, placing): (&Resolved, &Placing),
    template: &Template,
    around: &Surroundings,
    survey: &Survey,
    begun: Option<Option<Placement>>,
) -> Option<String> {
    let object = Object::from(supernode.clone());
    let key = object.key();
    let fabric = supernode.spec.compute_domain == Some(true);
    let theirs = gang::chooses_domain(supernode.spec.backend, fabric, &placing.profile, &step.world.apis);
    let placement = match (begun, &survey.verdict) {
        // Half of the pods were made before the operator died: the rest goes where they are.
        (Some(placement), _) => placement,
        (None, Verdict::Fits(placement)) => placement.clone(),
        (None, Verdict::Never { reason, message }) => {
            step.wait(&key, reason, seen_since(supernode), message.clone());
            return None;
        }
        (None, Verdict::NotNow { reason, message }) => {
            if !theirs {
                step.wait(&key, reason, seen_since(supernode), message.clone());
                return None;
            }
            None
        }
    };
    let owner = object.owner_reference();
    let resource = resource(resolved, template);
    let queue = placing.queue.as_deref();
    if let Err(message) = gang::served(supernode.spec.backend, queue, &step.world.apis) {
        step.wait(&key, "GateOff", seen_since(supernode), message);
        return None;
    }
    // Where the scheduler finds the domain, pods are not bound to one; it is told which label names domains.
    let placement =
        if theirs { topology::free_choice(step.nodes(), &placing.profile).or(placement) } else { placement };
    let gang = Gang {
        supernode,
        profile: &placing.profile,
        placement: placement.as_ref(),
        excluded_nodes: &around.excluded_nodes,
        excluded_domains: &around.excluded_domains,
        priority_class: placing.priority_class.as_deref(),
        queue: placing.queue.as_deref(),
        resource: resource.as_ref(),
        vendor: resolved.vendor,
        apis: &step.world.apis.clone(),
    };
    if fabric {
        step.ensure_created(Object::ComputeDomain(fabric::object(supernode)), &owner);
    }
    if let Some(object) = gang::object(&gang) {
        step.ensure_created(Object::Gang(object), &owner);
    }
    for index in 0..supernode.spec.nodes {
        let mut pod = pods::value(supernode, index as u16, template);
        gang::dress(&gang, &mut pod);
        if fabric {
            fabric::dress(object.name(), &mut pod);
        }
        if let Some(placement) = placement.as_ref().filter(|_| !theirs) {
            pod["metadata"]["annotations"][DOMAIN] =
                Value::from(format!("{}={}", placement.label, placement.domain));
        }
        step.ensure_created(pods::typed(pod), &owner);
    }
    let domain = placement.filter(|_| !theirs).map(|placement| placement.domain);
    let pods = supernode.spec.nodes;
    let lifted = if supernode.spec.backend == SchedulingBackend::Builtin { 0 } else { pods };
    let promise = Promise { domain: domain.clone().unwrap_or_default(), pods, lifted, resource };
    let me = (step.world.namespace.clone(), object.name().to_owned());
    if supernode.spec.compute_domain == Some(true) {
        step.fabric(me.clone());
    }
    step.promise(me, promise);
    domain
}

/// When the incarnation began to wait.
fn seen_since(supernode: &Supernode) -> i64 {
    supernode.metadata.creation_timestamp.as_ref().map_or(0, |t| t.0.as_second())
}

fn pods_of(step: &Step<'_>, supernode: &Supernode) -> Vec<Pod> {
    let name = supernode.metadata.name.as_deref().unwrap_or_default();
    let pod = |index: u32| match step.world.get(Kind::Pod, &crate::naming::supernode_pod(name, index as u16))
    {
        Some(Object::Pod(pod)) => Some(pod.clone()),
        _ => None,
    };
    (0..supernode.spec.nodes).filter_map(pod).collect()
}

/// The domain that a pod's gang was given.
fn chosen(pod: &Pod) -> Option<Placement> {
    let (label, domain) = pod.metadata.annotations.as_ref()?.get(DOMAIN)?.split_once('=')?;
    Some(Placement { label: label.to_owned(), domain: domain.to_owned() })
}

fn lift(step: &mut Step<'_>, pods: &[Pod]) {
    for pod in pods.iter().filter(|pod| is_gated(pod)) {
        let key = Key::new(Kind::Pod, pod.metadata.name.clone().unwrap_or_default());
        let change = PodChange::LiftGate;
        step.actions.push(Action::Pod { key, uid: pod.metadata.uid.clone(), change });
    }
}

/// Says that a gang cannot be placed: an event when it begins to wait, Stalled after a while.
pub(crate) fn unplaceable(step: &mut Step<'_>, supernode: &Supernode, placing: &Placing) -> Option<String> {
    let key = Object::from(supernode.clone()).key();
    let waiting = step.report.waiting.iter().find(|w| w.object == key.to_string())?;
    let (reason, message) = (waiting.reason.clone(), waiting.message.clone());
    let since = seen_since(supernode);
    let never = reason == reason::LABEL_MISSING || reason == reason::DOMAIN_TOO_SMALL;
    let overdue = step.world.now - since > placing.unplaceable_after;
    if !never && !overdue {
        return None;
    }
    let text = format!("{}: {reason}: {message}", supernode.metadata.name.as_deref().unwrap_or_default());
    // Said once, when the cluster begins to stall; its status names the one that waits.
    let stalled = step.cluster.status.as_ref().and_then(|s| condition::get(&s.conditions, kind::STALLED));
    let known = stalled.is_some_and(|c| c.status == "True" && c.reason == reason::UNPLACEABLE);
    if !known {
        step.event(key, EventKind::Warning, "Unplaceable", text.clone());
    }
    Some(text)
}
