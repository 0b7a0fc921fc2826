//! The engines of an agent as one: they open together, step together and are replaced together.
//!
//! ```text
//!            all opened             a rank died, or hung
//!   Opening ------------> Ready -------------------------> Ending
//!      ^                                                     |
//!      +-----------------------------------------------------+
//!        all threads ended, or the grace is over (then the rest is abandoned): next generation
//!
//!   three abandoned threads, or an engine that does not open again: Failed
//! ```
//!
//! Invariant: a step is given to every rank or to none, and the next one only when every rank has answered.

use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};

use deepinfer_engine::exchange::local::Aborter;
use deepinfer_protocol::message::Failure;
use deepinfer_protocol::{Span, Time};
use deepinfer_serving::node::{EngineCommand, EngineEvent, StepWork};
use tokio::sync::mpsc;

use super::faults::Faults;
use super::opening::Opening;
use super::thread::{Beat, Opened, Output, Said, Seat, Work};
use super::watchdog::{Verdict, Watchdog};
use crate::clock::Clock;

/// Work that may wait for one engine. Machines ask for a few commands per sequence; more is an engine that does
/// not come back from one of them.
const MAX_WAITING_WORK: usize = 4096;
/// Time that the other threads get to notice that a rank is gone; they stop at the next layer.
const DEATH_GRACE: Span = Span::secs(10);
/// The same after a hang: whoever was waiting for the hung rank stops at once.
const HANG_GRACE: Span = Span::secs(1);
/// Hung threads that are left behind before the process is to end: each keeps its memory and may keep a core.
pub const MAX_ABANDONED: u32 = 3;
/// Replacements in a row that may fail to open.
const MAX_FAILED_OPENINGS: u32 = 3;

/// What a group tells its driver.
#[derive(Debug)]
pub enum GroupEvent {
    /// For the machine of a rank.
    Rank(usize, EngineEvent),
    /// Every rank is open and warm; by rank.
    Ready(Vec<Opened>),
    /// A step ended: rows that it had, and its time.
    Stepped {
        /// Rows of all ranks.
        rows: usize,
        /// Of the slowest rank.
        elapsed: Span,
    },
    /// It does not come back by itself.
    Failed(String),
}

#[derive(Debug)]
enum State {
    Opening,
    Ready,
    Ending { until: Time },
    Failed,
}

/// One rank's thread.
#[derive(Debug)]
struct Rank {
    work: Option<SyncSender<Work>>,
    beat: Arc<Beat>,
    opened: Option<Opened>,
    stepping: bool,
}

/// The step that runs.
#[derive(Clone, Copy, Debug, Default)]
struct Running {
    rows: usize,
    slowest: Span,
}

/// See the module.
pub struct RankGroup {
    opening: Arc<Opening>,
    out: mpsc::Sender<Output>,
    faults: Arc<Faults>,
    clock: Clock,
    generation: u64,
    state: State,
    ranks: Vec<Rank>,
    aborter: Option<Aborter>,
    watchdog: Watchdog,
    running: Running,
    abandoned: u32,
    replaced: u32,
    failed_openings: u32,
    was_ready: bool,
    reason: String,
}

impl RankGroup {
    /// Starts the threads; [`GroupEvent::Ready`] follows. `out`: where threads speak to, a bounded channel.
    pub fn start(
        opening: Opening,
        hung_after: Span,
        faults: Arc<Faults>,
        clock: Clock,
        out: mpsc::Sender<Output>,
    ) -> Self {
        let mut group = Self {
            opening: Arc::new(opening),
            out,
            faults,
            clock,
            generation: 0,
            state: State::Opening,
            ranks: Vec::new(),
            aborter: None,
            watchdog: Watchdog::new(hung_after),
            running: Running::default(),
            abandoned: 0,
            replaced: 0,
            failed_openings: 0,
            was_ready: false,
            reason: String::new(),
        };
        group.open();
        group
    }

    /// Whether the next step may be given.
    pub fn idle(&self) -> bool {
        matches!(self.state, State::Ready) && self.ranks.iter().all(|rank| !rank.stepping)
    }

