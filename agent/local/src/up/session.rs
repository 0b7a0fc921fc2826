//! The loop of a running cluster: gather, plan, check, commit, execute; and what the user asks meanwhile.
//!
//! Invariant: only monotonic time moves the world's clock, so a clock that is set back or forth changes nothing.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Result, bail};
use deepinfer_agent::LoadDetail;
use deepinfer_crds::condition::{self, kind};
use deepinfer_planner::{Action, EventKind, Key, Kind, Object, Plan, Report, Target, World, check, plan};
use deepinfer_protocol::AgentId;
use deepinfer_protocol::agent_status::{AgentPhase, AgentStatus};
use deepinfer_protocol::fleet::FleetView;
use deepinfer_transport::{ClusterKey, control_auth};
use tokio::sync::watch;

use super::changes::{self, Applied};
use super::control::{Answer, Question};
use super::pods::Pods;
use super::storage::Storage;
use super::view::view;

/// Plans in a row after which the loop breathes; a first start takes about six.
const MAX_ROUNDS: usize = 20;
/// Agents and pods are looked at this often.
pub const LOOK_EVERY: Duration = Duration::from_millis(200);

/// A cluster that runs in this process.
pub struct Session {
    world: World,
    target: Target,
    key: ClusterKey,
    pods: Pods,
    storage: Storage,
    fleet: watch::Sender<Arc<FleetView>>,
    /// Monotonic zero of the world's clock, and what the wall clock said then.
    begun: (Instant, i64),
    report: Report,
    /// Of the agents and pods that the last plan saw.
    seen: Seen,
    next_plan: Instant,
    /// Has answered once: a failure is now something to recover from, not a reason to give up.
    has_served: bool,
}

/// What a plan looks at, of the things that change by themselves.
type Seen = BTreeMap<String, (bool, bool, Option<(AgentPhase, bool)>)>;

impl Session {
    /// A cluster whose object is in `world`, whose clock says what the wall clock says now.
    pub fn new(
        world: World,
        target: Target,
        key: ClusterKey,
        pods: Pods,
        storage: Storage,
        fleet: watch::Sender<Arc<FleetView>>,
    ) -> Self {
        let begun = (Instant::now(), world.now);
        let (report, seen, next_plan) = (Report::default(), Seen::new(), Instant::now());
        Self { world, target, key, pods, storage, fleet, begun, report, seen, next_plan, has_served: false }
    }

    /// What runs.
    pub fn pods(&mut self) -> &mut Pods {
        &mut self.pods
    }

    /// Where clients connect, from the first time on that a request would be answered. `None` before.
    pub fn newly_serving(&mut self) -> Option<String> {
        let ready = self.pods.gateway().is_some_and(deepinfer_gateway::GatewayHandle::ready);
        if self.has_served || !ready || !self.is(kind::AVAILABLE) {
            return None;
        }
        self.has_served = true;
        self.pods.url().map(str::to_owned)
    }

    fn is(&self, kind: &str) -> bool {
        let status = self.world.cluster().and_then(|cluster| cluster.status.as_ref());
        status.is_some_and(|status| condition::is_true(&status.conditions, kind))
    }

    /// Looks at everything, and plans if something has changed or it is time.
    ///
    /// # Errors
    /// Why the first start will not come to an end.
    pub async fn turn(&mut self) -> Result<()> {
        for _ in 0..MAX_ROUNDS {
            self.world.now = self.begun.1 + i64::try_from(self.begun.0.elapsed().as_secs()).unwrap_or(0);
            let gone = self.pods.follow(&mut self.world).await;
            self.pods.observe(&mut self.world);
            if !self.has_served {
                self.give_up_early()?;
            }
            self.world.settle();
            let seen = seen(&self.world);
            if !gone && seen == self.seen && Instant::now() < self.next_plan {
                break;
            }
            self.seen = seen;
            if !self.round().await {
                break;
            }
        }
        // Again, if the disk would not take it when it was made.
        if let Some(blueprint) = &self.world.blueprint {
            self.storage.commit(blueprint).await;
        }
        let status = serde_json::to_value(self.world.cluster()).unwrap_or_default();
        self.storage.status(status, false).await;
        Ok(())
    }

    /// A first start fails for a reason that trying again does not remove.
    fn give_up_early(&self) -> Result<()> {
        if let Some(reason) = self.pods.failure() {
            bail!("{reason}");
        }
        let status = self.world.cluster().and_then(|cluster| cluster.status.as_ref());
        let stalled = status.and_then(|status| condition::get(&status.conditions, kind::STALLED));
        if let Some(stalled) = stalled.filter(|condition| condition.status == "True") {
            bail!("{}: {}", stalled.reason, stalled.message);
        }
        Ok(())
    }

