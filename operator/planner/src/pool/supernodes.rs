//! Supernodes of a pool: made, placed, replaced, drained and recovered within the budget. Decode pools always; prefill
//! pools whose workers have several pods.

use std::collections::BTreeMap;

use deepinfer_crds::cluster::{Pause, RecoveryMode, SchedulingBackend};
use deepinfer_crds::condition::{self, kind, reason};
use deepinfer_crds::names::{finalizer, label};
use deepinfer_crds::{DeepInferPool, PoolRole, Supernode, SupernodePhase, SupernodeSpec};

use super::objects::{self, Counts};
use super::quarantine::Quarantine;
use super::retries::{self, Limits, Retry};
use super::rollout::{self, Budget, Member, Moves};
use crate::action::EventKind;
use crate::blueprint::FailureRecord;
use crate::cluster::children::meta;
use crate::cluster::resolve::{Life, Resolved};
use crate::cluster::template::Template;
use crate::naming::{self, Component};
use crate::object::{Kind, Object};
use crate::step::Step;
use crate::supernode::phase::{Failure, Patience, Seen, see};
use crate::supernode::place::{self, Surroundings};
use crate::supernode::{drain, fabric, gang, pods, status};
use crate::topology;

/// What the pool came to.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Outcome {
    pub counts: Counts,
    /// Why members are not available, with how many.
    pub reasons: BTreeMap<String, u32>,
    /// A person must look: reason and message.
    pub stalled: Option<(&'static str, String)>,
    /// Why no domain can take a supernode: reason and message.
    pub topology: Option<(String, String)>,
    /// Gang backend of the newest member.
    pub backend: Option<SchedulingBackend>,
}

/// The pool at hand.
pub(super) struct Site<'a> {
    pub pool: &'a DeepInferPool,
    pub resolved: &'a Resolved,
    pub component: Component,
    pub life: &'a Life,
    pub template: &'a Template,
    pub around: Surroundings,
}

impl Site<'_> {
    fn pool_name(&self) -> &str {
        self.pool.metadata.name.as_deref().unwrap_or_default()
    }

    fn limits(&self) -> Limits {
        Limits {
            max_restarts: self.life.max_restarts,
            backoff: self.life.backoff,
            max_backoff: self.life.max_backoff,
            reset_after: self.life.reset_after,
        }
    }

    fn patience(&self) -> Patience {
        Patience::of(self.life, self.resolved.placing.as_ref().map(|placing| placing.gang_timeout))
    }
}

/// Plans the supernodes.
pub(crate) fn plan(
    step: &mut Step<'_>,
    pool: &DeepInferPool,
    resolved: &Resolved,
    (component, life): (Component, &Life),
    template: &Template,
) -> Outcome {
    let name = pool.metadata.name.clone().unwrap_or_default();
    let all: Vec<Supernode> =
        step.world.supernodes().filter(|sn| sn.spec.pool_name == name).cloned().collect();
    let mut quarantine = Quarantine::read(pool, step.world.now);
    let around = surroundings(&quarantine, &all);
    let site = Site { pool, resolved, component, life, template, around };
    let mut outcome =
        Outcome { counts: Counts { desired: life.replicas, ..Counts::default() }, ..Outcome::default() };
    let mut members = Vec::new();
    let mut terminal = false;
    for supernode in &all {
        match tend(step, &site, supernode, (&all, &mut quarantine), &mut outcome) {
            Tended::Member(member) => members.push(member),
            Tended::Kept => terminal = true,
            Tended::Gone => {}
        }
    }
    act(step, &site, (&all, &members), terminal, &mut outcome);
    outcome.backend = all.iter().max_by_key(|sn| created(sn)).map(|sn| sn.spec.backend);
    let counts = outcome.counts;
    let why = match &outcome.stalled {
        Some((_, why)) => why.clone(),
        None => format!("{}/{} are available", counts.available, counts.desired),
    };
    objects::status(step, pool, counts, &why, quarantine.entries());
    outcome
}

/// What became of a supernode in this plan.
enum Tended {
    Member(Member),
    /// Failed for good: kept as evidence until the revision changes.
    Kept,
    /// Given up.
    Gone,
}

