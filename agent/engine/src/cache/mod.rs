//! What a model remembers of its sequences: window rings and open groups by slot, compressed entries by
//! block, n-gram histories on the host.
//!
//! The scheduler names slots and blocks; here are only their bytes and how many positions they cover. Rows of
//! one position are the same bytes however they came here, so any way to the same state is bitwise the same.

mod block;
mod history;
mod ring;
mod slot;
mod stores;
mod window_state;

pub use block::BlockError;
pub(crate) use block::BlockHeader;
pub(crate) use history::Histories;
pub(crate) use ring::{Moves, RingMoves, RingSpan};
pub(crate) use slot::Slot;
pub(crate) use stores::{Caches, Capacity, OpenGroups};
pub(crate) use window_state::{Header, digest};
pub use window_state::{WindowState, WindowStateError};

use crate::shape::ModelShape;

/// Sizes of the rings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Geometry {
    /// Window length, the query's own position included.
    pub window: usize,
    /// Rows that can be forgotten: rejected drafts.
    pub slack: usize,
    /// Rows of a ring: `window + slack`.
    pub ring: usize,
    /// Distinct ratios of the KV sources, ascending.
    pub ratios: Vec<usize>,
}

impl Geometry {
    /// The rings of a model.
    pub fn of(shape: &ModelShape) -> Self {
        let slack = shape.draft.as_ref().map_or(0, |d| d.block_size) + 1;
        let mut ratios: Vec<usize> = shape.kv_source_layer_ids.iter().map(|&l| shape.ratio(l)).collect();
        ratios.sort_unstable();
        ratios.dedup();
        Self { window: shape.sliding_window, slack, ring: shape.sliding_window + slack, ratios }
    }

    /// Ring row of a position of a slot.
    pub fn ring_row(&self, slot: usize, position: usize) -> u32 {
        (slot * self.ring + position % self.ring) as u32
    }

    /// Ordinal of a ratio in lists by ratio.
    pub fn ratio_ordinal(&self, ratio: usize) -> usize {
        self.ratios.iter().position(|&r| r == ratio).expect("every source's ratio is listed")
    }
}
