//! Who is followed, when each is due, and what a new word means for plans. Time comes from outside.
//!
//! Invariants: an agent is in the queue of its lane at most once that counts (older places are void by their ticket);
//! a question's answer counts only for the agent it was asked of, not for a successor of its name or address.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use deepinfer_planner::AgentWord;
use deepinfer_protocol::AgentId;
use deepinfer_protocol::agent_status::AgentStatus;
use deepinfer_transport::ClusterKey;

use super::client::Target;
use super::{AgentAddress, AgentOptions, Cadence};
use crate::keys::ClusterRef;

/// Seconds of silence at which a plan may come out differently: another leader is named, the agent counts as gone.
const SILENCES: &[i64] = &[2, 10, FORGET_SECONDS];
/// Silence after which the last word is no longer believed (operator.md 7.0).
const FORGET_SECONDS: i64 = 30;
/// First questions to many agents at once are spread over this time.
const FIRST_SPREAD: Duration = Duration::from_millis(200);

/// Leaders have their own lane: they do not wait behind a rack of dead agents. Neither do those that serve wait behind
/// thousands that load their weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lane {
    Leaders,
    /// Has a budget; those that were never asked are not in it.
    Starting,
    Others,
}

impl Lane {
    pub(super) const ALL: [Self; 3] = [Self::Leaders, Self::Starting, Self::Others];
}

/// A question that is due.
#[derive(Clone, Debug)]
pub(super) struct Question {
    pub(super) cluster: ClusterRef,
    pub(super) target: Target,
    /// Of the agent that is asked.
    serial: u64,
}

#[derive(Debug)]
struct Agent {
    address: AgentAddress,
    /// Names this agent among all that were ever followed.
    serial: u64,
    /// Its valid place in the queue; 0 while it is being asked.
    ticket: u64,
    due: Instant,
    asked: bool,
    answers: bool,
    status: Option<AgentStatus>,
    /// When it last answered; before its first word, when it was first followed: its silence begins there.
    heard: i64,
    /// When the first question since was asked that had no answer; from the beginning until the first answer.
    silent_since: Option<i64>,
    /// How many of [`SILENCES`] were told.
    told: usize,
}

#[derive(Debug)]
struct Cluster {
    key: Arc<ClusterKey>,
    agents: BTreeMap<AgentId, Agent>,
    /// Agents that were never asked.
    unasked: usize,
    /// Every agent of the first round was asked. Stays true: who comes later is new to everybody.
    settled: bool,
}

type Queue = BTreeMap<(Instant, u64), (ClusterRef, AgentId)>;

/// Who is due, by lane.
#[derive(Debug, Default)]
struct Queues {
    leaders: Queue,
    starting: Queue,
    others: Queue,
    counter: u64,
}

impl Queues {
    fn count(&mut self) -> u64 {
        self.counter += 1;
        self.counter
    }

    fn of(&mut self, lane: Lane) -> &mut Queue {
        match lane {
            Lane::Leaders => &mut self.leaders,
            Lane::Starting => &mut self.starting,
            Lane::Others => &mut self.others,
        }
    }

    /// Puts an agent into the queue of its lane; its older place is void.
    fn put(&mut self, cluster: &ClusterRef, agent: &mut Agent) {
        agent.ticket = self.count();
        let place = (agent.due, agent.ticket);
        self.of(agent.lane()).insert(place, (cluster.clone(), agent.address.pod.clone()));
    }
}

/// A budget of questions: so many a second, and as many at once after a pause of a second.
#[derive(Debug)]
struct Pace {
    gap: Duration,
    /// Up to here the time is spent.
    spent: Option<Instant>,
}

impl Pace {
    const BURST: Duration = Duration::from_secs(1);

    fn new(per_second: usize) -> Self {
        let per_second = u32::try_from(per_second.max(1)).unwrap_or(u32::MAX);
        Self { gap: Self::BURST / per_second, spent: None }
    }

    /// When the next question may go.
    fn free_at(&self, now: Instant) -> Instant {
        self.spent.map_or(now, |spent| (spent + self.gap).checked_sub(Self::BURST).unwrap_or(now).max(now))
    }

    fn spend(&mut self, now: Instant) {
        self.spent = Some(self.spent.map_or(now, |spent| spent.max(now)) + self.gap);
    }
}

/// All agents of all clusters.
#[derive(Debug)]
pub(super) struct Table {
    options: AgentOptions,
    clusters: BTreeMap<ClusterRef, Cluster>,
    queues: Queues,
    /// Of [`Lane::Starting`].
    pace: Pace,
}

