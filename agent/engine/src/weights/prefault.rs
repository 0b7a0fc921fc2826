//! Reading a checkpoint into memory before the first request needs it.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use deepinfer_kernels::ByteView;

use super::Checkpoint;
use crate::tensors::Reads;

/// Bytes that a thread touches before it reports.
const PIECE: usize = 16 << 20;
/// Smallest page of the machines we run on.
const PAGE: usize = 4096;

impl Checkpoint {
    /// Touches every page of the weights with `threads` threads, so that steps do not wait for the disk.
    /// Tables of which a token reads single rows (embeddings, Engram) are left out: they may be larger than
    /// the memory.
    ///
    /// `progress(done, total)` is called with bytes, from any thread.
    pub fn prefault(&self, threads: usize, progress: &(dyn Fn(u64, u64) + Sync)) {
        let mut pieces: Vec<ByteView> = Vec::new();
        for spec in self.specs().filter(|spec| !matches!(spec.reads, Reads::Rows(_))) {
            let source = self.matrix(&spec.name);
            for view in [Some(source.data), source.scales].into_iter().flatten() {
                let starts = (0..view.len()).step_by(PIECE);
                pieces.extend(starts.map(|at| view.slice(at, PIECE.min(view.len() - at))));
            }
        }
        let total = pieces.iter().map(|piece| piece.len() as u64).sum();
        let (next, done, pieces) = (AtomicUsize::new(0), AtomicU64::new(0), &pieces);
        std::thread::scope(|scope| {
            for _ in 0..threads.max(1) {
                scope.spawn(|| {
                    while let Some(piece) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
                        let sum = piece.iter().step_by(PAGE).fold(0u8, |sum, byte| sum.wrapping_add(*byte));
                        // Keeps the reads from being optimised away.
                        std::hint::black_box(sum);
                        let before = done.fetch_add(piece.len() as u64, Ordering::Relaxed);
                        progress(before + piece.len() as u64, total);
                    }
                });
            }
        });
    }
}