fn tend(
    step: &mut Step<'_>,
    site: &Site<'_>,
    supernode: &Supernode,
    (all, quarantine): (&[Supernode], &mut Quarantine),
    outcome: &mut Outcome,
) -> Tended {
    let mut seen = see(step.world, supernode, site.patience());
    let mut said = status::Said {
        placement: supernode.status.as_ref().and_then(|s| s.placement.clone()),
        restarts: restarts(step, site, supernode),
        ..status::Said::default()
    };
    let unverified = supernode.status.as_ref().is_none_or(|status| status.domain.is_none());
    if let Some(placing) = &site.resolved.placing
        && seen.placed()
        && unverified
        && seen.failure.is_none()
    {
        match place::violated(step, placing, &seen) {
            Ok(domain) => {
                if let Some(domain) = &domain {
                    let key = Object::from(supernode.clone()).key();
                    step.event(
                        key,
                        EventKind::Normal,
                        "SupernodePlaced",
                        format!("all pods are in {domain}"),
                    );
                }
                said.domain = domain;
            }
            Err(failure) => {
                let key = Object::from(supernode.clone()).key();
                step.event(key, EventKind::Warning, "PlacementViolated", failure.message.clone());
                seen.failure = Some(failure);
                seen.phase = SupernodePhase::Failed;
            }
        }
    }
    let current = supernode.spec.revision == site.template.revision;
    let leaving = supernode.spec.drain.is_some() || supernode.metadata.deletion_timestamp.is_some();
    if let Some(placing) = &site.resolved.placing
        && seen.failure.is_none()
        && seen.no_room
        && !leaving
    {
        let own = own_template(step, site, supernode);
        let failed = place::outrun(step, supernode, &seen, (site.resolved, placing), &own, &site.around);
        if failed.is_some() {
            (seen.failure, seen.phase) = (failed, SupernodePhase::Failed);
        }
    }
    let mut member = Member {
        name: supernode.metadata.name.clone().unwrap_or_default(),
        current,
        why: "RollingOut",
        available: false,
        draining: leaving,
        inflight: seen.inflight,
        created: seen.created,
        unplaced: (!seen.placed()).then(|| step.world.now - seen.created),
    };
    if leaving {
        outcome.counts.draining += 1;
        status::write(step, supernode, &seen, said);
        leave(step, supernode, &seen, site.life.drain_seconds);
        return Tended::Member(member);
    }
    if let Some(failure) = seen.failure.clone() {
        remember(step, site, supernode, &failure, &seen, quarantine);
        let verdict = recover(step, site, supernode, &seen, all);
        if verdict == Recovery::Keep {
            said.restarts = restarts(step, site, supernode);
        }
        status::write(step, supernode, &seen, status::Said { exhausted: verdict == Recovery::Keep, ..said });
        *outcome.reasons.entry(failure.reason.clone()).or_default() += 1;
        match verdict {
            Recovery::Keep => {
                strip(step, supernode, &seen);
                return Tended::Kept;
            }
            Recovery::Delete => {
                let note = format!("{}: {}: {}", failure.reason, failure.pod, failure.message);
                step.delete(&Object::from(supernode.clone()), note);
                return Tended::Gone;
            }
            Recovery::ServeOn => {
                outcome.counts.replicas += 1;
                outcome.counts.ready += 1;
                member.current = false;
                member.available = true;
                member.why = "Replacing";
                return Tended::Member(member);
            }
        }
    }
    outcome.counts.replicas += 1;
    outcome.counts.updated += u32::from(current);
    if !seen.placed() {
        clean_up(step, site, supernode, quarantine);
    }
    raise(step, site, supernode, &seen, &mut said, outcome);
    let before = supernode.status.as_ref().and_then(|s| s.phase);
    if seen.phase == SupernodePhase::Serving && before.is_some_and(|phase| phase < SupernodePhase::Serving) {
        let key = Object::from(supernode.clone()).key();
        let note = format!("{} pods serve", supernode.spec.nodes);
        step.event(key, EventKind::Normal, "SupernodeServing", note);
    }
    status::write(step, supernode, &seen, said);
    let routable = status::routable_for(supernode, step.world.now);
    member.available = seen.serves() && routable.is_some_and(|seconds| seconds >= site.life.min_ready);
    outcome.counts.ready += u32::from(seen.serves());
    outcome.counts.available += u32::from(member.available);
    if !member.available {
        *outcome.reasons.entry(format!("{:?}", seen.phase)).or_default() += 1;
    }
    Tended::Member(member)
}

/// The template that a supernode was made by.
fn own_template(step: &Step<'_>, site: &Site<'_>, supernode: &Supernode) -> Template {
    let stored = step.world.get(Kind::ControllerRevision, &supernode.spec.revision);
    stored.and_then(stored_template).unwrap_or_else(|| site.template.clone())
}

