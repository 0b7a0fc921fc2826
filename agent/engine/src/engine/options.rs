//! How an engine is opened.

use deepinfer_serving::batch::BLOCK_TOKENS;

use super::error::OpenError;
use crate::numerics::Numerics;
use crate::shape::ModelShape;

/// Whether the layers from the first one with ratio 1 on run only the last rows of a prompt (model.md section
/// 11a).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Truncation {
    /// All rows run everywhere: exact.
    #[default]
    Off,
    /// All rows run, but what the kept rows see is as narrow as with `Compact`: to test it.
    Mask,
    /// Only the kept rows run.
    Compact,
}

/// What the first layer with ratio 1 sees through its own window when prompts are truncated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BoundarySwa {
    /// Kept rows only, as in the layers after it.
    #[default]
    Truncated,
    /// All rows.
    Full,
}

/// Sizes and switches of an engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineOptions {
    /// `None`: quantized if the checkpoint is, else f32.
    pub numerics: Option<Numerics>,
    /// Sequences whose state is held, at least 1.
    pub slots: usize,
    /// Blocks of 128 tokens for compressed entries, at least 1.
    pub blocks: usize,
    /// Longest step in token rows, at least 1.
    pub max_rows: usize,
    /// Consumer truncation of prompts.
    pub truncation: Truncation,
    /// Rows kept by it, at least 1. `None`: window and twice the longest rollback.
    pub keep: Option<usize>,
    /// What its boundary layer sees.
    pub boundary_swa: BoundarySwa,
}

impl Default for EngineOptions {
    /// One sequence of 4,096 tokens, prefilled 256 rows at a time.
    fn default() -> Self {
        Self {
            numerics: None,
            slots: 1,
            blocks: 32,
            max_rows: 256,
            truncation: Truncation::Off,
            keep: None,
            boundary_swa: BoundarySwa::Truncated,
        }
    }
}

/// Most slots and rows; what is above is a mistake, and store rows must be countable in 32 bits.
const MAX_COUNT: usize = 1 << 20;

impl EngineOptions {
    /// The numerics that a shape gets.
    pub(crate) fn numerics_of(&self, shape: &ModelShape) -> Numerics {
        let default = if shape.quantized { Numerics::Quantized } else { Numerics::F32 };
        self.numerics.unwrap_or(default)
    }

    /// Rows kept by consumer truncation.
    pub(crate) fn keep_of(&self, shape: &ModelShape) -> usize {
        let slack = shape.draft.as_ref().map_or(0, |d| d.block_size) + 1;
        self.keep.unwrap_or(shape.sliding_window + 2 * slack)
    }

    /// Refuses sizes that cannot be, and what the shape does not support.
    pub(crate) fn check(&self, shape: &ModelShape, ring: usize) -> Result<(), OpenError> {
        let rows_of_blocks = u32::MAX as usize / BLOCK_TOKENS;
        let slots = MAX_COUNT.min(u32::MAX as usize / ring);
        let sizes = [
            ("slots", self.slots, slots),
            ("blocks", self.blocks, rows_of_blocks),
            ("max_rows", self.max_rows, MAX_COUNT),
            ("keep", self.keep_of(shape), usize::MAX),
        ];
        for (field, value, max) in sizes {
            if !(1..=max).contains(&value) {
                return Err(OpenError::Size { field, value, max });
            }
        }
        let mut problems = Vec::new();
        if self.numerics_of(shape) == Numerics::Quantized {
            problems.extend(shape.check_quantized());
        }
        if self.truncation != Truncation::Off {
            problems.extend(shape.check_truncation());
        }
        if problems.is_empty() { Ok(()) } else { Err(OpenError::Unsupported(problems)) }
    }
}