    /// Whether the engines are there.
    pub fn ready(&self) -> bool {
        matches!(self.state, State::Ready)
    }

    /// Why they are not, or did not open.
    pub fn reason(&self) -> &str {
        &self.reason
    }

    /// Threads left behind because they hung.
    pub fn abandoned(&self) -> u32 {
        self.abandoned
    }

    /// Engines opened in place of lost ones.
    pub fn replaced(&self) -> u32 {
        self.replaced
    }

    /// What the longest running piece of work looks like, and for how long it has run.
    pub fn health(&self, now: Time) -> (Verdict, Span) {
        let begun = self.ranks.iter().filter_map(|rank| rank.beat.begun()).min();
        let Some(begun) = begun.filter(|_| self.ready()) else {
            return (Verdict::Fine, Span::ZERO);
        };
        (self.watchdog.judge(now, begun, self.running.rows), now.since(begun))
    }

    /// Lets the threads end after what they are doing; gives what tells when each has.
    pub fn close(&mut self) -> Vec<Arc<Beat>> {
        self.state = State::Failed;
        self.ranks.drain(..).map(|rank| rank.beat).collect()
    }

    /// Gives a command to a rank. Dropped while the engines are not there: the machine was told.
    pub fn command(&mut self, rank: usize, command: EngineCommand, events: &mut Vec<GroupEvent>) {
        if self.ready() {
            self.give(rank, Work::Command(command), events);
        }
    }

    /// Gives a step to every rank, in order; only when [`RankGroup::idle`].
    ///
    /// # Panics
    /// If there is not one step for each rank.
    pub fn step(&mut self, steps: Vec<StepWork>, events: &mut Vec<GroupEvent>) {
        assert_eq!(steps.len(), self.ranks.len(), "a step for each rank");
        let rows = steps.iter().map(|step| step.batch.rows()).sum();
        self.running = Running { rows, slowest: Span::ZERO };
        for (rank, step) in steps.into_iter().enumerate() {
            self.ranks[rank].stepping = true;
            self.give(rank, Work::Step(Box::new(step)), events);
        }
    }

    fn give(&mut self, rank: usize, work: Work, events: &mut Vec<GroupEvent>) {
        let sent = self.ranks[rank].work.as_ref().is_some_and(|sender| sender.try_send(work).is_ok());
        if !sent && self.ready() {
            // The thread has ended (its last word is on the way), or it takes nothing any more.
            self.lose(Failure::EngineLost, "the engine takes no more work".to_owned(), DEATH_GRACE, events);
        }
    }

    /// A thread spoke.
    pub fn on_output(&mut self, output: Output, events: &mut Vec<GroupEvent>) {
        if output.generation != self.generation || matches!(self.state, State::Failed) {
            return;
        }
        match output.said {
            Said::Opened(opened) => {
                self.ranks[output.rank].opened = Some(*opened);
                if self.ranks.iter().all(|rank| rank.opened.is_some()) {
                    self.state = State::Ready;
                    self.was_ready = true;
                    self.reason.clear();
                    self.failed_openings = 0;
                    events.push(GroupEvent::Ready(
                        self.ranks.iter().filter_map(|rank| rank.opened.clone()).collect(),
                    ));
                }
            }
            Said::Event(event) if self.ready() => self.on_event(output.rank, event, events),
            Said::Event(_) => {}
            Said::Died { failure, reason } => {
                if !matches!(self.state, State::Ending { .. }) {
                    tracing::error!(rank = output.rank, %reason, "an engine is gone");
                    self.lose(failure, reason, DEATH_GRACE, events);
                }
            }
        }
    }

