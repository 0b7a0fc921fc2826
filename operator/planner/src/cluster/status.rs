//! Status of a cluster: computed anew from the world in each plan; nothing in it moves by itself.

use deepinfer_crds::cluster::{
    ClusterStatus, ClusterSummary, Pause, Phase, PoolSummary, UnavailableReason, WaitingFor,
};
use deepinfer_crds::condition::{self, Truth, kind, reason};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use serde_json::json;

use deepinfer_crds::names::port;

use super::resolve::Resolved;
use crate::apply::time;
use crate::naming::{Component, pool_name};
use crate::object::{Kind, Object};
use crate::pool::objects::Counts;
use crate::pool::supernodes::Outcome;
use crate::report::{Problem, Waiting};
use crate::step::Step;
use crate::target::Target;
use crate::world::ModelState;

/// Waiting lines that a status holds.
const MAX_WAITING: usize = 10;

/// What the other steps came to.
pub(crate) struct Facts<'a> {
    pub resolved: &'a Resolved,
    pub target: &'a Target,
    pub prefill: Outcome,
    pub decode: Outcome,
    pub revision: String,
    pub kv_epoch: String,
    /// Names of the spec that are missing; what runs is kept as it was.
    pub missing: Vec<Problem>,
}

impl<'a> Facts<'a> {
    /// Nothing is known yet.
    pub fn new(resolved: &'a Resolved, target: &'a Target) -> Self {
        Self {
            resolved,
            target,
            prefill: Outcome::default(),
            decode: Outcome::default(),
            revision: String::new(),
            kv_epoch: String::new(),
            missing: Vec::new(),
        }
    }

    /// Why a person must look.
    fn stalled(&self) -> Option<(&'static str, String)> {
        if let Some(first) = self.missing.first() {
            let lines: Vec<String> =
                self.missing.iter().map(|p| format!("{}: {}", p.path, p.message)).collect();
            return Some((first.reason, lines.join("; ")));
        }
        self.decode.stalled.clone().or_else(|| self.prefill.stalled.clone())
    }
}

/// Plans the status of a cluster whose spec is followed.
pub(crate) fn write(step: &mut Step<'_>, facts: &Facts<'_>) {
    let mut status = begin(step);
    let resolved = facts.resolved;
    let gateways = gateways(step, resolved);
    let (prefill, decode) = (facts.prefill.counts, facts.decode.counts);
    let now = time(step.world.now);
    let generation = step.cluster.metadata.generation;
    let set = |list: &mut Vec<Condition>, kind: &str, holds: bool, (reason, message): (&str, &str)| {
        condition::set(list, (kind, Truth::from(holds)), (reason, message), generation, &now);
    };
    let whole = |c: &Counts| c.available >= c.desired;
    // Some run under an older revision, or leave.
    let mixed = decode.replicas > decode.updated || prefill.replicas > prefill.updated || decode.draining > 0;
    let gateway_up = gateways.1 > 0 || resolved.suspended;
    let model = model(step);
    let (ready, why) = if resolved.suspended {
        (false, reason::SUSPENDED)
    } else if !model.0 {
        (false, reason::MODEL_UNAVAILABLE)
    } else if !gateway_up {
        (false, if gateways.0 > 0 { reason::CREATING } else { reason::GATEWAY_UNAVAILABLE })
    } else if mixed {
        (false, reason::ROLLOUT_INCOMPLETE)
    } else if !whole(&prefill) || !whole(&decode) {
        let never = !condition::is_true(&status.conditions, kind::AVAILABLE);
        (false, if never { reason::CREATING } else { reason::CAPACITY_BELOW_DESIRED })
    } else if decode.desired == 0 && prefill.desired == 0 {
        (true, reason::SCALED_TO_ZERO)
    } else {
        (true, reason::SERVING)
    };
    let message = format!(
        "prefill {}/{}, decode {}/{}, gateway {}/{}",
        prefill.available,
        prefill.desired,
        decode.available,
        decode.desired,
        gateways.1,
        resolved.gateway.replicas
    );
    let list = &mut status.conditions;
    let available =
        prefill.available >= resolved.min_prefill && decode.available >= resolved.min_decode && gateway_up;
    let word = if available { reason::MINIMUM_AVAILABLE } else { reason::BELOW_MINIMUM };
    let part = |holds: bool| (if holds { reason::READY } else { reason::NOT_READY }, "");
    set(list, kind::READY, ready, (why, &message));
    set(list, kind::AVAILABLE, available, (word, &message));
    set(list, kind::MODEL_READY, model.0, (&model.1, &model.2));
    set(list, kind::PREFILL_READY, whole(&prefill), part(whole(&prefill)));
    set(list, kind::DECODE_READY, whole(&decode), part(whole(&decode)));
    set(list, kind::GATEWAY_READY, gateway_up, part(gateway_up));
    let stalled = facts.stalled();
    let (stall, text) =
        stalled.as_ref().map_or((reason::PROGRESSING, ""), |(why, text)| (*why, text.as_str()));
    set(list, kind::STALLED, stalled.is_some(), (stall, text));
    let busy = !ready && !resolved.suspended;
    let doing = doing(facts, mixed);
    set(list, kind::RECONCILING, busy, (if busy { doing } else { reason::IDLE }, ""));
    topology(step, facts, list, generation, &now);
    degraded(list, resolved, generation, step.world.now, ready);
    paused(step, list, generation, &now);
    ignored(&step.report.ignored, list, generation, &now);

    status.phase = Some(phase(list, resolved));
    status.revision = Some(facts.revision.clone());
    status.kv_epoch = Some(facts.kv_epoch.clone());
    status.backend = match facts.target {
        Target::Local(_) => Some("Local".to_owned()),
        Target::Kubernetes(_) => {
            facts.decode.backend.map(|backend| format!("{backend:?}")).or(status.backend)
        }
    };
    status.url = Some(match facts.target {
        Target::Local(local) => format!("http://{}", local.listen),
        Target::Kubernetes(_) => {
            let gateway = pool_name(&resolved.name, Component::Gateway);
            format!("http://{gateway}.{}:{}", step.world.namespace, port::GATEWAY)
        }
    });
    status.summary = Some(ClusterSummary {
        prefill: Some(format!("{}/{}", prefill.available, prefill.desired)),
        decode: Some(format!("{}/{}", decode.available, decode.desired)),
        vision: None,
        gateway: Some(format!("{}/{}", gateways.1, resolved.gateway.replicas)),
        revisions: Some(format!(
            "{}/2 updated",
            u32::from(prefill.updated >= prefill.desired) + u32::from(decode.updated >= decode.desired)
        )),
    });
    status.pools = vec![
        pool(resolved, Component::Decode, &facts.decode),
        pool(resolved, Component::Prefill, &facts.prefill),
    ];
    finish(step, status);
}

