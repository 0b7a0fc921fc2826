//! How the engines of an agent are opened: over one mapped checkpoint, each with threads of its own.

use std::sync::Arc;
use std::time::{Duration, Instant};

use deepinfer_engine::engine::OpenError;
use deepinfer_engine::exchange::local::{Aborter, LocalEnd, LocalExchange};
use deepinfer_engine::exchange::{RankSetup, SlotMap};
use deepinfer_engine::{Checkpoint, Engine, EngineOptions};
use deepinfer_kernels::{Cpu, SimdLevel};
use deepinfer_protocol::Span;
use thiserror::Error;

use crate::args::{BackendChoice, SimdChoice};

/// Rows of the first step: enough to touch every part, soon over on a slow machine.
const WARM_UP_ROWS: usize = 64;
/// Steps are timed for about this long; the last one that begins may take longer.
const PROFILE_TIME: Duration = Duration::from_millis(500);

/// Rows of a step from position 0, and how long it took.
pub type Profile = Vec<(usize, Span)>;

/// Why a rank's engine did not open.
#[derive(Debug, Error)]
pub enum EngineOpenError {
    /// The machine cannot run what the flags ask for.
    #[error("{0}")]
    Backend(String),
    /// The engine refused.
    #[error(transparent)]
    Engine(#[from] OpenError),
    /// The first step failed.
    #[error("warm-up: {0}")]
    WarmUp(String),
}

/// Everything that opening an engine takes; the same for a replacement.
#[derive(Clone, Debug)]
pub struct Opening {
    /// The weights, mapped once for all.
    pub checkpoint: Arc<Checkpoint>,
    /// Sizes of each rank.
    pub options: EngineOptions,
    /// Experts by rank; `None` for one engine alone.
    pub map: Option<Arc<SlotMap>>,
    /// Ranks.
    pub ranks: usize,
    /// Threads of all ranks together.
    pub threads: usize,
    /// Instruction set.
    pub simd: SimdChoice,
    /// Longest wait of a rank for the others in one layer.
    pub exchange_limit: Duration,
    /// Of the checkpoint.
    pub weights_digest: [u8; 32],
    /// Whether steps are timed before the first request: a prefill worker plans with these times.
    pub profile: bool,
}

impl Opening {
    /// Refuses a backend that is not there, before anything is loaded.
    ///
    /// # Errors
    /// [`EngineOpenError::Backend`].
    pub fn check_backend(backend: BackendChoice, simd: SimdChoice) -> Result<(), EngineOpenError> {
        if backend == BackendChoice::Cuda {
            let text = "--backend cuda is not built yet: use cpu or auto";
            return Err(EngineOpenError::Backend(text.to_owned()));
        }
        cpu(1, simd).map(drop)
    }

    /// Ends of a new exchange by rank, and what can end it; nothing for one engine alone.
    pub fn exchange(&self) -> (Vec<Option<LocalEnd>>, Option<Aborter>) {
        if self.map.is_none() {
            return (vec![None], None);
        }
        let ends = LocalExchange::new(self.ranks, self.exchange_limit);
        let aborter = ends.first().map(LocalEnd::aborter);
        (ends.into_iter().map(Some).collect(), aborter)
    }

    /// Opens the engine of a rank, runs a first step and times a few. Called on the rank's own thread: in a group
    /// all ranks open side by side and meet in the warm-up.
    ///
    /// # Errors
    /// [`EngineOpenError`].
    pub fn open(&self, end: Option<LocalEnd>) -> Result<(Engine<Cpu>, Profile), EngineOpenError> {
        let backend = cpu((self.threads / self.ranks).max(1), self.simd)?;
        let mut engine = match (end, &self.map) {
            (Some(end), Some(map)) => {
                let setup = RankSetup { map: map.clone(), exchange: Box::new(end) };
                Engine::open_rank(backend, &self.checkpoint, self.options.clone(), setup)?
            }
            _ => Engine::open(backend, &self.checkpoint, self.options.clone())?,
        };
        let warm_up = |engine: &mut Engine<Cpu>, rows| {
            engine.warm_up(rows).map_err(|error| EngineOpenError::WarmUp(error.to_string()))
        };
        warm_up(&mut engine, self.options.max_rows.min(WARM_UP_ROWS))?;
        let mut profile = Vec::new();
        let begun = Instant::now();
        let mut rows = 1;
        while self.profile && rows <= self.options.max_rows && begun.elapsed() < PROFILE_TIME {
            let step = Instant::now();
            warm_up(&mut engine, rows)?;
            profile.push((rows, step.elapsed().into()));
            rows *= 2;
        }
        Ok((engine, profile))
    }

    /// What runs here, for status: backend, instruction set, numerics.
    pub fn describe(&self, engine: &Engine<Cpu>) -> String {
        let level = engine.backend().level();
        let threads = engine.backend().threads() * self.ranks;
        format!("cpu {level}, {threads} threads, {}", engine.numerics())
    }
}

fn cpu(threads: usize, simd: SimdChoice) -> Result<Cpu, EngineOpenError> {
    let level = match simd {
        SimdChoice::Auto => return Ok(Cpu::new(threads)),
        SimdChoice::Portable => SimdLevel::Portable,
        SimdChoice::Avx2 => SimdLevel::Avx2,
        SimdChoice::Avx512 => SimdLevel::Avx512,
    };
    Cpu::with_level(threads, level).ok_or_else(|| {
        let there: Vec<String> = SimdLevel::available().iter().map(SimdLevel::to_string).collect();
        EngineOpenError::Backend(format!(
            "--simd {level}: this machine does not have it; available: {}",
            there.join(", ")
        ))
    })
}
