//! Where a supernode stands, from the world alone.
//!
//! ```text
//! Pending -> Placing -> Starting -> Warming -> Serving -> Draining -> Drained -> Terminating
//!     \________\___________\___________\______-> Degraded (some pods lost, the others serve)
//!                                           \-> Failed
//! ```

use std::collections::BTreeMap;

use deepinfer_crds::cluster::SchedulingBackend;
use deepinfer_crds::condition;
use deepinfer_crds::names::{GANG_GATE, annotation};
use deepinfer_crds::{Supernode, SupernodePhase};
use deepinfer_protocol::agent_status::AgentPhase;
use k8s_openapi::api::core::v1::Pod;

use super::place::DOMAIN;
use super::signals;
use crate::cluster::resolve::Life;
use crate::emulate::has_ended;
use crate::naming::supernode_pod;
use crate::object::{Kind, Object};
use crate::topology;
use crate::world::World;

/// Seconds without a word of an agent whose pod runs, after which its supernode counts as lost (operator.md 7.0).
pub(crate) const AGENT_LOST_SECONDS: i64 = 30;

/// A supernode as it is seen now.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Seen {
    pub phase: SupernodePhase,
    /// Pods whose agents serve (or drain).
    pub ready: u32,
    /// Requests that run there.
    pub inflight: u32,
    /// Why it failed.
    pub failure: Option<Failure>,
    /// By index.
    pub nodes: Vec<SeenPod>,
    /// Pods that exist.
    pub made: u32,
    /// Pods that have a node.
    pub bound: u32,
    /// Pods that wait behind our scheduling gate.
    pub gated: u32,
    /// When the first pod got a node, in seconds since 1970.
    pub first_bound: Option<i64>,
    /// Its pods were bound to one domain by us: if that has no room any more, another must be chosen.
    pub pinned: bool,
    /// An earlier look found no room for it; not looking is not finding.
    pub no_room: bool,
    /// When the first of its pods was made, in seconds since 1970; an incarnation may wait long before.
    pub first_made: Option<i64>,
    /// Creation, in seconds since 1970.
    pub created: i64,
}

/// One pod of a supernode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SeenPod {
    pub index: u32,
    pub pod: String,
    pub uid: Option<String>,
    pub node: Option<String>,
    /// One word.
    pub state: String,
    pub device_health: Option<String>,
}

/// What a supernode died of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    pub pod: String,
    pub node: Option<String>,
    pub reason: String,
    pub message: String,
    pub exit_code: Option<i32>,
}

/// How long things may take, in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Patience {
    /// From all pods bound (created, where nothing binds) until all agents serve.
    pub startup: i64,
    /// A node's NotReady.
    pub node_lost: i64,
    /// From the first bound pod until all are; `None` where nothing binds pods.
    pub gang: Option<i64>,
}

impl Patience {
    /// For supernodes that leave anyway.
    pub const ENDLESS: Self = Self { startup: i64::MAX, node_lost: i64::MAX, gang: None };

    /// As a pool's settings say.
    pub fn of(life: &Life, gang: Option<i64>) -> Self {
        Self { startup: life.startup_deadline, node_lost: life.node_lost_grace, gang }
    }
}

impl Seen {
    /// Takes traffic.
    pub fn serves(&self) -> bool {
        matches!(self.phase, SupernodePhase::Serving | SupernodePhase::Degraded)
    }

    /// What runs there can still come to its end.
    pub fn inflight_can_end(&self) -> bool {
        self.failure.is_none() || self.ready > 0
    }

    /// All pods have nodes.
    pub fn placed(&self) -> bool {
        self.made > 0 && self.bound == self.made
    }

    /// What the pods do, for people: at most three that do not serve.
    pub fn waits_for(&self) -> String {
        let waits = self.nodes.iter().filter(|pod| pod.state != "Serving").take(3);
        let pods: Vec<String> = waits.map(|pod| format!("{} is {}", pod.pod, pod.state)).collect();
        pods.join(", ")
    }
}