/// Brings a supernode up: names, place, pods; says what it waits for.
fn raise(
    step: &mut Step<'_>,
    site: &Site<'_>,
    supernode: &Supernode,
    seen: &Seen,
    said: &mut status::Said,
    outcome: &mut Outcome,
) {
    let own = own_template(step, site, supernode);
    pods::ensure_names(step, supernode);
    let key = Object::from(supernode.clone()).key();
    let lines = step.report.waiting.len();
    match &site.resolved.placing {
        None => pods::ensure(step, supernode, &own),
        Some(placing) => {
            let placement = place::plan(step, supernode, seen, (site.resolved, placing), &own, &site.around);
            said.placement =
                Some(placement).filter(|p| *p != deepinfer_crds::supernode::PlacementStatus::default());
            if step.report.waiting.len() > lines {
                let waiting = &step.report.waiting[lines];
                let (why, message) = (waiting.reason.clone(), waiting.message.clone());
                said.waits = Some(why.clone());
                if why == reason::LABEL_MISSING || why == reason::DOMAIN_TOO_SMALL {
                    outcome.topology = Some((why, message));
                }
                if let Some(text) = place::unplaceable(step, supernode, placing) {
                    outcome.stalled = Some((reason::UNPLACEABLE, text));
                }
            }
        }
    }
    let refused = step.refused_children(supernode);
    if let Some((refused, message)) = &refused {
        step.wait(&key, refused, seen.created, message.clone());
    } else if !seen.serves() && step.report.waiting.len() == lines {
        step.wait(&key, &format!("{:?}", seen.phase), 0, seen.waits_for());
    }
}

/// What is left of an old ComputeDomain on the nodes that a waiting incarnation would use: it goes by itself, or its
/// nodes are avoided.
fn clean_up(step: &mut Step<'_>, site: &Site<'_>, supernode: &Supernode, quarantine: &mut Quarantine) {
    let Some(placing) = &site.resolved.placing else { return };
    if supernode.spec.compute_domain != Some(true) {
        return;
    }
    let Some(domain) = supernode.spec.domain_preference.first() else {
        return await_ending(step, supernode, quarantine);
    };
    let nodes = step.nodes();
    let in_domain = nodes.by_name.values().filter(|node| {
        topology::domain_of(&placing.profile, &node.labels).is_some_and(|place| place.domain == *domain)
    });
    let reused = in_domain.filter(|node| node.occupants.is_empty()).map(|node| node.name.clone()).collect();
    let old =
        supernode.spec.replaces.as_deref().and_then(|name| match step.world.get(Kind::ComputeDomain, name) {
            Some(Object::ComputeDomain(old)) => Some(old),
            _ => None,
        });
    let since = created(supernode);
    let left = fabric::cleanup(nodes, &reused, old, since, step.world.now);
    settle(step, supernode, quarantine, left, since);
}

/// The same for an incarnation that may go anywhere: ComputeDomains of this cluster that are being deleted and whose
/// label is still on nodes.
fn await_ending(step: &mut Step<'_>, supernode: &Supernode, quarantine: &mut Quarantine) {
    let ending: Vec<(i64, fabric::Cleanup)> =
        step.world
            .of(Kind::ComputeDomain)
            .filter_map(|object| {
                let Object::ComputeDomain(old) = object else { return None };
                let since = old.metadata.deletion_timestamp.as_ref()?.0.as_second();
                let uid = old.metadata.uid.as_deref();
                let inside =
                    step.nodes().by_name.values().filter(|node| {
                        uid.is_some() && node.labels.get(topology::COMPUTE_DOMAIN_LABEL) == uid
                    });
                let inside = inside.map(|node| node.name.clone()).collect();
                Some((since, fabric::cleanup(step.nodes(), &inside, Some(old), since, step.world.now)))
            })
            .collect();
    for (since, left) in ending {
        settle(step, supernode, quarantine, left, since);
    }
}

fn settle(
    step: &mut Step<'_>,
    supernode: &Supernode,
    quarantine: &mut Quarantine,
    left: fabric::Cleanup,
    since: i64,
) {
    let key = Object::from(supernode.clone()).key();
    match left {
        fabric::Cleanup::Clean => {}
        fabric::Cleanup::Waiting { message } => step.wait(&key, "FabricCleanup", since, message),
        fabric::Cleanup::Stuck { nodes, message } => {
            if quarantine.avoid(&nodes, "FabricCleanupStuck", step.world.now) {
                step.event(key, EventKind::Warning, "FabricCleanupStuck", message);
            }
        }
    }
}

