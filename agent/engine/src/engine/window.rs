//! The state of a sequence beside its blocks: cut out, put back, or rebuilt from tokens whose entries are
//! still in their blocks.

use deepinfer_kernels::{Backend, StoreInfo};
use deepinfer_serving::batch::{BLOCK_TOKENS, StateSlot};

use super::error::StepError;
use super::{Engine, Truncation};
use crate::cache::{Header, OpenGroups, Slot, WindowState, WindowStateError, digest};
use crate::engram::DEAD;
use crate::model::groups::GroupPlan;
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
        self.slot(slot)?;
        if !position.is_multiple_of(BLOCK_TOKENS) || position == 0 {
            return Err(StepError::NotAligned { slot: slot.0, position });
        }
        self.export_state_at(slot, position)
    }

    /// The slot's state where it stands, at any position but 0.
    ///
    /// # Errors
    /// [`StepError::NoSlot`], [`StepError::NotHeld`] for an empty slot.
    pub fn export_sequence(&self, slot: StateSlot) -> Result<WindowState, StepError> {
        // An empty slot has no position 1.
        self.export_state_at(slot, self.slot(slot)?.held.max(1))
    }

    fn export_state_at(&self, slot: StateSlot, position: usize) -> Result<WindowState, StepError> {
        let state = *self.slot(slot)?;
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
        let mut out = WindowState::begin(&header, self.state_payload(&header));
        let mut history = vec![DEAD; self.reach().saturating_sub(position)];
        if self.context.hasher.is_some() {
            self.histories.before(ordinal, position, &mut history);
        }
        out.payload_mut().extend(history.iter().flat_map(|id| id.to_le_bytes()));
        for (layer, store) in self.caches.window.iter().enumerate() {
            let rows = self.window_rows(ordinal, layer, &header);
            self.backend.export_rows(store, &rows, out.payload_mut());
        }
        for source in 0..self.caches.sources.len() {
            let rows = self.open_rows(ordinal, source, position);
            let OpenGroups { values, gates } = &self.caches.sources[source].open;
            self.backend.export_rows(values, &rows, out.payload_mut());
            self.backend.export_rows(gates, &rows, out.payload_mut());
        }
        Ok(out.seal())
    }

    /// Puts a window checkpoint into a slot, whatever it held before. Compressed entries are not part of it:
    /// the sequence's blocks must hold them.
    ///
    /// # Errors
    /// [`StepError::NoSlot`], [`StepError::NotAligned`] if the state is not at a multiple of 128, or
    /// [`StepError::WindowState`] if it is damaged or of another model or setting.
    pub fn import_window(&mut self, slot: StateSlot, state: &WindowState) -> Result<(), StepError> {
        self.slot(slot)?;
        self.check_state(state)?;
        let position = state.position();
        if !position.is_multiple_of(BLOCK_TOKENS) {
            return Err(StepError::NotAligned { slot: slot.0, position });
        }
        self.import_sequence(slot, state)
    }

    /// Whether a state is whole and of this model and setting.
    pub(super) fn check_state(&self, state: &WindowState) -> Result<Header, StepError> {
        let header = state.header(self.digest(), self.context.geometry.window)?;
        if !(1..=self.constants.shape.max_position_embeddings).contains(&header.position) {
            let (position, from) = (header.position as u64, header.from[0] as u64);
            return Err(WindowStateError::Position { position, from }.into());
        }
        state.check_payload(self.state_payload(&header))?;
        Ok(header)
    }

    /// Puts a state at any position into a slot, whatever it held before. The sequence's blocks must hold its
    /// compressed entries.
    ///
    /// # Errors
    /// [`StepError::NoSlot`], or [`StepError::WindowState`] if the state is damaged or of another model or
    /// setting.
    pub fn import_sequence(&mut self, slot: StateSlot, state: &WindowState) -> Result<(), StepError> {
        self.slot(slot)?;
        let header = self.check_state(state)?;
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
        for source in 0..self.caches.sources.len() {
            let rows = self.open_rows(ordinal, source, header.position);
            let OpenGroups { values, gates } = &mut self.caches.sources[source].open;
            for store in [values, gates] {
                let bytes = rows.len() * store.format().row_bytes(store.width());
                let (part, after) = rest.split_at(bytes);
                self.backend.import_rows(store, &rows, part);
                rest = after;
            }
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

    /// Rows of the open group of a source when a slot stands at a position.
    fn open_rows(&self, slot: usize, source: usize, position: usize) -> Vec<u32> {
        let ratio = self.constants.shape.ratio(self.constants.shape.kv_source_layer_ids[source]);
        let ring = GroupPlan::ring(ratio, self.context.geometry.slack);
        (position - position % ratio..position).map(|p| (slot * ring + p % ring) as u32).collect()
    }

    /// Bytes after the header of a state.
    fn state_payload(&self, header: &Header) -> usize {
        let row = |(layer, store): (usize, &B::Store)| {
            (header.position - header.from[self.zone_ordinal(layer)])
                * store.format().row_bytes(store.width())
        };
        let open = |source: usize| {
            let OpenGroups { values, gates } = &self.caches.sources[source].open;
            let rows = self.open_rows(0, source, header.position).len();
            [values, gates].map(|s| rows * s.format().row_bytes(s.width())).iter().sum::<usize>()
        };
        4 * self.reach()
            + self.caches.window.iter().enumerate().map(row).sum::<usize>()
            + (0..self.caches.sources.len()).map(open).sum::<usize>()
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

    /// What gives the bytes of exported states and blocks their meaning, as text for keys and for people:
    /// version, numerics, tokens of a block, what truncation leaves out, and a digest of the whole shape.
    pub fn kv_format(&self) -> String {
        let truncation = match self.constants.boundary {
            None => "off".to_string(),
            Some(layer) => format!(
                "{:?} from layer {layer}, keep {}, {:?}",
                self.options.truncation,
                self.options.keep_of(&self.constants.shape),
                self.options.boundary_swa
            ),
        };
        let (numerics, digest) = (self.constants.numerics, self.digest());
        format!("kv 1, {numerics}, blocks of {BLOCK_TOKENS}, truncation {truncation}, shape {digest:016x}")
    }

    /// Names who can read whose KV: engines with the same weights and the same format, whatever their ranks
    /// and sizes. `weights`: [`crate::Checkpoint::digest`].
    pub fn kv_epoch(&self, weights: &[u8; 32]) -> String {
        let mut hash = blake3::Hasher::new_derive_key("deepinfer.io kv epoch 1");
        hash.update(weights);
        hash.update(self.kv_format().as_bytes());
        hash.finalize().to_hex()[..16].to_string()
    }

    /// Digest of everything that gives the bytes of a state or a block their meaning.
    pub(super) fn digest(&self) -> u64 {
        let c = &self.constants;
        digest(&format!("{:?} {:?} {:?} {:?}", c.shape, c.numerics, c.boundary, self.options.boundary_swa))
    }
}