/// Looks at a supernode.
pub(crate) fn see(world: &World, supernode: &Supernode, patience: Patience) -> Seen {
    let name = supernode.metadata.name.as_deref().unwrap_or_default();
    let known: BTreeMap<&str, Option<&str>> = supernode
        .status
        .iter()
        .flat_map(|status| &status.nodes)
        .map(|node| (node.pod.as_str(), node.uid.as_deref()))
        .collect();
    let mut seen = Seen {
        phase: SupernodePhase::Pending,
        ready: 0,
        inflight: 0,
        failure: None,
        nodes: Vec::new(),
        made: 0,
        bound: 0,
        gated: 0,
        first_bound: None,
        first_made: None,
        pinned: false,
        no_room: was_without_room(supernode),
        created: supernode.metadata.creation_timestamp.as_ref().map_or(world.now, |t| t.0.as_second()),
    };
    // Queues of other backends may be long; they hold nothing meanwhile.
    let impatient = matches!(supernode.spec.backend, SchedulingBackend::Builtin | SchedulingBackend::Native);
    let mut slowest = SupernodePhase::Serving;
    let mut healthy = SupernodePhase::Serving;
    let (mut drained, mut last_bound) = (0, None);
    for index in 0..supernode.spec.nodes {
        let pod_name = supernode_pod(name, index as u16);
        let pod = match world.get(Kind::Pod, &pod_name) {
            Some(Object::Pod(pod)) => Some(pod),
            _ => None,
        };
        let (phase, state, failure) = match pod {
            Some(pod) => see_pod(world, pod, &pod_name, known.get(pod_name.as_str()).copied(), patience),
            None if known.contains_key(pod_name.as_str()) => {
                (SupernodePhase::Failed, None, Some(failure(&pod_name, "PodLost", "the pod is gone", None)))
            }
            None => (SupernodePhase::Pending, None, None),
        };
        if let Some(pod) = pod {
            seen.made += 1;
            seen.pinned |= impatient && is_pinned(pod);
            let made = pod.metadata.creation_timestamp.as_ref().map_or(seen.created, |t| t.0.as_second());
            seen.first_made = Some(seen.first_made.map_or(made, |first: i64| first.min(made)));
            seen.gated += u32::from(is_gated(pod));
            if node_of(pod).is_some() {
                seen.bound += 1;
                let at = bound_at(pod).unwrap_or(seen.created);
                seen.first_bound = Some(seen.first_bound.map_or(at, |first: i64| first.min(at)));
                last_bound = Some(last_bound.map_or(at, |last: i64| last.max(at)));
            }
        }
        let status = world.word(&pod_name);
        seen.inflight += status.map_or(0, |s| s.inflight);
        drained += u32::from(status.is_some_and(|s| s.phase == AgentPhase::Drained));
        seen.ready += u32::from(phase == SupernodePhase::Serving);
        seen.nodes.push(SeenPod {
            index,
            uid: pod.and_then(|pod| pod.metadata.uid.clone()),
            node: pod.and_then(node_of).map(str::to_owned),
            state: state.unwrap_or_else(|| format!("{phase:?}")),
            device_health: status.map(|s| s.device_health.clone()).filter(|health| !health.is_empty()),
            pod: pod_name,
        });
        if failure.is_none() {
            healthy = healthy.min(phase);
        }
        seen.failure = seen.failure.or(failure);
        slowest = slowest.min(phase);
    }
    seen.failure =
        seen.failure.take().or_else(|| overdue(world, name, &seen, (slowest, last_bound), patience));
    seen.phase = phase(supernode, &seen, slowest, healthy, drained);
    seen
}

fn phase(
    supernode: &Supernode,
    seen: &Seen,
    slowest: SupernodePhase,
    healthy: SupernodePhase,
    drained: u32,
) -> SupernodePhase {
    if supernode.metadata.deletion_timestamp.is_some() && supernode.spec.drain.is_none() {
        SupernodePhase::Terminating
    } else if supernode.spec.drain.is_some() {
        let left = seen.nodes.iter().filter(|pod| pod.state != "Failed").count();
        if drained as usize >= left { SupernodePhase::Drained } else { SupernodePhase::Draining }
    } else if seen.failure.is_some() {
        // Some pods are lost; those that are left may hold all experts and serve on.
        let rest = seen.ready > 0 && healthy == SupernodePhase::Serving;
        if rest { SupernodePhase::Degraded } else { SupernodePhase::Failed }
    } else {
        slowest
    }
}

