//! The DeepSeek-V4.1-Flash model on top of the kernels.
//!
//! - [`config`] and [`shape`]: `config.json`, checked, and the maps that follow from it.
//! - [`tensors`]: every tensor such a model consists of; [`weights`]: the checkpoint directory that holds
//!   them.
//! - [`engram`]: which table rows a token reads.
//! - [`engine`]: a model with its caches, running one step at a time; the forward pass itself is in
//!   `model/forward.rs`.
//! - [`exchange`]: experts spread over the ranks of a supernode.
//! - [`record`]: intermediate values of a step; [`sampler`]: from logits to a token.
//! - `work.rs`: the sizes that a scheduler counts with.
//! - [`sizes`]: bytes of weights, caches and states; [`random`]: checkpoints with random weights.

mod cache;
pub mod config;
pub mod engine;
pub mod engram;
pub mod exchange;
#[doc(hidden)]
pub mod fuzzing;
mod memory;
mod model;
pub mod numerics;
pub mod random;
pub mod record;
pub mod sampler;
pub mod shape;
pub mod sizes;
pub mod tensors;
pub mod verify;
pub mod weights;
mod work;

pub use engine::{Engine, EngineOptions};
pub use numerics::Numerics;
pub use shape::ModelShape;
pub use weights::{Checkpoint, CheckpointError};
