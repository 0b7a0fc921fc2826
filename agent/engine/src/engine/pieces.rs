//! Whole sequences out of an engine and into another one: blocks of compressed entries, and the state beside
//! them. Slots and blocks may have other numbers there.

use std::sync::Arc;

use deepinfer_kernels::{Backend, StoreInfo};
use deepinfer_protocol::message::PieceKind;
use deepinfer_serving::batch::{BLOCK_TOKENS, BlockId, StateSlot};
use deepinfer_serving::node::Pieces;

use super::Engine;
use super::error::StepError;
use crate::cache::{BlockHeader, WindowState};

impl<B: Backend> Engine<B> {
    /// Main KV and index keys of a block, all sources, as bytes with a version, a digest of the format and a
    /// checksum.
    ///
    /// # Errors
    /// [`StepError::NoSuchBlock`].
    pub fn export_block(&self, block: BlockId) -> Result<Vec<u8>, StepError> {
        self.check_block(block)?;
        let mut out = BlockHeader::begin(self.entries_bytes());
        for stores in &self.caches.sources {
            for store in [&stores.main, &stores.index] {
                self.backend.export_rows(store, &self.block_rows(block, store), &mut out);
            }
        }
        BlockHeader::seal(&mut out, self.digest());
        Ok(out)
    }

    /// Puts exported bytes into a block.
    ///
    /// # Errors
    /// [`StepError::NoSuchBlock`], [`StepError::Block`] if they are damaged or of another model or setting.
    pub fn import_block(&mut self, block: BlockId, bytes: &[u8]) -> Result<(), StepError> {
        self.check_block(block)?;
        let mut rest = BlockHeader::open(bytes, self.digest(), self.entries_bytes())?;
        for source in 0..self.caches.sources.len() {
            for main in [true, false] {
                let stores = &self.caches.sources[source];
                let store = if main { &stores.main } else { &stores.index };
                let rows = self.block_rows(block, store);
                let (part, after) = rest.split_at(rows.len() * store.format().row_bytes(store.width()));
                let stores = &mut self.caches.sources[source];
                let store = if main { &mut stores.main } else { &mut stores.index };
                self.backend.import_rows(store, &rows, part);
                rest = after;
            }
        }
        Ok(())
    }

    /// Bytes of an exported block.
    pub fn kv_block_bytes(&self) -> usize {
        BlockHeader::BYTES + self.entries_bytes()
    }

    /// A sequence at whatever position it stands: the blocks that its positions lie in, of `blocks`, in order,
    /// then its state.
    ///
    /// # Errors
    /// [`StepError::NoSlot`], [`StepError::NoSuchBlock`], [`StepError::MissingBlocks`], and
    /// [`StepError::Pieces`] for an empty slot.
    pub fn export_pieces(&self, slot: StateSlot, blocks: &[BlockId]) -> Result<Pieces, StepError> {
        let held = self.slot(slot)?.held;
        let blocks = self.blocks_of(slot, held, blocks)?;
        let state = self.export_sequence(slot)?;
        let mut pieces = Pieces::with_capacity(blocks.len() + 1);
        for (ordinal, &block) in blocks.iter().enumerate() {
            pieces.push((PieceKind::Block(ordinal as u32), self.export_block(block)?.into()));
        }
        pieces.push((PieceKind::State, state.into_bytes().into()));
        Ok(pieces)
    }

    /// Puts the pieces of an export into a slot and into `blocks`; pieces may come in any order. Everything is
    /// checked before anything changes.
    ///
    /// # Errors
    /// [`StepError::NoSlot`], [`StepError::NoSuchBlock`], [`StepError::MissingBlocks`], and
    /// [`StepError::Pieces`], [`StepError::Block`] or [`StepError::WindowState`] for pieces that are missing,
    /// damaged or of another model or setting.
    pub fn import_pieces(
        &mut self,
        slot: StateSlot,
        blocks: &[BlockId],
        pieces: &Pieces,
    ) -> Result<(), StepError> {
        self.slot(slot)?;
        let wrong = |detail: String| StepError::Pieces { slot: slot.0, detail };
        let state = one(pieces, PieceKind::State).map_err(wrong)?;
        let state = WindowState::from_bytes(state.to_vec())?;
        self.check_state(&state)?;
        let position = state.position();
        let blocks = self.blocks_of(slot, position, blocks)?;
        if pieces.len() != blocks.len() + 1 {
            let (given, needed) = (pieces.len() - 1, blocks.len());
            return Err(wrong(format!("{given} blocks, {needed} are needed for {position} positions")));
        }
        let mut bytes = Vec::with_capacity(blocks.len());
        for ordinal in 0..blocks.len() {
            let piece = one(pieces, PieceKind::Block(ordinal as u32)).map_err(wrong)?;
            BlockHeader::open(piece, self.digest(), self.entries_bytes())?;
            bytes.push(piece);
        }
        for (&block, bytes) in blocks.iter().zip(bytes) {
            self.import_block(block, bytes)?;
        }
        self.import_sequence(slot, &state)
    }

    /// The blocks that hold the first `positions` positions of a sequence.
    fn blocks_of<'b>(
        &self,
        slot: StateSlot,
        positions: usize,
        blocks: &'b [BlockId],
    ) -> Result<&'b [BlockId], StepError> {
        let needed = positions.div_ceil(BLOCK_TOKENS);
        let Some(blocks) = blocks.get(..needed) else {
            let given = blocks.len();
            return Err(StepError::MissingBlocks { slot: slot.0, given, needed, end: positions });
        };
        blocks.iter().try_for_each(|&block| self.check_block(block))?;
        Ok(blocks)
    }

    fn check_block(&self, block: BlockId) -> Result<(), StepError> {
        let blocks = self.options.blocks;
        if (block.0 as usize) < blocks {
            return Ok(());
        }
        Err(StepError::NoSuchBlock { block: block.0, blocks })
    }

    /// Rows of a block in a store of compressed entries.
    fn block_rows(&self, block: BlockId, store: &B::Store) -> Vec<u32> {
        let rows = (store.rows() / self.options.blocks) as u32;
        (block.0 * rows..(block.0 + 1) * rows).collect()
    }

    /// Bytes of a block's entries.
    fn entries_bytes(&self) -> usize {
        let bytes =
            |store: &B::Store| store.rows() / self.options.blocks * store.format().row_bytes(store.width());
        self.caches.sources.iter().map(|s| bytes(&s.main) + bytes(&s.index)).sum()
    }
}

/// The only piece of a kind.
fn one(pieces: &Pieces, kind: PieceKind) -> Result<&Arc<[u8]>, String> {
    let mut found = pieces.iter().filter(|(k, _)| *k == kind).map(|(_, bytes)| bytes);
    match (found.next(), found.next()) {
        (Some(bytes), None) => Ok(bytes),
        (None, _) => Err(format!("{kind:?} is missing")),
        (Some(_), Some(_)) => Err(format!("{kind:?} is there twice")),
    }
}
