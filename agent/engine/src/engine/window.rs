//! State at block boundaries: cut out, put back, or rebuilt from tokens whose entries are still in their
//! blocks.

use deepinfer_kernels::{Backend, StoreInfo};
use deepinfer_serving::batch::{BLOCK_TOKENS, StateSlot};

use super::error::StepError;
use super::{Engine, Truncation};
use crate::cache::{Header, Slot, WindowState, digest};
use crate::engram::DEAD;
use crate::model::plan::Zone;

/// In the history of a replay: a position of an image span.
pub const IMAGE_POSITION: u32 = DEAD;

impl<B: Backend> Engine<B> {
    /// The slot's state, which must cover a positive multiple of 128 tokens.
    ///
    /// # Errors
    /// [`StepError::NoSlot`], [`StepError::NotAligned`].
    pub fn export_window(&self, slot: StateSlot) -> Result<WindowState, StepError> {
        self.export_window_at(slot, self.slot(slot)?.held)
    }

    /// The slot's state as it was at `position`, a positive multiple of 128 not further back than a rollback
    /// can go.
    ///
    /// # Errors
    /// [`StepError::NoSlot`], [`StepError::NotAligned`], [`StepError::NotHeld`],
    /// [`StepError::RollbackTooDeep`].
    pub fn export_window_at(&self, slot: StateSlot, position: usize) -> Result<WindowState, StepError> {
        let state = *self.slot(slot)?;
        if position == 0 || !position.is_multiple_of(BLOCK_TOKENS) {
            return Err(StepError::NotAligned { slot: slot.0, position });
        }
        if position > state.held {
            let held = state.held;
            return Err(StepError::NotHeld { slot: slot.0, position, held });
        }
        self.check_cut(slot, position)?;
        let oldest = position.saturating_sub(self.context.geometry.window);
        let zones = [state.window_from, self.boundary_from(&state), state.consumer_from];
        let header =
            Header { digest: self.digest(), position, from: zones.map(|from| from.clamp(oldest, position)) };
        let ordinal = slot.0 as usize;
        let mut out = WindowState::begin(&header, self.window_payload(&header));
        let mut history = vec![DEAD; self.reach().saturating_sub(position)];
        if self.context.hasher.is_some() {
            self.histories.before(ordinal, position, &mut history);
        }
        out.payload_mut().extend(history.iter().flat_map(|id| id.to_le_bytes()));
        for (layer, store) in self.caches.window.iter().enumerate() {
            let rows = self.window_rows(ordinal, layer, &header);
            self.backend.export_rows(store, &rows, out.payload_mut());
        }
        Ok(out)
    }

    /// Puts a state into a slot, whatever it held before. Compressed entries are not part of it: the
    /// sequence's blocks must hold them.
    ///
    /// # Errors
    /// [`StepError::NoSlot`], or [`StepError::WindowState`] if the state is damaged or of another model or
    /// setting.
    pub fn import_window(&mut self, slot: StateSlot, state: &WindowState) -> Result<(), StepError> {
        self.slot(slot)?;
        let header = state.header(self.digest(), self.context.geometry.window)?;
        state.check_payload(self.window_payload(&header))?;
        let ordinal = slot.0 as usize;
        let (history, mut rest) = state.payload().split_at(4 * self.reach());
        if self.context.hasher.is_some() {
            let ids = history.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
            let ids: Vec<u32> = ids.collect();
            let known = &ids[ids.len().saturating_sub(header.position)..];
            self.histories.clear(ordinal);
            self.histories.store(ordinal, header.position - known.len(), known);
        }
        for layer in 0..self.caches.window.len() {
            let rows = self.window_rows(ordinal, layer, &header);
            let store = &mut self.caches.window[layer];
            let bytes = rows.len() * store.format().row_bytes(store.width());
            let (part, after) = rest.split_at(bytes);
            self.backend.import_rows(store, &rows, part);
            rest = after;
        }
        self.slots[ordinal] = Slot {
            window_from: header.from[0],
            consumer_from: header.from[2],
            ..Slot::starting_at(header.position)
        };
        Ok(())
    }