/// Whether its status says that there was no room.
fn was_without_room(supernode: &Supernode) -> bool {
    let conditions = supernode.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    let placed = condition::get(conditions, condition::kind::supernode::PLACED);
    placed
        .is_some_and(|placed| placed.status == "False" && placed.reason == topology::reason::NOT_ENOUGH_FREE)
}

/// What should have happened by now and has not.
fn overdue(
    world: &World,
    name: &str,
    seen: &Seen,
    (slowest, last_bound): (SupernodePhase, Option<i64>),
    patience: Patience,
) -> Option<Failure> {
    if slowest >= SupernodePhase::Serving || seen.made == 0 {
        return None;
    }
    let waits = seen.nodes.iter().find(|pod| pod.state != "Serving");
    let pod = waits.map_or(name, |pod| pod.pod.as_str());
    let node = waits.and_then(|pod| pod.node.clone());
    let with_node = |failure: Failure| Some(Failure { node: node.clone(), ..failure });
    if let (Some(limit), Some(first)) = (patience.gang, seen.first_bound)
        && !seen.placed()
        && world.now - first > limit
    {
        let message =
            format!("{} of {} pods have a node {limit} s after the first one", seen.bound, seen.made);
        return with_node(failure(pod, "GangTimeout", &message, None));
    }
    // Behind our gate it waits for us: `place::outrun` says how long.
    if let Some(limit) = patience.gang
        && seen.gated == 0
        && seen.pinned
        && seen.bound == 0
        && world.now - seen.first_made.unwrap_or(seen.created) > limit
    {
        let message =
            format!("the room that its pods were made for was taken, and none came within {limit} s");
        return with_node(failure(pod, "GangTimeout", &message, None));
    }
    let since = match patience.gang {
        Some(_) if !seen.placed() => return None,
        Some(_) => last_bound.unwrap_or(seen.created),
        None => seen.created,
    };
    if world.now.saturating_sub(since) <= patience.startup {
        return None;
    }
    let state = waits.map(|pod| pod.state.clone()).unwrap_or_default();
    let what = if patience.gang.is_some() { "all pods had nodes" } else { "its creation" };
    let detail = world.word(pod).map(|word| word.reason.clone()).filter(|reason| !reason.is_empty());
    let detail = detail.map(|reason| format!(": {reason}")).unwrap_or_default();
    let message = format!("not ready {} s after {what}: {pod} is {state}{detail}", patience.startup);
    with_node(failure(pod, "StartupDeadlineExceeded", &message, None))
}