/// What follows from a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Recovery {
    /// The rest serves until another one stands in.
    ServeOn,
    /// It goes now.
    Delete,
    /// Failed too often: it stays as evidence, without accelerators.
    Keep,
}

fn recover(
    step: &Step<'_>,
    site: &Site<'_>,
    supernode: &Supernode,
    seen: &Seen,
    all: &[Supernode],
) -> Recovery {
    let current = supernode.spec.revision == site.template.revision;
    let kept = supernode
        .status
        .as_ref()
        .and_then(|s| condition::get(&s.conditions, kind::DEGRADED))
        .is_some_and(|c| c.status == "True" && c.reason == reason::RETRIES_EXHAUSTED);
    if !current || site.life.replicas == 0 {
        return if seen.serves() && current { Recovery::ServeOn } else { Recovery::Delete };
    }
    let failures = step.next.failures.get(site.pool_name()).cloned().unwrap_or_default();
    let retry = retries::retry(&failures, &site.template.revision, site.limits(), step.world.now);
    let exhausted = kept || matches!(retry, Retry::Exhausted { .. });
    if exhausted && !seen.serves() {
        return Recovery::Keep;
    }
    if !seen.serves() || site.life.recovery == RecoveryMode::InPlace {
        return Recovery::Delete;
    }
    let name = supernode.metadata.name.as_deref();
    let successor = all
        .iter()
        .any(|other| other.spec.replaces.as_deref() == name && other.metadata.deletion_timestamp.is_none());
    if successor || exhausted || place::has_room(step, site.resolved, site.template, &site.around) {
        return Recovery::ServeOn;
    }
    let since = failures.iter().find(|f| Some(f.supernode.as_str()) == name).map_or(step.world.now, |f| f.at);
    let patient =
        site.life.recovery == RecoveryMode::ReplaceFirst && step.world.now - since < site.life.surge_timeout;
    if patient { Recovery::ServeOn } else { Recovery::Delete }
}

/// Takes away what a failed supernode still holds: running pods, gang, fabric. A pod that has ended stays as evidence.
fn strip(step: &mut Step<'_>, supernode: &Supernode, seen: &Seen) {
    let name = supernode.metadata.name.as_deref().unwrap_or_default();
    let why = "its supernode failed too often";
    for pod in &seen.nodes {
        if let Some(object) = step.world.get(Kind::Pod, &pod.pod).cloned()
            && !matches!(&object, Object::Pod(pod) if crate::emulate::has_ended(pod))
        {
            step.delete(&object, why);
        }
    }
    for kind in [Kind::Gang, Kind::ComputeDomain] {
        if let Some(object) = step.world.get(kind, name).cloned() {
            step.delete(&object, why);
        }
    }
}

/// Carries out what the budget allows.
fn act(
    step: &mut Step<'_>,
    site: &Site<'_>,
    (all, members): (&[Supernode], &[Member]),
    terminal: bool,
    outcome: &mut Outcome,
) {
    let key = Object::from(site.pool.clone()).key();
    let failures = step.next.failures.get(site.pool_name()).cloned().unwrap_or_default();
    let retry = retries::retry(&failures, &site.template.revision, site.limits(), step.world.now);
    let pause = step.cluster.spec.operation.as_ref().and_then(|o| o.pause);
    let changing = members.iter().any(|m| !m.current && !m.draining);
    let budget = Budget {
        desired: site.life.replicas,
        surge: site.life.max_surge.max(1),
        paused: pause == Some(Pause::Rollouts),
        hold: terminal || retry != Retry::Now,
        room: !changing || place::has_room(step, site.resolved, site.template, &site.around),
        max_unavailable: site.life.max_unavailable,
        surge_timeout: site.life.surge_timeout,
    };
    let moves = rollout::moves(members, budget);
    carry_out(step, site, all, &moves);
    let last = failures.last();
    if let Retry::At(at) = retry {
        let since = last.map_or(0, |f| f.at);
        let why = last.map(|f| format!("{}: {}", f.reason, f.message)).unwrap_or_default();
        let message = format!("the next one is made {} s after the last failure ({why})", at - since);
        step.wait(&key, "BackOff", since, message);
    }
    let exhausted = match retry {
        Retry::Exhausted { failures } => Some(failures),
        _ => terminal.then_some(failures.len() as u32),
    };
    if let Some(count) = exhausted {
        let kept = all.iter().filter_map(|sn| sn.status.as_ref()?.last_failure.as_ref()).next_back();
        let last = match (last, kept) {
            (Some(last), _) => format!("{}: {}", last.reason, last.message),
            (None, Some(kept)) => format!("{}: {}", kept.reason, kept.message.clone().unwrap_or_default()),
            (None, None) => String::new(),
        };
        let message = format!("{count} supernodes failed; the last: {last}");
        step.wait(&key, reason::RETRIES_EXHAUSTED, 0, message.clone());
        outcome.stalled = Some((reason::RETRIES_EXHAUSTED, message));
    }
}