    /// Prepares a slot for steps with `replay`: it holds `start` positions of which nothing but the
    /// compressed entries exists. `history` are the token ids before `start`, oldest first, as many as
    /// n-grams reach ([`IMAGE_POSITION`] for positions of images); more are ignored.
    ///
    /// # Errors
    /// [`StepError::NoSlot`], [`StepError::NotAligned`], [`StepError::ContextLimit`],
    /// [`StepError::ShortHistory`], [`StepError::BadToken`].
    pub fn begin_replay(&mut self, slot: StateSlot, start: usize, history: &[u32]) -> Result<(), StepError> {
        self.slot(slot)?;
        let limit = self.constants.shape.max_position_embeddings;
        if !start.is_multiple_of(BLOCK_TOKENS) {
            return Err(StepError::NotAligned { slot: slot.0, position: start });
        }
        if start > limit {
            let end = start;
            return Err(StepError::ContextLimit { slot: slot.0, end, limit });
        }
        let needed = self.reach().min(start);
        let given = history.len();
        if given < needed {
            return Err(StepError::ShortHistory { slot: slot.0, given, needed, start });
        }
        let history = &history[given - needed..];
        for (offset, &token) in history.iter().enumerate().filter(|&(_, &t)| t != IMAGE_POSITION) {
            self.check_token(slot.0, token, start - needed + offset)?;
        }
        let ordinal = slot.0 as usize;
        if let Some(hasher) = &self.context.hasher {
            let compress = |&t: &u32| {
                if t == IMAGE_POSITION { DEAD } else { hasher.compress(t) }
            };
            let ids: Vec<u32> = history.iter().map(compress).collect();
            self.histories.clear(ordinal);
            self.histories.store(ordinal, start - needed, &ids);
        }
        self.slots[ordinal] = Slot::starting_at(start);
        Ok(())
    }

    /// Tokens before a position that must be replayed to rebuild its state exactly, a multiple of 128: a
    /// window for each layer whose rows are needed, less the row they share. With consumer truncation the
    /// later layers need only the kept rows, wherever in the prompt they begin.
    pub fn replay_tokens(&self) -> usize {
        let shape = &self.constants.shape;
        let (window, layers) = (shape.sliding_window, shape.num_hidden_layers);
        let exact = match (self.options.truncation, shape.first_consumer()) {
            (Truncation::Off, _) | (_, None) => window + (layers - 1) * (window - 1),
            (_, Some(producers)) => {
                let boundary = usize::from(self.options.boundary_swa == super::BoundarySwa::Full);
                self.options.keep_of(shape).max(window) + (producers + boundary) * (window - 1)
            }
        };
        exact.next_multiple_of(BLOCK_TOKENS)
    }

    /// Tokens before a position that its n-grams read.
    fn reach(&self) -> usize {
        self.context.hasher.as_ref().map_or(0, |h| h.history_len() - 1)
    }

    /// Ring rows of a layer that belong to a window state.
    fn window_rows(&self, slot: usize, layer: usize, header: &Header) -> Vec<u32> {
        let from = header.from[self.zone_ordinal(layer)];
        (from..header.position).map(|p| self.context.geometry.ring_row(slot, p)).collect()
    }

    /// Bytes after the header of a window state.
    fn window_payload(&self, header: &Header) -> usize {
        let row = |(layer, store): (usize, &B::Store)| {
            (header.position - header.from[self.zone_ordinal(layer)])
                * store.format().row_bytes(store.width())
        };
        4 * self.reach() + self.caches.window.iter().enumerate().map(row).sum::<usize>()
    }

    fn zone_ordinal(&self, layer: usize) -> usize {
        if self.constants.shape.is_draft(layer) {
            return 2;
        }
        match self.constants.zone(layer) {
            Zone::Producer => 0,
            Zone::Boundary => 1,
            Zone::Consumer => 2,
        }
    }

    /// Digest of everything that gives the bytes of a window state their meaning.
    fn digest(&self) -> u64 {
        let c = &self.constants;
        digest(&format!("{:?} {:?} {:?} {:?}", c.shape, c.numerics, c.boundary, self.options.boundary_swa))
    }
}
