//! Five calls for one cluster: gather, plan, check, commit, execute. Then again, as long as that changed something.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use deepinfer_crds::names::label;
use deepinfer_planner::{Action, Finding, Kind, Namespaced, Plan, Target, World, check, plan};
use tokio_util::sync::CancellationToken;

use crate::commit;
use crate::error::{Class, Error};
use crate::execute::{Executor, Outcome};
use crate::gather::{Gathered, Gatherer};
use crate::metrics::{ErrorClass, ReconcileResult};
use crate::requeue::{Queue, retry_after};

mod report;

use self::report::{Summary, accuse, log_details, log_phases, metric, millis};

/// Times that a plan is made anew at once because somebody else wrote first.
const TRIES: u32 = 3;
/// Looks in a row that changed something after which the pause of the plan is kept: nothing good changes for ever.
const ROUNDS: u32 = 12;
/// Looks without effect after which a waiting plan is looked at less often, at most by this pause.
const PATIENT_LOOKS: u32 = 10;
const LONGEST_WAIT: Duration = Duration::from_secs(5);
/// After a plan that breaks a rule.
const BROKEN_PAUSE: Duration = Duration::from_secs(60);
/// After a look that came before the agents were asked.
const UNSETTLED_PAUSE: Duration = Duration::from_secs(1);
/// After a status was held back.
const HELD_BACK_PAUSE: Duration = Duration::from_secs(1);

/// Looks after clusters.
pub struct Reconciler {
    /// Makes worlds.
    pub gatherer: Gatherer,
    /// Does actions.
    pub executor: Executor,
    /// What plans are for.
    pub target: Target,
    /// Who is due.
    pub queue: Arc<Queue<Namespaced>>,
    /// Every cluster is looked at again after this long.
    pub resync: Duration,
    /// Held while room is counted and promised: two plans never count the same room.
    pub placing: tokio::sync::Mutex<()>,
    /// What is remembered between looks: only how often they failed.
    pub memory: Mutex<BTreeMap<Namespaced, Memory>>,
    /// Numbers the looks.
    pub looks: AtomicU64,
}

/// How the last looks at a cluster went.
#[derive(Clone, Copy, Debug, Default)]
pub struct Memory {
    failures: u32,
    /// Looks in a row that changed something.
    rounds: u32,
    /// Looks in a row that wrote nothing.
    idle: u32,
}

/// How a look went.
enum Look {
    /// There is no such cluster (any more).
    Gone,
    /// Its agents were not asked yet: their silence means nothing.
    Unsettled,
    /// Its plan broke a rule.
    Broken(Vec<Finding>),
    /// Planned and done.
    Planned { plan: Box<Plan>, outcome: Box<Outcome>, committed: bool, look_within: Option<Duration> },
}

impl Reconciler {
    /// Looks after whoever is due, until `stop`.
    pub async fn work(self: Arc<Self>, stop: CancellationToken) {
        loop {
            let key = tokio::select! {
                biased;
                () = stop.cancelled() => return,
                key = self.queue.next() => key,
            };
            let after = self.reconcile(&key).await;
            self.queue.done(&key, after);
        }
    }

    /// One look at a cluster; gives when the next is due.
    pub async fn reconcile(&self, key: &Namespaced) -> Option<Duration> {
        let begun = Instant::now();
        let id = self.looks.fetch_add(1, Ordering::Relaxed) + 1;
        let mut tries = 1;
        let look = loop {
            match self.look(key, id).await {
                Err(error) if error.class() == Class::Conflict && tries < TRIES => {
                    self.executor.metrics.error(ErrorClass::Conflict);
                    tracing::debug!(namespace = key.0, cluster = key.1, reconcile_id = id, err = %error, "again");
                    tries += 1;
                }
                other => break other,
            }
        };
        let duration = begun.elapsed();
        let (result, after) = match look {
            Ok(Look::Gone) => {
                self.memory().remove(key);
                self.gatherer.lessons.forget(key);
                (ReconcileResult::Unchanged, None)
            }
            Ok(Look::Unsettled) => (ReconcileResult::Skipped, Some(UNSETTLED_PAUSE)),
            Ok(Look::Broken(findings)) => {
                self.executor.metrics.error(ErrorClass::Invariant);
                for finding in findings {
                    tracing::error!(namespace = key.0, cluster = key.1, reconcile_id = id, err = %finding, "plan refused");
                }
                (ReconcileResult::Failed, Some(BROKEN_PAUSE))
            }
            Ok(Look::Planned { plan, outcome, committed, look_within }) => {
                let (result, after) = self.after_plan(key, id, &plan, *outcome, committed, duration);
                // What a clock alone brings wakes nobody.
                (result, after.map(|after| look_within.map_or(after, |within| within.min(after))))
            }
            Err(error) => (ReconcileResult::Failed, self.after_error(key, id, &error, false, duration)),
        };
        self.executor.metrics.reconciled(result, duration);
        self.executor.metrics.queue_depth(self.queue.depth());
        after
    }