fn carry_out(step: &mut Step<'_>, site: &Site<'_>, all: &[Supernode], moves: &Moves) {
    let by_name = |name: &str| all.iter().find(|sn| sn.metadata.name.as_deref() == Some(name));
    for supernode in moves.delete.iter().filter_map(|name| by_name(name)) {
        step.delete(&Object::from(supernode.clone()), "serves nobody and is not wanted any more");
    }
    for (name, why) in &moves.drain {
        if let Some(supernode) = by_name(name) {
            if *why == rollout::UNPLACEABLE {
                let note = "the new one finds no place beside the old one: the old one goes first";
                step.event(
                    Object::from(supernode.clone()).key(),
                    EventKind::Warning,
                    "SurgeUnplaceable",
                    note,
                );
            }
            drain::begin(step, supernode, site.life.drain_seconds, why);
        }
    }
    for at in 0..moves.create {
        let replaced = moves.replaced.get(at as usize).and_then(|name| by_name(name));
        create(step, site, replaced);
    }
}

fn create(step: &mut Step<'_>, site: &Site<'_>, replaced: Option<&Supernode>) {
    let template = site.template;
    let pool_name = site.pool_name().to_owned();
    let Some((backend, compute_domain)) = means(step, site) else {
        return; // the cluster is Stalled and says which API is missing
    };
    let name = step.fresh_name(Kind::Supernode, &pool_name);
    let mut labels = naming::labels(step.cluster_name(), Some(site.component));
    labels.insert(label::REVISION.to_owned(), template.revision.clone());
    labels.insert(label::KV_EPOCH.to_owned(), template.kv_epoch.clone());
    let domain = replaced.and_then(|sn| sn.status.as_ref()?.domain.clone());
    let mut supernode = Supernode::new(
        &name,
        SupernodeSpec {
            cluster_name: step.cluster_name().to_owned(),
            pool_name,
            role: if site.component == Component::Decode { PoolRole::Decode } else { PoolRole::Prefill },
            revision: template.revision.clone(),
            kv_epoch: template.kv_epoch.clone(),
            nodes: template.nodes,
            accelerators_per_node: template.ranks_per_node,
            spare_nodes: None,
            backend,
            compute_domain,
            domain_preference: domain.into_iter().collect(),
            plan_hash: None,
            replaces: replaced.and_then(|sn| sn.metadata.name.clone()),
            drain: None,
            rank_map: Vec::new(),
        },
    );
    supernode.metadata = meta(&name, Some(labels));
    supernode.metadata.finalizers = Some(vec![finalizer::DRAIN.to_owned()]);
    let owner = Object::from(site.pool.clone()).owner_reference();
    step.ensure_created(supernode.clone(), &owner);
    let note = format!("{} pods with {} ranks each", template.nodes, template.ranks_per_node);
    step.event(Object::from(supernode).key(), EventKind::Normal, "SupernodeCreated", note);
}

/// How a new member gets its nodes, and whether it gets a ComputeDomain: chosen once. `None` if what the spec asks for
/// cannot be had.
fn means(step: &mut Step<'_>, site: &Site<'_>) -> Option<(SchedulingBackend, Option<bool>)> {
    let Some(placing) = &site.resolved.placing else {
        return Some((SchedulingBackend::Builtin, None));
    };
    let apis = &step.world.apis;
    let unreadable = step.world.nodes.unreadable;
    let queue = placing.queue.as_deref();
    let (backend, note) = gang::backend(placing.backend, queue, apis, unreadable, &placing.profile).ok()?;
    let vendor = site.resolved.vendor;
    let wanted = fabric::wanted(placing.compute_domain, vendor, &placing.profile, apis).ok()?;
    if let Some(note) = note {
        step.event(step.cluster_key(), EventKind::Warning, "BackendFallback", note);
    }
    Some((backend, Some(wanted && site.template.nodes > 1).filter(|wanted| *wanted)))
}

