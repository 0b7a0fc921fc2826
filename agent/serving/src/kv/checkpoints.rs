//! Window checkpoints in host memory: the state of a sequence at the end of a full block, by that block's key.
//!
//! Invariant: bytes held never exceed the budget, which is its own: a full block pool takes nothing from it and
//! the other way round (KV-8b). Least recently used goes first.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::BlockKey;

#[derive(Clone, Debug)]
struct Entry {
    state: Arc<[u8]>,
    used: u64,
}

/// Figures for metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CheckpointCounts {
    /// Checkpoints held.
    pub entries: u32,
    /// Bytes held.
    pub bytes: u64,
    /// Limit of the above.
    pub budget: u64,
    /// Prefixes that began at a checkpoint.
    pub hits: u64,
    /// Prefixes whose blocks were there while the checkpoint at their end was not: the budget is too small.
    pub misses: u64,
    /// Pushed out by newer ones.
    pub evicted: u64,
}

/// The checkpoints of one engine.
#[derive(Clone, Debug)]
pub struct CheckpointStore {
    entries: BTreeMap<BlockKey, Entry>,
    by_use: BTreeSet<(u64, BlockKey)>,
    clock: u64,
    counts: CheckpointCounts,
}

impl CheckpointStore {
    /// An empty store of at most `budget` bytes; 0 keeps none.
    pub fn new(budget: u64) -> Self {
        Self {
            entries: BTreeMap::new(),
            by_use: BTreeSet::new(),
            clock: 0,
            counts: CheckpointCounts { budget, ..CheckpointCounts::default() },
        }
    }

    /// Keeps the state at the end of the block `key`, pushing out older ones. `false`: it is larger than the
    /// whole budget and not kept. A second state of the same key only counts as a use: keys name content.
    pub fn insert(&mut self, key: BlockKey, state: Arc<[u8]>) -> bool {
        if self.entries.contains_key(&key) {
            self.touch(&key);
            return true;
        }
        let bytes = state.len() as u64;
        if bytes > self.counts.budget {
            return false;
        }
        while self.counts.bytes + bytes > self.counts.budget {
            let (_, oldest) = *self.by_use.first().expect("bytes are held, so an entry is");
            self.remove(&oldest);
            self.counts.evicted += 1;
        }
        let used = self.tick();
        self.entries.insert(key, Entry { state, used });
        self.by_use.insert((used, key));
        self.counts.bytes += bytes;
        self.counts.entries += 1;
        true
    }

    /// Whether a checkpoint is there; not a use.
    pub fn contains(&self, key: &BlockKey) -> bool {
        self.entries.contains_key(key)
    }

    /// The state, which counts as a use.
    pub fn get(&mut self, key: &BlockKey) -> Option<Arc<[u8]>> {
        self.touch(key);
        self.entries.get(key).map(|entry| Arc::clone(&entry.state))
    }

    /// Drops one that an engine could not read.
    pub fn remove(&mut self, key: &BlockKey) {
        if let Some(entry) = self.entries.remove(key) {
            self.by_use.remove(&(entry.used, *key));
            self.counts.bytes -= entry.state.len() as u64;
            self.counts.entries -= 1;
        }
    }

    /// Drops all.
    pub fn clear(&mut self) {
        self.entries.clear();
        self.by_use.clear();
        self.counts.bytes = 0;
        self.counts.entries = 0;
    }

    /// Figures.
    pub fn counts(&self) -> CheckpointCounts {
        self.counts
    }

    /// What does not add up, for tests.
    ///
    /// # Errors
    /// A sentence about the first invariant that does not hold.
    pub fn check(&self) -> Result<(), String> {
        let bytes: u64 = self.entries.values().map(|e| e.state.len() as u64).sum();
        if bytes != self.counts.bytes || bytes > self.counts.budget {
            return Err(format!(
                "{bytes} bytes are held, {} counted, {} allowed",
                self.counts.bytes, self.counts.budget
            ));
        }
        let listed = self.entries.iter().all(|(key, entry)| self.by_use.contains(&(entry.used, *key)));
        if !listed
            || self.by_use.len() != self.entries.len()
            || self.entries.len() != self.counts.entries as usize
        {
            return Err(format!("{} entries, {} in the order of use", self.entries.len(), self.by_use.len()));
        }
        Ok(())
    }

    pub(super) fn count_lookup(&mut self, hit: bool) {
        if hit {
            self.counts.hits += 1;
        } else {
            self.counts.misses += 1;
        }
    }

    fn touch(&mut self, key: &BlockKey) {
        let now = self.tick();
        if let Some(entry) = self.entries.get_mut(key) {
            self.by_use.remove(&(entry.used, *key));
            entry.used = now;
            self.by_use.insert((now, *key));
        }
    }

    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }
}