/// What a cluster that is not ready is busy with.
fn doing(facts: &Facts<'_>, mixed: bool) -> &'static str {
    let decode = &facts.decode;
    let has = |phase: &str| decode.reasons.contains_key(phase);
    if decode.counts.draining > 0 {
        reason::DRAINING
    } else if mixed {
        reason::ROLLING_OUT
    } else if has("Placing") || has("Pending") {
        reason::PLACING
    } else {
        reason::CREATING
    }
}

/// Whether the nodes can form the domains that the spec needs.
fn topology(
    step: &Step<'_>,
    facts: &Facts<'_>,
    list: &mut Vec<Condition>,
    generation: Option<i64>,
    now: &Time,
) {
    if facts.target.local().is_some() {
        return;
    }
    let found = facts.decode.topology.as_ref().or(facts.prefill.topology.as_ref());
    let (truth, word, message) = match found {
        Some((word, message)) => (Truth::False, word.as_str(), message.as_str()),
        None if step.world.nodes.unreadable => (
            Truth::Unknown,
            reason::NODES_UNREADABLE,
            "the operator may not read nodes: the scheduler decides",
        ),
        None => (Truth::True, reason::FOUND, ""),
    };
    condition::set(list, (kind::TOPOLOGY_AVAILABLE, truth), (word, message), generation, now);
}

/// Plans the status of a cluster whose spec cannot be followed: nothing is created, what runs goes on.
pub(crate) fn refuse(step: &mut Step<'_>, problems: &[Problem]) {
    let mut status = begin(step);
    let generation = step.cluster.metadata.generation;
    let now = time(step.world.now);
    let reason = problems.first().map_or(reason::INVALID_SPEC, |p| p.reason);
    let lines: Vec<String> = problems.iter().map(|p| format!("{}: {}", p.path, p.message)).collect();
    let message = lines.join("; ");
    let list = &mut status.conditions;
    condition::set(list, (kind::STALLED, Truth::True), (reason, &message), generation, &now);
    condition::set(list, (kind::RECONCILING, Truth::False), (reason::IDLE, ""), generation, &now);
    if condition::get(list, kind::READY).is_none() {
        condition::set(list, (kind::READY, Truth::False), (reason, &message), generation, &now);
        status.phase = Some(Phase::Failed);
    }
    ignored(&step.report.ignored, list, generation, &now);
    finish(step, status);
}

/// Plans the status of a cluster that is being deleted.
pub(crate) fn deleting(step: &mut Step<'_>, message: &str) {
    let mut status = begin(step);
    let generation = step.cluster.metadata.generation;
    let now = time(step.world.now);
    status.phase = Some(Phase::Deleting);
    let list = &mut status.conditions;
    condition::set(list, (kind::READY, Truth::False), ("Deleting", message), generation, &now);
    condition::set(list, (kind::RECONCILING, Truth::True), (reason::DRAINING, message), generation, &now);
    finish(step, status);
}

fn begin(step: &Step<'_>) -> ClusterStatus {
    let mut status = step.cluster.status.clone().unwrap_or_default();
    status.observed_generation = step.cluster.metadata.generation;
    status
}

fn finish(step: &mut Step<'_>, mut status: ClusterStatus) {
    let mut waiting: Vec<&Waiting> = step.report.waiting.iter().collect();
    waiting.sort_by(|a, b| (a.since == 0, a.since, &a.object).cmp(&(b.since == 0, b.since, &b.object)));
    let before = std::mem::take(&mut status.waiting);
    let line = |w: &Waiting| {
        // A line that was there keeps its time: nothing moves by itself.
        let known = before.iter().find(|b| b.object == w.object && b.reason == w.reason);
        let since = known
            .map_or_else(|| time(if w.since > 0 { w.since } else { step.world.now }), |b| b.since.clone());
        WaitingFor { object: w.object.clone(), reason: w.reason.clone(), since, message: w.message.clone() }
    };
    status.waiting = waiting.into_iter().take(MAX_WAITING).map(line).collect();
    let key = step.cluster_key();
    step.status(key, json!(status));
}

fn pool(resolved: &Resolved, component: Component, outcome: &Outcome) -> PoolSummary {
    let counts = outcome.counts;
    let reason =
        |(reason, count): (&String, &u32)| UnavailableReason { reason: reason.clone(), count: *count };
    PoolSummary {
        name: pool_name(&resolved.name, component),
        role: component.as_str().to_owned(),
        desired: counts.desired,
        ready: counts.ready,
        available: counts.available,
        updated: counts.updated,
        unavailable_reasons: outcome.reasons.iter().map(reason).collect(),
    }
}

/// Gateway pods, and how many of them are ready.
fn gateways(step: &Step<'_>, resolved: &Resolved) -> (u32, u32) {
    let name = pool_name(&resolved.name, Component::Gateway);
    let Some(Object::Deployment(deployment)) = step.world.get(Kind::Deployment, &name) else {
        return (0, 0);
    };
    let status = deployment.status.clone().unwrap_or_default();
    let count = |value: Option<i32>| value.and_then(|v| u32::try_from(v).ok()).unwrap_or(0);
    (count(status.replicas), count(status.ready_replicas))
}

fn model(step: &Step<'_>) -> (bool, String, String) {
    match super::model::state(step.world) {
        ModelState::Unknown => (true, reason::FOUND.to_owned(), "the engines check it".to_owned()),
        ModelState::Ready { digest } => (true, reason::FOUND.to_owned(), format!("digest {digest}")),
        ModelState::Failed { reason, message } => (false, reason, message),
    }
}

fn degraded(list: &mut Vec<Condition>, resolved: &Resolved, generation: Option<i64>, now: i64, ready: bool) {
    let since = condition::get(list, kind::READY).map_or(now, |c| c.last_transition_time.0.as_second());
    let was = condition::is_true(list, kind::DEGRADED);
    let lost = !ready && !resolved.suspended && (was || now - since >= resolved.degraded_after);
    let reason = if lost { reason::CAPACITY_LOST } else { reason::NOMINAL };
    condition::set(list, (kind::DEGRADED, Truth::from(lost)), (reason, ""), generation, &time(now));
}

fn paused(step: &Step<'_>, list: &mut Vec<Condition>, generation: Option<i64>, now: &Time) {
    let operation = step.cluster.spec.operation.as_ref();
    let reason = match operation.and_then(|o| o.pause) {
        Some(Pause::Rollouts) => reason::PAUSED_ROLLOUTS,
        Some(Pause::All) => reason::PAUSED_ALL,
        _ if operation.and_then(|o| o.suspend) == Some(true) => reason::SUSPENDED,
        _ => reason::RUNNING,
    };
    let holds = Truth::from(reason != reason::RUNNING);
    condition::set(list, (kind::PAUSED, holds), (reason, ""), generation, now);
}

fn ignored(problems: &[Problem], list: &mut Vec<Condition>, generation: Option<i64>, now: &Time) {
    let lines: Vec<String> = problems.iter().map(|p| format!("{} ({})", p.path, p.message)).collect();
    let holds = Truth::from(!lines.is_empty());
    let reason = if lines.is_empty() { reason::NONE } else { reason::NOT_BUILT };
    condition::set(list, (kind::FIELDS_IGNORED, holds), (reason, &lines.join("; ")), generation, now);
}

fn phase(list: &[Condition], resolved: &Resolved) -> Phase {
    let on = |kind: &str| condition::is_true(list, kind);
    if resolved.suspended {
        Phase::Suspended
    } else if on(kind::READY) {
        Phase::Serving
    } else if on(kind::STALLED) {
        Phase::Failed
    } else if on(kind::DEGRADED) {
        Phase::Degraded
    } else if on(kind::AVAILABLE) {
        Phase::Updating
    } else {
        Phase::Creating
    }
}
