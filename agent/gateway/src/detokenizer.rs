//! The streaming detokenizer: ids in, whole characters out.
//!
//! Invariants: every piece is valid UTF-8 and ends at a character boundary; all pieces together are exactly
//! [`Tokenizer::decode`] of all ids, U+FFFD for U+FFFD. At most three bytes wait for the rest of their character,
//! so the cost of an id does not depend on how many came before it.

use std::sync::Arc;

use crate::tokenizer::Tokenizer;

/// Turns generated ids into text as they arrive.
#[derive(Debug, Clone)]
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    skip_special: bool,
    /// The start of a character that is not complete yet.
    pending: Vec<u8>,
    /// The piece handed out last; kept so that a step allocates nothing once it has grown.
    piece: String,
}

impl Detokenizer {
    /// A detokenizer that leaves the text of special tokens out.
    #[must_use]
    pub fn new(tokenizer: Arc<Tokenizer>) -> Self {
        Self { tokenizer, skip_special: true, pending: Vec::new(), piece: String::new() }
    }

    /// A detokenizer that writes special tokens as they are spelled.
    #[must_use]
    pub fn with_special(tokenizer: Arc<Tokenizer>) -> Self {
        Self { skip_special: false, ..Self::new(tokenizer) }
    }

    /// Take the next id and return the text that is now certain; it may be empty.
    pub fn push(&mut self, id: u32) -> &str {
        self.piece.clear();
        if !(self.skip_special && self.tokenizer.is_special(id)) {
            self.pending.extend_from_slice(self.tokenizer.token_bytes(id));
            self.take_complete();
        }
        &self.piece
    }

    /// End the text: a character that never became complete is written as U+FFFD. The detokenizer can then be
    /// used for another text.
    pub fn finish(&mut self) -> &str {
        self.piece.clear();
        if !self.pending.is_empty() {
            self.pending.clear();
            self.piece.push(char::REPLACEMENT_CHARACTER);
        }
        &self.piece
    }

    /// Move everything but the start of an incomplete character from `pending` to `piece`.
    fn take_complete(&mut self) {
        let mut kept = 0;
        let mut chunks = self.pending.utf8_chunks().peekable();
        while let Some(chunk) = chunks.next() {
            self.piece.push_str(chunk.valid());
            let invalid = chunk.invalid();
            if invalid.is_empty() {
                continue;
            }
            let incomplete =
                |bytes| std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none());
            if chunks.peek().is_none() && incomplete(invalid) {
                kept = invalid.len();
            } else {
                self.piece.push(char::REPLACEMENT_CHARACTER);
            }
        }
        self.pending.drain(..self.pending.len() - kept);
    }
}
