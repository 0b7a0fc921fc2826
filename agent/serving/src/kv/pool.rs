//! The blocks of one engine: who holds them, and which can be found again by their content.
//!
//! ```text
//!            allocate                seal(key)                  release (last)
//!   Free ---------------> Filling ---------------> Sealed, held ---------------> Sealed, cached
//!    ^                       |                        ^                             |    |
//!    |        release        |                        +-----------------------------+    |
//!    +-----------------------+                             hold (a prefix hit)           |
//!    +-----------------------------------------------------------------------------------+
//!                                     allocate (least recently used, leaves first)
//! ```
//!
//! Invariants: `used + cached + free = total` at every moment; a block being filled belongs to one sequence; a
//! key names at most one block; a refused call changes nothing. [`BlockPool::check`] says what does not hold.

use std::collections::{BTreeMap, BTreeSet};

use thiserror::Error;

use super::BlockKey;
use crate::batch::{BLOCK_TOKENS, BlockId};

/// Blocks that a sequence of this many tokens needs.
pub const fn blocks_for(tokens: usize) -> usize {
    tokens.div_ceil(BLOCK_TOKENS)
}

/// Fewer blocks are free or cached than were asked for.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("{asked} blocks are needed, {available} of {total} are free or can be evicted")]
pub struct NoRoom {
    /// Blocks wanted.
    pub asked: usize,
    /// Blocks that could have been given.
    pub available: usize,
    /// Blocks there are.
    pub total: usize,
}

