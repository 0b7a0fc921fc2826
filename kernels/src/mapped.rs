//! Read-only mappings of checkpoint files, and views of their bytes.
//!
//! One of the fenced files: mapping a file is `unsafe` because someone else could shorten or rewrite it while it
//! is mapped. Checkpoints are written once; whoever replaces one writes new files and renames the folder.

#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::ops::Deref;
use std::path::Path;
use std::sync::Arc;

#[derive(Debug)]
enum Source {
    Mapped(memmap2::Mmap),
    Owned(Vec<u8>),
}

impl Source {
    fn bytes(&self) -> &[u8] {
        match self {
            Source::Mapped(map) => map,
            Source::Owned(bytes) => bytes,
        }
    }
}

/// A range of bytes of a mapped file or of owned memory; cheap to clone.
#[derive(Clone, Debug)]
pub struct ByteView {
    source: Arc<Source>,
    offset: usize,
    len: usize,
}

impl ByteView {
    /// Maps a whole file read-only.
    ///
    /// # Errors
    /// Whatever opening or mapping the file answers. An empty file gives an empty view.
    pub fn map(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        if file.metadata()?.len() == 0 {
            return Ok(Self::default());
        }
        // SAFETY: the map is read-only and private to this process; the operator of the machine guarantees that
        // checkpoint files are not truncated or rewritten in place while a process serves from them.
        let map = unsafe { memmap2::Mmap::map(&file)? };
        let len = map.len();
        Ok(Self { source: Arc::new(Source::Mapped(map)), offset: 0, len })
    }

    /// Owns `bytes`.
    pub fn owned(bytes: Vec<u8>) -> Self {
        let len = bytes.len();
        Self { source: Arc::new(Source::Owned(bytes)), offset: 0, len }
    }

    /// The part `offset .. offset + len` of this view.
    ///
    /// # Panics
    /// If the range is not inside the view.
    pub fn slice(&self, offset: usize, len: usize) -> Self {
        let end = offset.checked_add(len).expect("range fits in usize");
        assert!(end <= self.len, "range {offset}..{end} of a view of {} bytes", self.len);
        Self { source: Arc::clone(&self.source), offset: self.offset + offset, len }
    }
}

impl Default for ByteView {
    fn default() -> Self {
        Self::owned(Vec::new())
    }
}

impl Deref for ByteView {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.source.bytes()[self.offset..self.offset + self.len]
    }
}