    fn on_event(&mut self, rank: usize, event: EngineEvent, events: &mut Vec<GroupEvent>) {
        let step = match &event {
            EngineEvent::StepDone(result) => Some(result.elapsed),
            _ => None,
        };
        events.push(GroupEvent::Rank(rank, event));
        let Some(elapsed) = step else { return };
        self.ranks[rank].stepping = false;
        self.running.slowest = self.running.slowest.max(elapsed);
        if self.idle() {
            let Running { rows, slowest } = self.running;
            self.watchdog.observe(rows, slowest);
            events.push(GroupEvent::Stepped { rows, elapsed: slowest });
        }
    }

    /// Time passes: looks for hung work, and for threads that have ended.
    pub fn on_tick(&mut self, now: Time, events: &mut Vec<GroupEvent>) {
        match self.state {
            State::Ready => {
                if let (Verdict::Hung, span) = self.health(now) {
                    let reason = format!("a step has not ended for {} s", span.as_millis() / 1000);
                    tracing::error!(%reason, "an engine hangs");
                    self.lose(Failure::EngineHung, reason, HANG_GRACE, events);
                }
            }
            State::Ending { until } => {
                let left = self.ranks.iter().filter(|rank| !rank.beat.ended()).count() as u32;
                if left > 0 && now < until {
                    return;
                }
                self.abandoned += left;
                if self.abandoned >= MAX_ABANDONED {
                    let reason = format!("{} engine threads hung and were left behind", self.abandoned);
                    self.fail(reason, events);
                } else if !self.was_ready && self.failed_openings > 0 {
                    // Nothing has changed since; whoever set it up must hear why.
                    self.fail(self.reason.clone(), events);
                } else if self.failed_openings >= MAX_FAILED_OPENINGS {
                    let reason = format!("no replacement opens: {}", self.reason);
                    self.fail(reason, events);
                } else {
                    self.replaced += self.ranks.len() as u32;
                    self.open();
                }
            }
            State::Opening | State::Failed => {}
        }
    }

    fn fail(&mut self, reason: String, events: &mut Vec<GroupEvent>) {
        tracing::error!(%reason, "the engines do not come back");
        self.state = State::Failed;
        self.reason.clone_from(&reason);
        events.push(GroupEvent::Failed(reason));
    }

    /// Ends the step on all ranks and gets ready for the next generation.
    fn lose(&mut self, failure: Failure, reason: String, grace: Span, events: &mut Vec<GroupEvent>) {
        if matches!(self.state, State::Opening) {
            self.failed_openings += 1;
        } else {
            for rank in 0..self.ranks.len() {
                events.push(GroupEvent::Rank(rank, EngineEvent::Lost(failure)));
            }
        }
        if let Some(aborter) = &self.aborter {
            aborter.abort(&reason);
        }
        for rank in &mut self.ranks {
            rank.work = None;
            rank.stepping = false;
        }
        self.reason = reason;
        self.state = State::Ending { until: self.clock.now() + grace };
    }

    fn open(&mut self) {
        self.generation += 1;
        self.state = State::Opening;
        let (ends, aborter) = self.opening.exchange();
        self.aborter = aborter;
        self.ranks = ends.into_iter().enumerate().map(|(rank, end)| self.seat(rank, end)).collect();
    }

    fn seat(&self, rank: usize, end: Option<deepinfer_engine::exchange::local::LocalEnd>) -> Rank {
        let (sender, receiver) = sync_channel(MAX_WAITING_WORK);
        let beat = Arc::new(Beat::default());
        let seat = Seat {
            generation: self.generation,
            rank,
            work: receiver,
            out: self.out.clone(),
            beat: beat.clone(),
            faults: self.faults.clone(),
            clock: self.clock,
        };
        let opening = self.opening.clone();
        let spawned =
            std::thread::Builder::new().name(format!("engine-{rank}")).spawn(move || seat.run(&opening, end));
        if let Err(error) = spawned {
            beat.end();
            let said = Said::Died { failure: Failure::EngineLost, reason: format!("no thread: {error}") };
            let output = Output { generation: self.generation, rank, said };
            if self.out.try_send(output).is_err() {
                tracing::error!(%error, "no thread for an engine, and nobody to tell");
            }
        }
        Rank { work: Some(sender), beat, opened: None, stepping: false }
    }
}