/// Blocks by use. `used + cached + free` is `total`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolCounts {
    /// Held by at least one sequence.
    pub used: usize,
    /// Held by none, found again by content until evicted.
    pub cached: usize,
    /// Without content.
    pub free: usize,
    /// All.
    pub total: usize,
    /// Cached blocks that were given to new content, since the start.
    pub evicted: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Block {
    Free,
    Filling,
    Sealed(Sealed),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Sealed {
    key: BlockKey,
    parent: Option<BlockKey>,
    holders: u32,
    /// When its last holder left it; orders eviction.
    left: u64,
}

/// See the module.
#[derive(Clone, Debug)]
pub struct BlockPool {
    blocks: Vec<Block>,
    free: BTreeSet<BlockId>,
    by_key: BTreeMap<BlockKey, BlockId>,
    /// How many sealed blocks name this key as their parent.
    children: BTreeMap<BlockKey, u32>,
    /// Cached blocks that no sealed block continues, by when they were left: evicted first.
    leaves: BTreeSet<(u64, BlockId)>,
    /// The other cached blocks.
    inner: BTreeSet<(u64, BlockId)>,
    clock: u64,
    evicted: u64,
}

impl BlockPool {
    /// `total` free blocks, numbered from 0.
    ///
    /// # Panics
    /// If block numbers do not fit 32 bits.
    pub fn new(total: usize) -> Self {
        let last = u32::try_from(total).expect("block numbers have 32 bits");
        Self {
            blocks: vec![Block::Free; total],
            free: (0..last).map(BlockId).collect(),
            by_key: BTreeMap::new(),
            children: BTreeMap::new(),
            leaves: BTreeSet::new(),
            inner: BTreeSet::new(),
            clock: 0,
            evicted: 0,
        }
    }

    /// Figures.
    pub fn counts(&self) -> PoolCounts {
        let cached = self.leaves.len() + self.inner.len();
        PoolCounts {
            used: self.blocks.len() - cached - self.free.len(),
            cached,
            free: self.free.len(),
            total: self.blocks.len(),
            evicted: self.evicted,
        }
    }

    /// Blocks that [`BlockPool::allocate`] could give now.
    pub fn available(&self) -> usize {
        self.free.len() + self.leaves.len() + self.inner.len()
    }

    /// Takes `n` blocks to fill, free ones first (lowest number), then cached ones, least recently used and
    /// leaves before what they continue.
    ///
    /// # Errors
    /// [`NoRoom`]; then nothing was evicted.
    pub fn allocate(&mut self, n: usize) -> Result<Vec<BlockId>, NoRoom> {
        let available = self.available();
        if n > available {
            return Err(NoRoom { asked: n, available, total: self.blocks.len() });
        }
        let mut taken = Vec::with_capacity(n);
        for _ in 0..n {
            let id = match self.free.pop_first() {
                Some(id) => id,
                None => self.evict(),
            };
            self.blocks[at(id)] = Block::Filling;
            taken.push(id);
        }
        Ok(taken)
    }

    /// Names the content of a full block that was being filled; `parent` is the key of the block before it, `None`
    /// for the first. Gives the block that the sequence holds from now on: if the content was there already,
    /// that other block, and the given one is free. Not to be called while a step that names the block runs.
    ///
    /// # Panics
    /// If the block is not being filled: a bug of the caller, which would share bytes that still change.
    #[must_use = "the sequence holds the returned block, not always the one it filled"]
    pub fn seal(&mut self, id: BlockId, key: BlockKey, parent: Option<BlockKey>) -> BlockId {
        assert_eq!(self.blocks[at(id)], Block::Filling, "{id:?} is sealed while it is not being filled");
        if let Some(known) = self.hold(&key) {
            self.blocks[at(id)] = Block::Free;
            self.free.insert(id);
            return known;
        }
        self.blocks[at(id)] = Block::Sealed(Sealed { key, parent, holders: 1, left: 0 });
        self.by_key.insert(key, id);
        if let Some(parent) = parent {
            *self.children.entry(parent).or_insert(0) += 1;
            self.refile(&parent);
        }
        id
    }

    /// The block with this content, held or cached.
    pub fn find(&self, key: &BlockKey) -> Option<BlockId> {
        self.by_key.get(key).copied()
    }

    /// One more holder of the block with this content, if there is one.
    pub fn hold(&mut self, key: &BlockKey) -> Option<BlockId> {
        let id = self.find(key)?;
        let mut sealed = *self.sealed(id);
        if sealed.holders == 0 {
            self.unfile(id, sealed.left);
        }
        sealed.holders += 1;
        self.blocks[at(id)] = Block::Sealed(sealed);
        Some(id)
    }

    /// One holder less. The last one leaves a sealed block cached and another one free.
    ///
    /// # Panics
    /// If nobody holds the block: a bug of the caller, which would give one block to two sequences.
    pub fn release(&mut self, id: BlockId) {
        match &mut self.blocks[at(id)] {
            Block::Filling => {
                self.blocks[at(id)] = Block::Free;
                self.free.insert(id);
            }
            Block::Sealed(sealed) if sealed.holders > 0 => {
                sealed.holders -= 1;
                if sealed.holders == 0 {
                    self.clock += 1;
                    sealed.left = self.clock;
                    let sealed = *sealed;
                    self.file(id, &sealed);
                }
            }
            block => panic!("{id:?} is released while nobody holds it: {block:?}"),
        }
    }

    /// Releases the blocks of a sequence, the last one first, so that a prefix outlives its end.
    pub fn release_all(&mut self, blocks: &[BlockId]) {
        blocks.iter().rev().for_each(|&id| self.release(id));
    }

    /// Whether the block's content is known and shared.
    pub fn is_sealed(&self, id: BlockId) -> bool {
        matches!(self.blocks[at(id)], Block::Sealed(_))
    }

    /// Forgets the content of all cached blocks. Held ones stay.
    pub fn forget_cached(&mut self) {
        while !self.leaves.is_empty() || !self.inner.is_empty() {
            let id = self.evict();
            self.blocks[at(id)] = Block::Free;
            self.free.insert(id);
        }
    }

    /// Forgets everything: the engine and its bytes are gone. Ids given before mean nothing any more.
    pub fn reset(&mut self) {
        let evicted = self.evicted;
        *self = Self::new(self.blocks.len());
        self.evicted = evicted;
    }

    /// Takes the content from the least recently used cached block.
    fn evict(&mut self) -> BlockId {
        let next = self.leaves.pop_first().or_else(|| self.inner.pop_first());
        let (_, id) = next.expect("only called while a block is cached");
        let Sealed { key, parent, .. } = *self.sealed(id);
        self.by_key.remove(&key);
        if let Some(parent) = parent {
            let children = self.children.get_mut(&parent).expect("a child was counted at its parent");
            *children -= 1;
            if *children == 0 {
                self.children.remove(&parent);
            }
            self.refile(&parent);
        }
        self.evicted += 1;
        id
    }

    fn sealed(&self, id: BlockId) -> &Sealed {
        match &self.blocks[at(id)] {
            Block::Sealed(sealed) => sealed,
            block => panic!("{id:?} has a key but is {block:?}"),
        }
    }

    fn file(&mut self, id: BlockId, sealed: &Sealed) {
        let set = if self.children.contains_key(&sealed.key) { &mut self.inner } else { &mut self.leaves };
        set.insert((sealed.left, id));
    }

    fn unfile(&mut self, id: BlockId, left: u64) {
        self.leaves.remove(&(left, id));
        self.inner.remove(&(left, id));
    }

    /// Puts a cached block among leaves or inner ones after its children changed.
    fn refile(&mut self, key: &BlockKey) {
        let Some(id) = self.find(key) else {
            return;
        };
        let sealed = *self.sealed(id);
        if sealed.holders == 0 {
            self.unfile(id, sealed.left);
            self.file(id, &sealed);
        }
    }

    /// Whether everything adds up.
    ///
    /// # Errors
    /// A sentence about the first invariant that does not hold.
    pub fn check(&self) -> Result<(), String> {
        let mut children: BTreeMap<BlockKey, u32> = BTreeMap::new();
        let (mut free, mut cached, mut keys) = (0, 0, 0);
        for (id, block) in (0..).map(BlockId).zip(&self.blocks) {
            let listed = (self.free.contains(&id), self.filed(id));
            let expected = match block {
                Block::Free => (true, false),
                Block::Filling => (false, false),
                Block::Sealed(sealed) => {
                    keys += 1;
                    if self.find(&sealed.key) != Some(id) {
                        return Err(format!("{id:?} is not found by its key {}", sealed.key));
                    }
                    if let Some(parent) = sealed.parent {
                        *children.entry(parent).or_insert(0) += 1;
                    }
                    (false, sealed.holders == 0)
                }
            };
            if listed != expected {
                return Err(format!("{id:?} is {block:?} but (free, cached) is {listed:?}"));
            }
            free += usize::from(listed.0);
            cached += usize::from(listed.1);
        }
        if free != self.free.len() || cached != self.leaves.len() + self.inner.len() {
            return Err(format!("{free} blocks are free and {cached} cached, the lists say otherwise"));
        }
        if keys != self.by_key.len() {
            return Err(format!("{keys} blocks have a key, {} keys are known", self.by_key.len()));
        }
        if children != self.children {
            return Err("children are counted wrongly".to_owned());
        }
        Ok(())
    }

    fn filed(&self, id: BlockId) -> bool {
        let Block::Sealed(sealed) = &self.blocks[at(id)] else {
            return self.leaves.iter().chain(&self.inner).any(|(_, other)| *other == id);
        };
        let (right, wrong) = if self.children.contains_key(&sealed.key) {
            (&self.inner, &self.leaves)
        } else {
            (&self.leaves, &self.inner)
        };
        right.contains(&(sealed.left, id)) && !wrong.contains(&(sealed.left, id))
    }
}

/// Place of a block in the pool.
fn at(id: BlockId) -> usize {
    id.0 as usize
}
