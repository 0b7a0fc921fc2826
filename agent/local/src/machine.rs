//! What this machine runs on: the choice of a backend, and opening a model on it.

use std::num::NonZeroUsize;
use std::path::Path;
use std::thread::available_parallelism;

use anyhow::{Result, bail};
use deepinfer_engine::{Checkpoint, Numerics};
use deepinfer_kernels::{Backend, Cpu, Reference, SimdLevel};

use crate::args::{BackendChoice, EngineArgs, NumericsChoice, SimdChoice};

/// Something to do with a backend whose type is known only at run time.
pub trait Job {
    /// What it gives.
    type Output;
    /// Does it.
    fn run<B: Backend>(self, backend: B) -> Result<Self::Output>;
}

/// Runs a job on the backend that the flags ask for: the one place where the type is picked.
pub fn with_backend<J: Job>(
    choice: BackendChoice,
    threads: Option<u16>,
    simd: SimdChoice,
    job: J,
) -> Result<J::Output> {
    match choice {
        BackendChoice::Reference => job.run(Reference),
        BackendChoice::Auto | BackendChoice::Cpu => job.run(cpu(threads, simd)?),
    }
}

/// The cpu backend that the flags ask for.
pub fn cpu(threads: Option<u16>, simd: SimdChoice) -> Result<Cpu> {
    let threads = threads.map_or_else(cores, usize::from);
    let level = match simd {
        SimdChoice::Auto => return Ok(Cpu::new(threads)),
        SimdChoice::Portable => SimdLevel::Portable,
        SimdChoice::Avx2 => SimdLevel::Avx2,
        SimdChoice::Avx512 => SimdLevel::Avx512,
    };
    match Cpu::with_level(threads, level) {
        Some(cpu) => Ok(cpu),
        None => {
            bail!("--simd {level:?}: this machine does not have it; available: {:?}", SimdLevel::available())
        }
    }
}

/// Cores that this process may use.
pub fn cores() -> usize {
    available_parallelism().map_or(1, NonZeroUsize::get)
}

/// The numerics that a flag asks for; `None` leaves it to the checkpoint.
pub fn numerics(choice: NumericsChoice) -> Option<Numerics> {
    match choice {
        NumericsChoice::Auto => None,
        NumericsChoice::F32 => Some(Numerics::F32),
        NumericsChoice::Quantized => Some(Numerics::Quantized),
    }
}

/// Opens and checks a checkpoint, and says which of its config's keys were ignored.
pub fn open_checkpoint(dir: &Path) -> Result<Checkpoint> {
    let checkpoint = Checkpoint::open(dir)?;
    warn_ignored(&checkpoint.ignored_keys);
    Ok(checkpoint)
}

/// One warning for keys of a config.json that mean nothing to us: the real file has some.
pub fn warn_ignored(keys: &[String]) {
    if !keys.is_empty() {
        eprintln!("warning: config.json keys that are not known and are ignored: {}", keys.join(", "));
    }
}

/// The same through the flags.
pub fn open(args: &EngineArgs) -> Result<Checkpoint> {
    open_checkpoint(&args.checkpoint)
}
