//! One engine on one thread: opens it, runs what comes, and ends with it.
//!
//! Invariant: work runs in the order in which it was given. A panic ends the thread and the engine, never the
//! process; its last word is [`Said::Died`].

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::Receiver;

use deepinfer_engine::Engine;
use deepinfer_engine::engine::{StepError, WindowState};
use deepinfer_engine::exchange::local::LocalEnd;
use deepinfer_engine::sampler::Sampler;
use deepinfer_kernels::{Backend, Cpu};
use deepinfer_protocol::message::Failure;
use deepinfer_protocol::{Span, Time};
use deepinfer_serving::batch::StepOutput;
use deepinfer_serving::node::{EngineCommand, EngineEvent, StepResult, StepWork};
use tokio::sync::mpsc;

use super::faults::Faults;
use super::opening::Opening;
use crate::clock::Clock;

/// What a thread is given to do.
#[derive(Debug)]
pub enum Work {
    /// Something between two steps.
    Command(EngineCommand),
    /// A step.
    Step(Box<StepWork>),
}

/// What a thread says.
#[derive(Debug)]
pub struct Output {
    /// Of the group that the thread belongs to.
    pub generation: u64,
    /// Which rank of this agent.
    pub rank: usize,
    /// What.
    pub said: Said,
}

/// See [`Output`].
#[derive(Debug)]
pub enum Said {
    /// The engine is open and warm.
    Opened(Box<Opened>),
    /// An answer.
    Event(EngineEvent),
    /// The engine is gone; the thread ends.
    Died {
        /// For requests.
        failure: Failure,
        /// For the log and status.
        reason: String,
    },
}

/// What only an open engine knows.
#[derive(Clone, Debug)]
pub struct Opened {
    /// Tokens that rebuild a sequence's window state.
    pub replay_tokens: u32,
    /// What gives blocks and states their meaning.
    pub kv_format: String,
    /// Who can read whose KV.
    pub kv_epoch: String,
    /// Numerics, as text.
    pub numerics: String,
    /// Steps that were timed before any request: rows from position 0, and how long they took.
    pub profile: Vec<(usize, Span)>,
    /// Logical expert by layer and local slot.
    pub slot_experts: Vec<Vec<u32>>,
    /// For status.
    pub description: String,
}

/// When the present piece of work began; read by the watchdog.
#[derive(Debug, Default)]
pub struct Beat {
    /// Nanoseconds of the agent's clock plus one; 0 while idle.
    begun: AtomicU64,
    /// The thread has ended, engine and all.
    ended: AtomicBool,
}

impl Beat {
    /// When the work that runs now began.
    pub fn begun(&self) -> Option<Time> {
        self.begun.load(Ordering::Relaxed).checked_sub(1).map(Time)
    }

    /// Whether the thread has ended.
    pub fn ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Marks that there is no thread any more.
    pub fn end(&self) {
        self.set(None);
        self.ended.store(true, Ordering::Release);
    }

    fn set(&self, now: Option<Time>) {
        self.begun.store(now.map_or(0, |t| t.0 + 1), Ordering::Relaxed);
    }
}

/// Marks the thread's end, however it comes.
struct Ends(Arc<Beat>);

impl Drop for Ends {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// A rank's place: where work comes from and where words go.
pub struct Seat {
    /// See [`Output`].
    pub generation: u64,
    /// See [`Output`].
    pub rank: usize,
    /// Work; the thread ends when the other end is dropped.
    pub work: Receiver<Work>,
    /// Words; bounded, the driver always reads.
    pub out: mpsc::Sender<Output>,
    /// For the watchdog.
    pub beat: Arc<Beat>,
    /// For tests.
    pub faults: Arc<Faults>,
    /// The agent's clock.
    pub clock: Clock,
}

impl Seat {
    /// The thread's body.
    pub fn run(self, opening: &Opening, end: Option<LocalEnd>) {
        let _ends = Ends(self.beat.clone());
        let opened = catch_unwind(AssertUnwindSafe(|| opening.open(end)));
        let (engine, profile) = match opened {
            Ok(Ok(opened)) => opened,
            Ok(Err(error)) => return self.died(Failure::EngineLost, error.to_string()),
            Err(panic) => return self.died(Failure::EngineLost, text_of(&*panic)),
        };
        tracing::info!(rank = self.rank, bytes = engine.allocated_bytes(), "engine open");
        if !self.say(Said::Opened(Box::new(opened_of(&engine, opening, profile)))) {
            return;
        }
        self.serve(Worker { engine, sampler: Sampler::default(), output: StepOutput::default() });
    }

