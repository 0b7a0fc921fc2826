//! Everything the engine allocates, described once: the same code counts it and takes it.

use deepinfer_kernels::Backend;

use super::options::EngineOptions;
use crate::cache::{Caches, Capacity, Geometry, Histories};
use crate::memory::Allocator;
use crate::model::spread::SpreadBuffers;
use crate::model::workspace::{Workspace, WorkspaceSize};
use crate::numerics::Numerics;
use crate::shape::ModelShape;

/// Everything the engine allocates.
pub(super) struct MemoryPlan<'a> {
    shape: &'a ModelShape,
    geometry: &'a Geometry,
    numerics: Numerics,
    /// Slots, blocks and rows.
    pub capacity: Capacity,
    /// The experts are spread over ranks.
    spread: bool,
}

/// All buffers of an engine.
pub(super) struct Memory<B: Backend> {
    pub caches: Caches<B>,
    pub workspace: Workspace<B>,
    /// If the experts are spread over ranks.
    pub spread: Option<SpreadBuffers<B>>,
}

impl<'a> MemoryPlan<'a> {
    /// What these options ask for.
    pub fn new(
        shape: &'a ModelShape,
        geometry: &'a Geometry,
        numerics: Numerics,
        options: &EngineOptions,
        spread: bool,
    ) -> Self {
        // Drafts run in the same buffers: there is room for one block at least.
        let block = shape.draft.as_ref().map_or(1, |d| d.block_size);
        Self {
            shape,
            geometry,
            numerics,
            spread,
            capacity: Capacity {
                slots: options.slots,
                blocks: options.blocks,
                rows: options.max_rows.max(block),
            },
        }
    }

    /// Tokens before a position that its n-grams read.
    pub fn reach(&self) -> usize {
        self.shape.engram.as_ref().map_or(0, |e| e.max_ngram_size - 1)
    }

    /// Bytes of all of it, without allocating.
    pub fn bytes<B: Backend>(&self, backend: &B) -> u64 {
        let mut memory = Allocator::counting(backend);
        self.build(&mut memory);
        memory.count(Histories::bytes(self.capacity.slots, self.reach(), self.geometry.slack));
        memory.bytes()
    }

    /// Allocates, or only counts.
    pub fn build<B: Backend>(&self, memory: &mut Allocator<'_, B>) -> Memory<B> {
        let Capacity { slots, rows, .. } = self.capacity;
        let size = WorkspaceSize { rows, sequences: slots.min(rows) };
        Memory {
            caches: Caches::new(memory, self.shape, self.geometry, self.numerics, self.capacity),
            workspace: Workspace::new(memory, self.shape, self.geometry, self.numerics, size),
            spread: self.spread.then(|| SpreadBuffers::new(memory, self.shape, rows)),
        }
    }
}