/// A supernode that is on its way out.
fn leave(step: &mut Step<'_>, supernode: &Supernode, seen: &Seen, drain_seconds: u32) {
    if supernode.spec.drain.is_none() {
        // Deleted by hand, or serving nobody: drain what runs, then let go.
        if seen.inflight > 0 && seen.failure.is_none() {
            drain::begin(step, supernode, drain_seconds, "Deleted");
        } else {
            drain::release(step, supernode);
        }
        return;
    }
    drain::follow(step, supernode, seen);
}

/// Remembers a failure once: for the back-off, for the quarantine, for people.
fn remember(
    step: &mut Step<'_>,
    site: &Site<'_>,
    supernode: &Supernode,
    failure: &Failure,
    seen: &Seen,
    quarantine: &mut Quarantine,
) {
    let object = Object::from(supernode.clone());
    let status = supernode.status.as_ref();
    let record = FailureRecord {
        at: step.world.now,
        supernode: object.name().to_owned(),
        revision: supernode.spec.revision.clone(),
        reason: failure.reason.clone(),
        message: format!("{}: {}", failure.pod, failure.message),
        node: failure.node.clone().or_else(|| {
            seen.nodes.iter().find(|pod| pod.pod == failure.pod).and_then(|pod| pod.node.clone())
        }),
        domain: status.and_then(|status| status.domain.clone()),
    };
    let note = format!("{}: {}", record.reason, record.message);
    let failures = step.next.failures.entry(site.pool_name().to_owned()).or_default();
    if retries::remember(failures, record.clone()) {
        let failures = failures.clone();
        for name in quarantine.blame(&failures, &record, step.world.now) {
            let note = format!("{name} is avoided for 6 h: three failures within an hour, the last: {note}");
            step.event(Object::from(site.pool.clone()).key(), EventKind::Warning, "NodeQuarantined", note);
        }
        let reason = if record.reason == "GangTimeout" { "GangTimeout" } else { "SupernodeFailed" };
        step.event(object.key(), EventKind::Warning, reason, note);
    }
}

/// Failures of this supernode and those before it; said once, it does not move by itself.
fn restarts(step: &Step<'_>, site: &Site<'_>, supernode: &Supernode) -> u32 {
    let said = supernode.status.as_ref().and_then(|status| status.restart_count);
    let failures = step.next.failures.get(site.pool_name()).map_or(0, |failures| {
        failures.iter().filter(|f| f.revision == supernode.spec.revision).count() as u32
    });
    let fresh = supernode.status.is_none();
    match said {
        Some(said) => said.max(if supernode_failed(step, site, supernode) { failures } else { 0 }),
        None if fresh => failures,
        None if supernode_failed(step, site, supernode) => failures,
        None => 0,
    }
}

fn supernode_failed(step: &Step<'_>, site: &Site<'_>, supernode: &Supernode) -> bool {
    let name = supernode.metadata.name.as_deref();
    let failures = step.next.failures.get(site.pool_name());
    failures.is_some_and(|failures| failures.iter().any(|f| Some(f.supernode.as_str()) == name))
}

fn surroundings(quarantine: &Quarantine, all: &[Supernode]) -> Surroundings {
    let domain = |sn: &Supernode| {
        let status = sn.status.as_ref()?;
        let placed = status.domain.clone().or_else(|| status.placement.as_ref()?.domain.clone())?;
        Some((sn.metadata.name.clone()?, placed))
    };
    Surroundings {
        excluded_nodes: quarantine.nodes(),
        excluded_domains: quarantine.domains(),
        domains: all.iter().filter_map(domain).collect(),
    }
}

fn created(supernode: &Supernode) -> i64 {
    supernode.metadata.creation_timestamp.as_ref().map_or(0, |t| t.0.as_second())
}

fn stored_template(object: &Object) -> Option<Template> {
    match object {
        Object::ControllerRevision(stored) => serde_json::from_value(stored.data.as_ref()?.0.clone()).ok(),
        _ => None,
    }
}

/// Prefill pools whose workers are gangs have no Deployment; decode pools never.
pub(crate) fn is_gang(component: Component, life: &Life) -> bool {
    component == Component::Decode || life.nodes > 1
}
