//! Finding stop strings in text that comes in pieces.
//!
//! Invariants: the match that ends first wins (of two that end together, the longer one); a match may span any
//! number of pieces; no character that may still belong to a match is released, and nothing else is held back.
//! A byte costs one step of an automaton for each stop string, however adversarial the text.

/// Looks for any of a few strings.
#[derive(Clone, Debug)]
pub(crate) struct StopMatcher {
    needles: Vec<Needle>,
    /// Text that may be the beginning of a match.
    held: String,
    stopped: bool,
}

/// One stop string as a Knuth-Morris-Pratt automaton.
#[derive(Clone, Debug)]
struct Needle {
    bytes: Box<[u8]>,
    /// For each matched length, the next shorter one that the same text also matches.
    shorter: Box<[usize]>,
    matched: usize,
}

impl Needle {
    fn new(text: &str) -> Self {
        let bytes: Box<[u8]> = text.as_bytes().into();
        let mut shorter = vec![0; bytes.len() + 1].into_boxed_slice();
        let mut length = 0;
        for index in 1..bytes.len() {
            while length > 0 && bytes[index] != bytes[length] {
                length = shorter[length];
            }
            length += usize::from(bytes[index] == bytes[length]);
            shorter[index + 1] = length;
        }
        Self { bytes, shorter, matched: 0 }
    }

    /// Take a byte; true if it completes the string.
    fn push(&mut self, byte: u8) -> bool {
        while self.matched > 0 && self.bytes[self.matched] != byte {
            self.matched = self.shorter[self.matched];
        }
        self.matched += usize::from(self.bytes[self.matched] == byte);
        self.matched == self.bytes.len()
    }
}

impl StopMatcher {
    /// A matcher for `stops`; empty strings are left out.
    pub(crate) fn new(stops: &[String]) -> Self {
        let needles = stops.iter().filter(|stop| !stop.is_empty()).map(|stop| Needle::new(stop)).collect();
        Self { needles, held: String::new(), stopped: false }
    }

    /// Take a piece and append to `out` what is certainly not part of a match. After a match nothing more comes.
    pub(crate) fn push(&mut self, piece: &str, out: &mut String) {
        if self.stopped {
            return;
        }
        if self.needles.is_empty() {
            out.push_str(piece);
            return;
        }
        for (index, byte) in piece.bytes().enumerate() {
            let mut longest = 0;
            for needle in &mut self.needles {
                if needle.push(byte) {
                    longest = longest.max(needle.bytes.len());
                }
            }
            if longest > 0 {
                self.stopped = true;
                self.held.push_str(piece.get(..=index).unwrap_or(piece));
                let keep = self.held.len() - longest;
                out.push_str(&self.held[..keep]);
                self.held.clear();
                return;
            }
        }
        self.held.push_str(piece);
        let hold = self.needles.iter().map(|needle| needle.matched).max().unwrap_or(0);
        let release = self.held.len() - hold;
        out.push_str(&self.held[..release]);
        self.held.drain(..release);
    }

    /// Take a piece that is left out of the text unless it is a stop string by itself; true if it is.
    pub(crate) fn push_alone(&mut self, piece: &str) -> bool {
        self.stopped |= self.needles.iter().any(|needle| *needle.bytes == *piece.as_bytes());
        self.stopped
    }

    /// No match can span this point: release what is held.
    pub(crate) fn interrupt(&mut self, out: &mut String) {
        out.push_str(&self.held);
        self.held.clear();
        self.needles.iter_mut().for_each(|needle| needle.matched = 0);
    }

    /// A stop string was found.
    pub(crate) fn stopped(&self) -> bool {
        self.stopped
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The definition: the match with the smallest end; of those the longest.
    fn oracle(stops: &[String], text: &str) -> (String, bool) {
        let found = stops.iter().filter_map(|stop| text.find(stop).map(|start| (start + stop.len(), start)));
        match found.min() {
            Some((_, start)) => (text[..start].to_owned(), true),
            None => (text.to_owned(), false),
        }
    }

    fn read(stops: &[String], pieces: &[String]) -> (String, bool) {
        let mut matcher = StopMatcher::new(stops);
        let mut out = String::new();
        for piece in pieces {
            matcher.push(piece, &mut out);
            let (certain, _) = oracle(stops, &pieces.concat());
            assert!(certain.starts_with(&out), "{out:?} was released, {certain:?} is the answer");
        }
        if !matcher.stopped() {
            matcher.interrupt(&mut out);
        }
        (out, matcher.stopped())
    }

    proptest! {
        #[test]
        fn any_pieces_give_what_one_search_gives(
            stops in prop::collection::vec("[abé]{1,5}", 0..4),
            pieces in prop::collection::vec("[abé]{0,4}", 0..12),
        ) {
            prop_assert_eq!(read(&stops, &pieces), oracle(&stops, &pieces.concat()));
        }
    }

    #[test]
    fn only_what_may_still_match_is_held_back() {
        let mut matcher = StopMatcher::new(&["ZZZZ".to_owned()]);
        let mut out = String::new();
        matcher.push("ab ZZ", &mut out);
        assert_eq!(out, "ab ");
        matcher.push("Z!", &mut out);
        assert_eq!(out, "ab ZZZ!");
    }
}