    async fn look(&self, key: &Namespaced, id: u64) -> Result<Look, Error> {
        let Some(mut gathered) = self.gatherer.gather(key, false).await? else {
            return Ok(Look::Gone);
        };
        if !gathered.settled {
            return Ok(Look::Unsettled);
        }
        let mut plan = self.plan(&gathered.world);
        let mut promised = BTreeSet::new();
        if places(&plan.actions) {
            let _placing = self.placing.lock().await;
            let Some(again) = self.gatherer.gather(key, true).await? else {
                return Ok(Look::Gone);
            };
            gathered = again;
            plan = self.plan(&gathered.world);
            promised = self.gatherer.caches.reserve(&key.0, &plan.actions);
        }
        let done = self.carry_out(&gathered, plan, id).await;
        if !promised.is_empty() {
            self.gatherer.caches.release(&promised);
        }
        done
    }

    /// Check, commit, execute.
    async fn carry_out(&self, gathered: &Gathered, plan: Plan, id: u64) -> Result<Look, Error> {
        let Gathered { world, cluster, owner, .. } = gathered;
        self.executor.metrics.observe(cluster, world);
        let findings = check(world, &plan);
        if !findings.is_empty() {
            let said = accuse(world, &findings);
            self.executor.execute(cluster, world, said.as_slice()).await;
            return Ok(Look::Broken(findings));
        }
        let committed = is_news(world, &plan);
        if committed {
            let (rest, caches) = (&self.executor.rest, &self.gatherer.caches);
            let live = gathered.blueprint.as_ref();
            let done = commit::commit(rest, caches, &cluster.namespace, owner, live, &plan.blueprint).await;
            if let Err(error) = done {
                if error.namespace_terminates() {
                    self.gatherer.lessons.terminates(&cluster.namespace);
                    return Err(Error::Gone {
                        key: deepinfer_planner::Key::new(Kind::ConfigMap, commit::name(&cluster.name)),
                    });
                }
                return Err(error);
            }
            tracing::debug!(reconcile_id = id, generation = plan.blueprint.generation.0, "committed");
        }
        let outcome = self.executor.execute(cluster, world, &plan.actions).await;
        log_phases(world, &plan.actions, id);
        let look_within = gathered.look_within;
        Ok(Look::Planned { plan: Box::new(plan), outcome: Box::new(outcome), committed, look_within })
    }

    /// Planning is pure work on values: the other tasks of this thread go elsewhere meanwhile.
    fn plan(&self, world: &World) -> Plan {
        let begun = Instant::now();
        let plan = tokio::task::block_in_place(|| plan(world, &self.target));
        self.executor.metrics.planned(begun.elapsed());
        plan
    }

    fn after_plan(
        &self,
        key: &Namespaced,
        id: u64,
        plan: &Plan,
        outcome: Outcome,
        committed: bool,
        duration: Duration,
    ) -> (ReconcileResult, Option<Duration>) {
        let acted = committed || !outcome.done.is_empty();
        if acted || outcome.refused > 0 {
            tracing::info!(
                namespace = key.0,
                cluster = key.1,
                reconcile_id = id,
                action = %Summary(&outcome.done),
                generation = plan.blueprint.generation.0,
                refused = outcome.refused,
                left_alone = outcome.left_alone,
                duration_ms = millis(duration),
                "reconciled"
            );
            log_details(key, id, &plan.actions);
        } else {
            tracing::debug!(namespace = key.0, cluster = key.1, reconcile_id = id, "unchanged");
        }
        if let Some(error) = outcome.error {
            return (ReconcileResult::Failed, self.after_error(key, id, &error, outcome.moved, duration));
        }
        let Memory { rounds, idle, .. } = {
            let mut all = self.memory();
            let memory = all.entry(key.clone()).or_default();
            memory.failures = 0;
            memory.rounds = if outcome.moved { memory.rounds + 1 } else { 0 };
            memory.idle = if acted { 0 } else { memory.idle.saturating_add(1) };
            *memory
        };
        let wakeup = Duration::from_secs(u64::from(plan.wakeup_seconds.max(1)));
        let pause = stretched(wakeup, idle).min(self.resync);
        let after = if outcome.moved && rounds <= ROUNDS {
            Duration::ZERO
        } else if outcome.held_back {
            pause.min(HELD_BACK_PAUSE)
        } else {
            pause
        };
        (if acted { ReconcileResult::Acted } else { ReconcileResult::Unchanged }, Some(after))
    }

