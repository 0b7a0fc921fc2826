//! Arithmetic of the model.
//!
//! - [`formats`]: FP8, FP4, E8M0 and BF16, exact to the bit.
//! - [`Backend`]: the operations the model is made of, with a shape line and a formula each ([`ops`]).
//! - [`Reference`]: scalar and obvious, the definition of every operation.
//! - [`Cpu`]: the real one: weights stay in their stored format, blocked, threaded, AVX2 or AVX-512 chosen at
//!   run time, with an order of additions that depends on nothing but the shape of the weight.
//! - [`mapped`]: read-only file mappings and the byte views that weights are made of.
//!
//! `unsafe` lives in `cpu/simd/`, `cpu/pool.rs` and `mapped.rs` and nowhere else.

pub mod cpu;
pub mod formats;
pub mod host;
pub mod mapped;
pub mod ops;
pub mod reference;

pub use cpu::{Cpu, SimdLevel};
pub use formats::{RowFormat, WeightFormat};
pub use mapped::ByteView;
pub use ops::{
    AttentionArgs, Backend, BlockTables, Buffer, CandidateUse, Candidates, Element, ExpertParams, ExpertSet,
    ExpertWeights, GlobalKeys, HcParams, IndexQuery, MatrixSource, RouteParams, Selection, StoreInfo,
    WeightInfo,
};
pub use reference::Reference;