impl Table {
    pub(super) fn new(options: &AgentOptions) -> Self {
        Self {
            options: options.clone(),
            clusters: BTreeMap::new(),
            queues: Queues::default(),
            pace: Pace::new(options.starting_rate),
        }
    }

    /// Whether somebody became due earlier or new.
    pub(super) fn follow(
        &mut self,
        cluster: &ClusterRef,
        agents: Vec<AgentAddress>,
        key: impl FnOnce() -> ClusterKey,
        now: Instant,
        unix_seconds: i64,
    ) -> bool {
        if agents.is_empty() {
            self.clusters.remove(cluster);
            return false;
        }
        let fresh = || Cluster { key: Arc::new(key()), agents: BTreeMap::new(), unasked: 0, settled: false };
        let mut known = self.clusters.remove(cluster).unwrap_or_else(fresh);
        let wanted: BTreeSet<&AgentId> = agents.iter().map(|agent| &agent.pod).collect();
        known.agents.retain(|name, _| wanted.contains(name));
        let mut changed = false;
        for address in agents {
            let same_place =
                |live: &&mut Agent| (live.address.ip, live.address.control) == (address.ip, address.control);
            if let Some(live) = known.agents.get_mut(&address.pod).filter(same_place) {
                if live.address == address {
                    continue;
                }
                let sooner = now + interval(&self.options, address.cadence);
                live.address = address;
                // A place in the other lane, or an earlier one; who is being asked gets its place afterwards.
                if live.ticket != 0 {
                    live.due = live.due.min(sooner);
                    self.queues.put(cluster, live);
                    changed = true;
                }
                continue;
            }
            let serial = self.queues.count();
            let spread = jitter(serial, FIRST_SPREAD);
            let mut agent = Agent {
                due: now + if address.cadence == Cadence::Leader { Duration::ZERO } else { spread },
                address,
                serial,
                ticket: 0,
                asked: false,
                answers: false,
                status: None,
                heard: unix_seconds,
                silent_since: Some(unix_seconds),
                told: 0,
            };
            self.queues.put(cluster, &mut agent);
            known.agents.insert(agent.address.pod.clone(), agent);
            changed = true;
        }
        known.unasked = known.agents.values().filter(|agent| !agent.asked).count();
        known.settled |= known.unasked == 0;
        self.clusters.insert(cluster.clone(), known);
        changed
    }

    pub(super) fn words(&self, cluster: &ClusterRef) -> BTreeMap<AgentId, AgentWord> {
        let agents = self.clusters.get(cluster).map(|cluster| &cluster.agents);
        agents.into_iter().flatten().map(|(name, agent)| (name.clone(), agent.word())).collect()
    }

    pub(super) fn settled(&self, cluster: &ClusterRef) -> bool {
        self.clusters.get(cluster).is_none_or(|cluster| cluster.settled)
    }

    pub(super) fn target(&self, cluster: &ClusterRef, agent: &AgentId) -> Option<Target> {
        let cluster = self.clusters.get(cluster)?;
        cluster.agents.get(agent).map(|agent| agent.target(&cluster.key))
    }

    /// The agent is asked next.
    pub(super) fn hurry(&mut self, cluster: &ClusterRef, agent: &AgentId, now: Instant) {
        let known = self.clusters.get_mut(cluster).and_then(|known| known.agents.get_mut(agent));
        if let Some(agent) = known.filter(|agent| agent.ticket != 0) {
            agent.due = now;
            self.queues.put(cluster, agent);
        }
    }

    /// The next question of a lane if it is due; else when to look again.
    pub(super) fn next(&mut self, lane: Lane, now: Instant) -> Result<Question, Option<Instant>> {
        loop {
            let queue = self.queues.of(lane);
            let Some((&(mut due, ticket), _)) = queue.first_key_value() else { return Err(None) };
            if lane == Lane::Starting {
                due = due.max(self.pace.free_at(now));
            }
            if due > now {
                return Err(Some(due));
            }
            let Some((_, (cluster, name))) = queue.pop_first() else { return Err(None) };
            let Some(known) = self.clusters.get_mut(&cluster) else { continue };
            let Some(agent) = known.agents.get_mut(&name).filter(|agent| agent.ticket == ticket) else {
                continue;
            };
            agent.ticket = 0;
            if lane == Lane::Starting {
                self.pace.spend(now);
            }
            let (target, serial) = (agent.target(&known.key), agent.serial);
            return Ok(Question { cluster, target, serial });
        }
    }