/// Phase and state of a pod, and what it died of.
fn see_pod(
    world: &World,
    pod: &Pod,
    name: &str,
    known: Option<Option<&str>>,
    patience: Patience,
) -> (SupernodePhase, Option<String>, Option<Failure>) {
    let lost = |failure| (SupernodePhase::Failed, None, Some(failure));
    if let Some(Some(uid)) = known
        && pod.metadata.uid.as_deref() != Some(uid)
    {
        return lost(failure(
            name,
            "PodReplaced",
            "somebody made the pod again: it is not the one that served",
            None,
        ));
    }
    if has_ended(pod) || pod.metadata.deletion_timestamp.is_some() {
        let mut ended = ended(pod, name);
        ended.node = node_of(pod).map(str::to_owned);
        return lost(ended);
    }
    if let Some(failure) =
        signals::node(world, pod, name, patience.node_lost).or_else(|| signals::device(pod, name))
    {
        return lost(failure);
    }
    let phase = pod.status.as_ref().and_then(|s| s.phase.as_deref());
    if phase != Some("Running") {
        let Some(_) = node_of(pod) else {
            let state = is_gated(pod).then(|| "Gated".to_owned());
            return (SupernodePhase::Placing, state, None);
        };
        return (SupernodePhase::Starting, signals::waiting(pod), None);
    }
    let Some(word) = world.agents.get(&name.into()) else {
        return (SupernodePhase::Starting, None, None);
    };
    // Silence counts from the start of the container: before, nobody could answer.
    let since = word.silent_since.map(|since| since.max(signals::running_since(pod).unwrap_or(0)));
    if since.is_some_and(|since| world.now - since > AGENT_LOST_SECONDS) {
        let mut failure =
            failure(name, "AgentLost", "the agent has not answered for 30 s while its pod runs", None);
        failure.node = node_of(pod).map(str::to_owned);
        return lost(failure);
    }
    let Some(status) = &word.status else {
        return (SupernodePhase::Starting, None, None);
    };
    let state = (!status.reason_code.is_empty()).then(|| status.reason_code.clone());
    match status.phase {
        AgentPhase::Starting => (SupernodePhase::Starting, state, None),
        AgentPhase::Warming => (SupernodePhase::Warming, state, None),
        AgentPhase::Serving | AgentPhase::Draining | AgentPhase::Drained => {
            (SupernodePhase::Serving, None, None)
        }
        // What a restart does not heal is waited for, up to the start-up deadline: the agent tries again by itself.
        AgentPhase::Failed if state.is_some() => (SupernodePhase::Starting, state, None),
        AgentPhase::Failed => {
            let mut failure = failure(name, "AgentFailed", &status.reason, None);
            failure.node = node_of(pod).map(str::to_owned);
            lost(failure)
        }
    }
}

fn ended(pod: &Pod, name: &str) -> Failure {
    let status = pod.status.as_ref();
    let containers = status.and_then(|s| s.container_statuses.as_deref()).unwrap_or_default();
    let terminated = containers.iter().find_map(|c| c.state.as_ref()?.terminated.as_ref());
    let message = terminated
        .and_then(|t| t.message.clone())
        .or_else(|| status.and_then(|s| s.message.clone()))
        .unwrap_or_else(|| "its containers ended".to_owned());
    let reason = terminated
        .and_then(|t| t.reason.clone())
        .or_else(|| status.and_then(|s| s.reason.clone()))
        .unwrap_or_else(|| if has_ended(pod) { "PodFailed" } else { "PodDeleted" }.to_owned());
    failure(name, &reason, &message, terminated.map(|t| t.exit_code))
}

pub(super) fn failure(pod: &str, reason: &str, message: &str, exit_code: Option<i32>) -> Failure {
    Failure {
        pod: pod.to_owned(),
        node: None,
        reason: reason.to_owned(),
        message: message.to_owned(),
        exit_code,
    }
}

/// The node that a pod is bound to.
pub(crate) fn node_of(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.node_name.as_deref().filter(|node| !node.is_empty())
}

/// Waits behind the gate of our own backend.
pub(crate) fn is_gated(pod: &Pod) -> bool {
    let gates = pod.spec.as_ref().and_then(|spec| spec.scheduling_gates.as_deref()).unwrap_or_default();
    gates.iter().any(|gate| gate.name == GANG_GATE)
}

fn is_pinned(pod: &Pod) -> bool {
    pod.metadata.annotations.as_ref().is_some_and(|annotations| annotations.contains_key(DOMAIN))
}

/// The drain that a pod's annotation asks for.
pub(crate) fn drain_note(pod: &Pod) -> Option<&str> {
    let note = pod.metadata.annotations.as_ref()?.get(annotation::DRAIN)?;
    (!note.is_empty()).then_some(note.as_str())
}

fn bound_at(pod: &Pod) -> Option<i64> {
    let conditions = pod.status.as_ref()?.conditions.as_deref()?;
    let scheduled = conditions.iter().find(|c| c.type_ == "PodScheduled" && c.status == "True")?;
    Some(scheduled.last_transition_time.as_ref()?.0.as_second())
}
