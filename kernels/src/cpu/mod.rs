//! The real CPU backend: which machine code runs, on how many threads, with which scratch memory.
//!
//! Every operation gives the same bits at every [`SimdLevel`], with any number of threads and any number of rows:
//! the order of additions is a property of the weight's shape (see `simd/mod.rs`).

mod attention;
mod backend;
mod experts;
mod hyper;
mod index;
mod index_best;
mod index_scan;
mod matmul;
pub mod measure;
pub(crate) mod pool;
mod route;
mod rows;
pub(crate) mod simd;
#[cfg(test)]
mod testing;
mod vector;

use std::fmt;

use pool::{Pool, SharedScratch, ThreadScratch};

/// Instruction sets the kernels are written for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SimdLevel {
    /// Plain Rust.
    Portable,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, VL, DQ, VBMI and VNNI: Ice Lake, Zen 4 and later. Older AVX-512 machines run the AVX2 code.
    Avx512,
}

impl SimdLevel {
    /// Whether this machine can run the code of the level.
    pub fn is_available(self) -> bool {
        match self {
            SimdLevel::Portable => true,
            #[cfg(target_arch = "x86_64")]
            SimdLevel::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            SimdLevel::Avx512 => {
                SimdLevel::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vbmi")
                    && is_x86_feature_detected!("avx512vnni")
            }
            #[cfg(not(target_arch = "x86_64"))]
            _ => false,
        }
    }

    /// All levels of this machine, ascending.
    pub fn available() -> Vec<SimdLevel> {
        [SimdLevel::Portable, SimdLevel::Avx2, SimdLevel::Avx512]
            .into_iter()
            .filter(|level| level.is_available())
            .collect()
    }

    /// The highest level of this machine.
    pub fn detect() -> SimdLevel {
        [SimdLevel::Avx512, SimdLevel::Avx2]
            .into_iter()
            .find(|level| level.is_available())
            .unwrap_or(SimdLevel::Portable)
    }
}

impl fmt::Display for SimdLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SimdLevel::Portable => "portable",
            SimdLevel::Avx2 => "avx2",
            SimdLevel::Avx512 => "avx512",
        })
    }
}

/// The CPU backend.
///
/// Memory for intermediate values grows on first use and is kept, so a repeated operation of the same shape
/// allocates nothing. Operations called from several threads at once take turns.
pub struct Cpu {
    pub(crate) pool: Pool,
    pub(crate) level: SimdLevel,
    /// One buffer per thread of the pool: decoded tiles, accumulators, scores.
    pub(crate) scratch: ThreadScratch,
    /// Buffers that all threads read while one operation runs.
    pub(crate) shared: SharedScratch,
    /// What index scores and selections need.
    index: index::Scratch,
}

impl Cpu {
    /// A backend on `threads` threads (the caller's is one of them; 0 counts as 1) at the highest level.
    pub fn new(threads: usize) -> Self {
        Self::build(threads, SimdLevel::detect())
    }

    /// A backend at a chosen level; `None` if the machine lacks it.
    pub fn with_level(threads: usize, level: SimdLevel) -> Option<Self> {
        level.is_available().then(|| Self::build(threads, level))
    }

    fn build(threads: usize, level: SimdLevel) -> Self {
        let pool = Pool::new(threads.max(1));
        let scratch = ThreadScratch::new(pool.threads());
        let index = index::Scratch::new(pool.threads());
        Self { pool, level, scratch, shared: SharedScratch::default(), index }
    }

    /// Threads that compute, the caller's included.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// Instruction set in use.
    pub fn level(&self) -> SimdLevel {
        self.level
    }
}

impl fmt::Debug for Cpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cpu")
            .field("threads", &self.threads())
            .field("level", &self.level)
            .finish_non_exhaustive()
    }
}