    /// An answer, or none. True: the cluster's plan may come out differently.
    pub(super) fn answered(
        &mut self,
        question: &Question,
        status: Option<AgentStatus>,
        now: Instant,
        unix_seconds: i64,
    ) -> bool {
        let Some(cluster) = self.clusters.get_mut(&question.cluster) else { return false };
        let Some(agent) = cluster.agents.get_mut(&question.target.agent) else { return false };
        if agent.serial != question.serial {
            return false;
        }
        let mut matters = false;
        if !agent.asked {
            agent.asked = true;
            cluster.unasked -= 1;
            matters = cluster.unasked == 0 && !cluster.settled;
            cluster.settled |= matters;
        }
        let waited = i64::try_from(self.options.timeout.as_secs()).unwrap_or(i64::MAX);
        matters |= agent.hear(status, unix_seconds, waited);
        let pause = interval(&self.options, agent.address.cadence);
        agent.due = now + pause - jitter(self.queues.counter.wrapping_add(agent.serial), pause / 10);
        // Silent agents of slow cadence are asked as often as those that start, until they are given up.
        if !agent.answers && agent.status.is_some() {
            agent.due = agent.due.min(now + interval(&self.options, Cadence::Starting));
        }
        self.queues.put(&question.cluster, agent);
        matters
    }

    /// Agents that are followed, and those that were asked and do not answer.
    pub(super) fn counts(&self) -> (usize, usize) {
        let all = || self.clusters.values().flat_map(|cluster| cluster.agents.values());
        (all().count(), all().filter(|agent| agent.asked && !agent.answers).count())
    }
}

/// Pause between two questions.
fn interval(options: &AgentOptions, cadence: Cadence) -> Duration {
    match cadence {
        Cadence::Leader => options.leader_interval,
        Cadence::Starting | Cadence::Draining => options.starting_interval,
        Cadence::First => options.first_interval,
        Cadence::Other => options.other_interval,
    }
}

impl Agent {
    fn lane(&self) -> Lane {
        match self.address.cadence {
            Cadence::Leader => Lane::Leaders,
            Cadence::Starting if self.asked => Lane::Starting,
            Cadence::Starting | Cadence::Draining | Cadence::First | Cadence::Other => Lane::Others,
        }
    }

    fn target(&self, key: &Arc<ClusterKey>) -> Target {
        let control = std::net::SocketAddr::new(self.address.ip, self.address.control);
        Target { agent: self.address.pod.clone(), control, key: Arc::clone(key) }
    }

    fn word(&self) -> AgentWord {
        let at = |port| std::net::SocketAddr::new(self.address.ip, port);
        AgentWord {
            data: at(self.address.data),
            control: at(self.address.control),
            status: self.status.clone(),
            heard: self.heard,
            silent_since: self.silent_since,
        }
    }

    /// Takes a word, or the silence of a question that was asked at most `waited` seconds ago; whether plans look at what
    /// is new.
    fn hear(&mut self, status: Option<AgentStatus>, now: i64, waited: i64) -> bool {
        let Some(status) = status else {
            self.answers = false;
            let since = *self.silent_since.get_or_insert(self.heard.max(now - waited));
            let silent = now - since;
            let passed = SILENCES.iter().filter(|limit| silent > **limit).count();
            let news = passed > self.told;
            self.told = self.told.max(passed);
            if silent > FORGET_SECONDS {
                self.status = None;
            }
            return news;
        };
        let back = !self.answers && self.told > 0;
        let news = self.status.as_ref().is_none_or(|before| matters(before) != matters(&status));
        (self.answers, self.told, self.heard, self.silent_since) = (true, 0, now, None);
        self.status = Some(status);
        news || back
    }
}

/// What plans look at. Counters are left out: they change with every step.
fn matters(status: &AgentStatus) -> impl PartialEq + '_ {
    (
        (status.phase, status.accepting, status.inflight == 0, status.role, status.ranks, status.leads),
        (status.reason.as_str(), status.reason_code.as_str(), status.model_digest.as_str()),
        (status.fabric.as_str(), status.device_health.as_str(), status.kv_epoch.as_str()),
        status.placement,
    )
}

/// Some part of a span, spread evenly over numbers.
fn jitter(number: u64, span: Duration) -> Duration {
    let mixed = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 48;
    span * u32::try_from(mixed).unwrap_or(0) / 0x1_0000
}

#[cfg(test)]
mod tests;