    fn serve(&self, mut worker: Worker<Cpu>) {
        while let Ok(work) = self.work.recv() {
            self.beat.set(Some(self.clock.now()));
            let done = catch_unwind(AssertUnwindSafe(|| self.perform(&mut worker, work)));
            self.beat.set(None);
            match done {
                Ok(Ok(None)) => {}
                Ok(Ok(Some(event))) => {
                    if !self.say(Said::Event(event)) {
                        return;
                    }
                }
                Ok(Err((failure, reason))) => {
                    drop(worker);
                    return self.died(failure, reason);
                }
                Err(panic) => {
                    // The engine goes first: its memory is there again when the replacement opens.
                    drop(worker);
                    return self.died(Failure::EngineLost, text_of(&*panic));
                }
            }
        }
    }

    fn perform(
        &self,
        worker: &mut Worker<Cpu>,
        work: Work,
    ) -> Result<Option<EngineEvent>, (Failure, String)> {
        match work {
            Work::Command(command) => Ok(worker.command(command)),
            Work::Step(step) => {
                let begun = self.clock.now();
                self.faults.strike(self.rank);
                let mut result = worker.step(&step).map_err(|error| match error {
                    StepError::Exchange(error) => (Failure::EngineLost, error.to_string()),
                    // The scheduler asked for what cannot be: a bug, and nobody knows what else is wrong.
                    error => (Failure::Internal, format!("a step was refused: {error}")),
                })?;
                result.elapsed = self.clock.now().since(begun);
                Ok(Some(EngineEvent::StepDone(result)))
            }
        }
    }

    fn say(&self, said: Said) -> bool {
        let output = Output { generation: self.generation, rank: self.rank, said };
        self.out.blocking_send(output).is_ok()
    }

    fn died(&self, failure: Failure, reason: String) {
        self.say(Said::Died { failure, reason });
    }
}

struct Worker<B: Backend> {
    engine: Engine<B>,
    sampler: Sampler,
    output: StepOutput,
}

impl<B: Backend> Worker<B> {
    fn step(&mut self, work: &StepWork) -> Result<StepResult, StepError> {
        self.engine.execute(&work.batch, &mut self.output)?;
        let output = &self.output;
        let tokens = work.samples.iter().enumerate().map(|(at, sample)| {
            let sample = sample.as_ref()?;
            let last = output.ranges[at].len.checked_sub(1)?;
            Some(self.sampler.token(output.row(at, last), sample))
        });
        Ok(StepResult {
            tokens: tokens.collect(),
            arrivals: output.arrivals.clone(),
            slots_per_layer: output.slots_per_layer,
            elapsed: Span::ZERO,
        })
    }

    fn command(&mut self, command: EngineCommand) -> Option<EngineEvent> {
        let engine = &mut self.engine;
        match command {
            EngineCommand::Export { ticket, slot, blocks } => {
                let pieces = engine.export_pieces(slot, &blocks).unwrap_or_else(|error| {
                    panic!("the scheduler exports what it holds: {error}");
                });
                Some(EngineEvent::Exported { ticket, pieces })
            }
            EngineCommand::Import { ticket, slot, blocks, pieces } => {
                let done = engine.import_pieces(slot, &blocks, &pieces);
                Some(EngineEvent::Imported { ticket, fits: fits(done) })
            }
            EngineCommand::Checkpoint { ticket, slot, position } => {
                let state = engine.export_window_at(slot, position as usize);
                let state = state.ok().map(|state| Arc::from(state.as_bytes()));
                Some(EngineEvent::Checkpointed { ticket, state })
            }
            EngineCommand::Restore { ticket, slot, state } => {
                let done = WindowState::from_bytes(state.to_vec()).map_err(StepError::from);
                let done = done.and_then(|state| engine.import_window(slot, &state));
                Some(EngineEvent::Restored { ticket, fits: fits(done) })
            }
            EngineCommand::BeginReplay { slot, start, history } => {
                if let Err(error) = engine.begin_replay(slot, start as usize, &history) {
                    panic!("the scheduler replays what it has tokens of: {error}");
                }
                None
            }
            EngineCommand::Reset(slot) => {
                engine.reset(slot);
                None
            }
        }
    }
}

fn fits(done: Result<(), StepError>) -> bool {
    if let Err(error) = &done {
        tracing::warn!(%error, "state of another engine was refused");
    }
    done.is_ok()
}

fn opened_of(engine: &Engine<Cpu>, opening: &Opening, profile: Vec<(usize, Span)>) -> Opened {
    let layers = engine.shape().num_hidden_layers;
    Opened {
        replay_tokens: engine.replay_tokens() as u32,
        kv_format: engine.kv_format(),
        kv_epoch: engine.kv_epoch(&opening.weights_digest),
        numerics: engine.numerics().to_string(),
        profile,
        slot_experts: (0..layers).map(|layer| engine.slot_experts(layer).to_vec()).collect(),
        description: opening.describe(engine),
    }
}

/// The text of a panic.
fn text_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied().map(str::to_owned);
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    format!("panic: {}", text.unwrap_or_else(|| "without a text".to_owned()))
}
