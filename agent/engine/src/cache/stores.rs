//! The stores themselves: one window store per layer, main KV and index keys per source, open groups per
//! source.

use deepinfer_kernels::{Backend, RowFormat};
use deepinfer_serving::batch::BLOCK_TOKENS;

use super::{Geometry, Moves, RingMoves};
use crate::memory::Allocator;
use crate::model::groups::GroupPlan;
use crate::numerics::Numerics;
use crate::shape::ModelShape;

/// How much the caches hold.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Capacity {
    /// Sequences with state.
    pub slots: usize,
    /// Blocks of 128 tokens.
    pub blocks: usize,
    /// Rows of a step.
    pub rows: usize,
}

/// All device memory that outlives a step, and the scratch stores beside it.
pub(crate) struct Caches<B: Backend> {
    /// Window rings by layer, backbone then draft, `[slots * ring]` rows each.
    pub window: Vec<B::Store>,
    /// Window rows of a long step or a draft block; one layer at a time.
    pub window_scratch: B::Store,
    /// Compressed entries by KV source.
    pub sources: Vec<SourceStores<B>>,
    /// Open groups of a long step; one source at a time.
    open_scratch: OpenGroups<B>,
}

/// Compressed entries of one KV source.
pub(crate) struct SourceStores<B: Backend> {
    /// Main KV, `[blocks * 128 / ratio]` rows.
    pub main: B::Store,
    /// Index keys, the same rows.
    pub index: B::Store,
    /// Tokens of groups that are not complete; without rows if the ratio is 1.
    pub open: OpenGroups<B>,
}

/// Values and gates of tokens whose group is not complete, in float32.
pub(crate) struct OpenGroups<B: Backend> {
    pub values: B::Store,
    pub gates: B::Store,
}

impl<B: Backend> Caches<B> {
    /// Allocates the caches of a model.
    pub fn new(
        memory: &mut Allocator<'_, B>,
        shape: &ModelShape,
        geometry: &Geometry,
        numerics: Numerics,
        capacity: Capacity,
    ) -> Self {
        let Capacity { slots, blocks, rows } = capacity;
        let width = shape.head_dim;
        let sequences = slots.min(rows);
        let window = numerics.window_format();
        // A long step carries less than a window per sequence; a draft block carries a whole one.
        let window_scratch = rows + sequences * geometry.window;
        let ratio_max = geometry.ratios.last().copied().unwrap_or(1);
        let open_scratch = if ratio_max > 1 { rows + sequences * (ratio_max - 1) } else { 0 };
        let sources = shape.kv_source_layer_ids.iter().map(|&layer| {
            let ratio = shape.ratio(layer);
            let entries = blocks * (BLOCK_TOKENS / ratio);
            SourceStores {
                main: memory.store(numerics.main_format(), width, entries),
                index: memory.store(numerics.index_format(), shape.index_head_dim, entries),
                open: OpenGroups::new(memory, width, slots * GroupPlan::ring(ratio, geometry.slack)),
            }
        });
        let sources = sources.collect();
        Self {
            window: (0..shape.total_layers())
                .map(|_| memory.store(window, width, slots * geometry.ring))
                .collect(),
            window_scratch: memory.store(window, width, window_scratch),
            sources,
            open_scratch: OpenGroups::new(memory, width, open_scratch),
        }
    }

    /// Stores the window keys of a layer's new rows, `[rows, head_dim]`.
    pub fn store_keys(&mut self, backend: &B, layer: usize, keys: &B::Buf<f32>, moves: &RingMoves) {
        let ring = &mut self.window[layer];
        if !moves.scratch {
            return backend.store_rows(keys, ring, &moves.write);
        }
        copy(backend, ring, &moves.carry, &mut self.window_scratch);
        backend.store_rows(keys, &mut self.window_scratch, &moves.write);
        copy(backend, &self.window_scratch, &moves.back, ring);
    }

    /// The store that holds a layer's window keys in this step.
    pub fn keys(&self, layer: usize, moves: &RingMoves) -> &B::Store {
        if moves.scratch { &self.window_scratch } else { &self.window[layer] }
    }

    /// Keeps the values and gates of a source's new rows, and gathers those of the groups they complete.
    pub fn complete_groups(
        &mut self,
        backend: &B,
        source: usize,
        plan: &GroupPlan,
        new: (&B::Buf<f32>, &B::Buf<f32>),
        members: (&mut B::Buf<f32>, &mut B::Buf<f32>),
    ) {
        let open = &mut self.sources[source].open;
        let pairs = [
            (&mut open.values, &mut self.open_scratch.values, new.0, members.0),
            (&mut open.gates, &mut self.open_scratch.gates, new.1, members.1),
        ];
        for (ring, scratch, new, members) in pairs {
            let moves = &plan.moves;
            if moves.scratch {
                copy(backend, ring, &moves.carry, scratch);
                backend.store_rows(new, scratch, &moves.write);
                backend.load_rows(scratch, &plan.members, members);
                copy(backend, scratch, &moves.back, ring);
            } else {
                backend.store_rows(new, ring, &moves.write);
                backend.load_rows(ring, &plan.members, members);
            }
        }
    }
}

impl<B: Backend> OpenGroups<B> {
    fn new(memory: &mut Allocator<'_, B>, width: usize, rows: usize) -> Self {
        Self {
            values: memory.store(RowFormat::F32, width, rows),
            gates: memory.store(RowFormat::F32, width, rows),
        }
    }
}

/// Copies stored rows, if there are any.
fn copy<B: Backend>(backend: &B, src: &B::Store, moves: &Moves, dst: &mut B::Store) {
    if !moves.from.is_empty() {
        backend.copy_rows(src, &moves.from, dst, &moves.to);
    }
}