    /// One plan; whether it had anything to do.
    async fn round(&mut self) -> bool {
        let plan = plan(&self.world, &self.target);
        self.next_plan = Instant::now() + Duration::from_secs(u64::from(plan.wakeup_seconds));
        let findings = check(&self.world, &plan);
        if let Some(finding) = findings.first() {
            tracing::error!(%finding, "a plan breaks a rule and is not executed");
            return false;
        }
        self.storage.commit(&plan.blueprint).await;
        self.world.blueprint = Some(plan.blueprint.clone());
        self.publish(&plan);
        for action in &plan.actions {
            self.execute(action);
        }
        let pods = self.world.of(Kind::Pod).count();
        self.world.settle();
        let busy = !plan.actions.is_empty() || self.world.of(Kind::Pod).count() != pods;
        self.report = plan.report;
        if busy {
            // There is more to see at once.
            self.next_plan = Instant::now();
        }
        busy
    }

    fn publish(&self, plan: &Plan) {
        let view = &plan.blueprint.fleet;
        self.fleet.send_if_modified(|known| {
            let newer = **known != *view;
            if newer {
                *known = Arc::new(view.clone());
            }
            newer
        });
    }

    fn execute(&mut self, action: &Action) {
        match action {
            Action::CallAgent { agent, call } => self.pods.call(agent, call),
            Action::Event { regarding, kind: EventKind::Warning, reason, note } => {
                tracing::warn!(object = %regarding, reason, note);
            }
            Action::Event { regarding, reason, note, .. } => {
                tracing::info!(object = %regarding, reason, note)
            }
            Action::Status { .. } | Action::Finalizers { .. } => {}
            _ => tracing::debug!(%action, "planned"),
        }
        if let Err(conflict) = self.world.apply(action) {
            tracing::warn!(%conflict, %action, "the next plan will see to it");
        }
    }

    /// Answers the control socket.
    pub async fn answer(&mut self, question: Question) -> Answer {
        match question {
            Question::Status => match view(&self.world, &self.pods, &self.storage, &self.report) {
                Some(view) => Answer::Status(Box::new(view)),
                None => Answer::Refused("no cluster runs here".to_owned()),
            },
            Question::Apply { yaml, file, base, dry_run } => {
                let (world, target) = (self.world.clone(), self.target.clone());
                let extras = self.pods.extras().clone();
                let checked = move || changes::apply(&world, &target, &extras, (yaml, file, base));
                match tokio::task::spawn_blocking(checked).await {
                    Ok(Ok(applied)) => self.applied(applied, dry_run),
                    Ok(Err(message)) => Answer::Refused(message),
                    Err(error) => Answer::Refused(error.to_string()),
                }
            }
            Question::Experts { total } => {
                let detail = if total { LoadDetail::Total } else { LoadDetail::Sums };
                let agents = self.pods.agents();
                Answer::Experts(agents.values().filter_map(|agent| agent.load(detail)).collect())
            }
            Question::Authorize { method, path } => {
                let now = u64::try_from(wall_clock()).unwrap_or(0);
                Answer::Authorized(control_auth::authorization(&self.key, now, &method, &path))
            }
        }
    }

    /// The file is good; nothing has happened in the world since, as only this task changes it.
    fn applied(&mut self, applied: Applied, dry_run: bool) -> Answer {
        let generation = applied.world.cluster().and_then(|c| c.metadata.generation).unwrap_or(0);
        if !dry_run {
            self.world = applied.world;
            self.target = applied.target;
            self.next_plan = Instant::now();
        }
        Answer::Applied { text: applied.text, generation }
    }

    /// Writes the last status.
    pub async fn close(&mut self) {
        let status = serde_json::to_value(self.world.cluster()).unwrap_or_default();
        self.storage.status(status, true).await;
        let _ = self.storage.state().free_socket();
    }
}

/// Seconds since 1970.
pub fn wall_clock() -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(now.as_secs()).unwrap_or(i64::MAX)
}

fn seen(world: &World) -> Seen {
    let mut seen = Seen::new();
    for (Key { name, .. }, object) in world.objects.iter().filter(|(key, _)| key.kind == Kind::Pod) {
        let Object::Pod(pod) = object else { continue };
        let word = world.agents.get(&AgentId::from(name.as_str())).and_then(|word| word.status.as_ref());
        let word = word.map(|AgentStatus { phase, accepting, .. }| (*phase, *accepting));
        let ended = deepinfer_planner::has_ended(pod);
        seen.insert(name.clone(), (deepinfer_planner::is_ready(pod), ended, word));
    }
    seen
}