    /// When to look again. `got_on`: objects were changed before it went wrong, so the next failure is another one
    /// and the waits begin anew; a status that only says so is none.
    fn after_error(
        &self,
        key: &Namespaced,
        id: u64,
        error: &Error,
        got_on: bool,
        duration: Duration,
    ) -> Option<Duration> {
        let failures = {
            let mut all = self.memory();
            let memory = all.entry(key.clone()).or_default();
            memory.failures = if got_on { 1 } else { memory.failures.saturating_add(1) };
            memory.failures
        };
        self.executor.metrics.error(metric(error));
        let wait = retry_after(error, failures, salt(key));
        let mut causes = error.to_string();
        let mut source = std::error::Error::source(error);
        while let Some(cause) = source {
            causes = format!("{causes}: {cause}");
            source = cause.source();
        }
        let (class, api_status) = (error.class(), error.status());
        // A conflict heals by looking again; a fault of the API server is worth a line only when it lasts.
        if class == Class::Conflict || (class == Class::Transient && failures <= 1) {
            tracing::info!(
                namespace = key.0,
                cluster = key.1,
                reconcile_id = id,
                err = causes,
                err_class = class.as_str(),
                api_status,
                duration_ms = millis(duration),
                retry_seconds = wait.as_secs_f64(),
                "tried again"
            );
        } else {
            tracing::warn!(
                namespace = key.0,
                cluster = key.1,
                reconcile_id = id,
                err = causes,
                err_class = class.as_str(),
                api_status,
                duration_ms = millis(duration),
                retry_seconds = wait.as_secs_f64(),
                failures,
                "failed"
            );
        }
        Some(wait)
    }

    fn memory(&self) -> MutexGuard<'_, BTreeMap<Namespaced, Memory>> {
        self.memory.lock().expect("no holder of the memory panics")
    }
}

/// Whether a plan makes pods of supernodes, which need room that others may count too.
fn places(actions: &[Action]) -> bool {
    actions.iter().any(|action| match action {
        Action::Create(object) => object.kind() == Kind::Pod && object.label(label::SUPERNODE).is_some(),
        _ => false,
    })
}

/// Whether the plan's memory is to be committed. A cluster that cannot be followed has none, an old schema is written
/// nothing, and a namespace that is going takes no new ConfigMap.
fn is_news(world: &World, plan: &Plan) -> bool {
    if world.skew.is_some() || world.blueprint.as_ref() == Some(&plan.blueprint) {
        return false;
    }
    if world.blueprint.is_none() {
        let says_only = |action: &Action| matches!(action, Action::Status { .. } | Action::Event { .. });
        let nothing = plan.actions.iter().all(says_only) && world.pools().next().is_none();
        let leaving = world.cluster().is_some_and(|c| c.metadata.deletion_timestamp.is_some());
        return !nothing && !world.namespace_terminating && !leaving;
    }
    true
}

/// A plan that waits for something wants to look again soon. What happens wakes it anyway; only its own clocks do not,
/// and they may be a few seconds late when nothing has happened for a while.
fn stretched(wakeup: Duration, idle: u32) -> Duration {
    let factor = 1 << idle.saturating_sub(PATIENT_LOOKS).min(8);
    wakeup.saturating_mul(factor).min(LONGEST_WAIT.max(wakeup))
}

/// Spreads clusters that fail together; the same for the same cluster.
fn salt(key: &Namespaced) -> u64 {
    key.0
        .bytes()
        .chain(key.1.bytes())
        .fold(1469598103934665603, |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(1099511628211))
}

#[cfg(test)]
mod tests {
    use deepinfer_planner::Blueprint;

    use super::*;

    fn empty_plan(blueprint: Blueprint, actions: Vec<Action>) -> Plan {
        let report = deepinfer_planner::Report::default();
        Plan { blueprint, actions, report, wakeup_seconds: 60 }
    }

    #[test]
    fn memory_is_committed_when_it_is_new_and_never_into_an_old_schema_or_a_dying_namespace() {
        let mut world = World::new("ns", 1);
        let next = Blueprint { names: 1, ..Blueprint::default() };
        let key = deepinfer_planner::Key::new(Kind::Pool, "c-decode");
        let acts = vec![Action::Replicas { key, replicas: 1 }];
        assert!(!is_news(&world, &empty_plan(next.clone(), Vec::new())), "nothing is followed");
        assert!(is_news(&world, &empty_plan(next.clone(), acts.clone())));
        world.namespace_terminating = true;
        assert!(!is_news(&world, &empty_plan(next.clone(), acts.clone())));
        world.namespace_terminating = false;
        world.blueprint = Some(next.clone());
        assert!(!is_news(&world, &empty_plan(next.clone(), acts.clone())), "it is there already");
        world.blueprint = Some(Blueprint::default());
        assert!(is_news(&world, &empty_plan(next.clone(), Vec::new())));
        world.skew = Some("apply the CRDs first".to_owned());
        assert!(!is_news(&world, &empty_plan(next, acts)));
    }

    #[test]
    fn a_plan_that_waits_in_vain_is_looked_at_less_often_but_never_much_too_late() {
        let second = Duration::from_secs(1);
        let pauses: Vec<u64> = (8..16).map(|idle| stretched(second, idle).as_secs()).collect();
        assert_eq!(pauses, [1, 1, 1, 2, 4, 5, 5, 5]);
        assert_eq!(stretched(60 * second, 100), 60 * second);
    }
}
