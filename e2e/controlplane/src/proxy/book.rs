//! The book of what passed: totals that are exact, and the last requests in detail.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use super::asked::{Asked, Verb};
use super::on::On;

/// Requests kept in detail.
const MAX_ENTRIES: usize = 100_000;

/// A request that came in.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Counted from 1 since the proxy started.
    pub number: u64,
    /// Since the proxy started.
    pub at: Duration,
    /// What was asked.
    pub asked: Asked,
    /// Of the answer; `None` while there is none, and for ever if none was given.
    pub status: Option<u16>,
    /// Bytes of the request's body.
    pub bytes_in: u64,
    /// Bytes of the answer's body that have passed.
    pub bytes_out: u64,
    /// From arrival to the answer's last byte; `None` while it is open.
    pub took: Option<Duration>,
    /// What was done to it.
    pub fault: Option<&'static str>,
}

/// Requests by verb and kind (`pods`, `pods/status`).
pub type Counts = BTreeMap<(Verb, String), u64>;

/// What passed.
pub(super) struct Book {
    next: u64,
    entries: VecDeque<Entry>,
    totals: Counts,
}

impl Book {
    pub(super) fn new() -> Self {
        Self { next: 1, entries: VecDeque::new(), totals: Counts::new() }
    }

    /// Writes a request down as it comes; gives its number.
    pub(super) fn arrive(&mut self, at: Duration, asked: &Asked, bytes_in: u64) -> u64 {
        let number = self.next;
        self.next += 1;
        *self.totals.entry((asked.verb, asked.kind())).or_default() += 1;
        if self.entries.len() == MAX_ENTRIES {
            self.entries.pop_front();
        }
        let asked = asked.clone();
        let (status, bytes_out, took, fault) = (None, 0, None, None);
        self.entries.push_back(Entry { number, at, asked, status, bytes_in, bytes_out, took, fault });
        number
    }

    /// Changes a request's line, if it is still kept.
    pub(super) fn note(&mut self, number: u64, change: impl FnOnce(&mut Entry)) {
        let first = self.entries.front().map_or(u64::MAX, |entry| entry.number);
        let at = number.checked_sub(first).and_then(|at| usize::try_from(at).ok());
        if let Some(entry) = at.and_then(|at| self.entries.get_mut(at)) {
            change(entry);
        }
    }

    pub(super) fn totals(&self) -> Counts {
        self.totals.clone()
    }

    /// Requests that match, of those kept in detail.
    pub(super) fn matching(&self, on: &On) -> Vec<Entry> {
        self.entries.iter().filter(|entry| on.matches(&entry.asked)).cloned().collect()
    }

    pub(super) fn count(&self, on: &On) -> u64 {
        self.entries.iter().filter(|entry| on.matches(&entry.asked)).count() as u64
    }

    /// Forgets what passed; numbers go on.
    pub(super) fn clear(&mut self) {
        self.entries.clear();
        self.totals.clear();
    }
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;

    #[test]
    fn old_lines_go_and_totals_stay() {
        let mut book = Book::new();
        let parts = Request::get("/api/v1/nodes").body(()).unwrap().into_parts().0;
        let asked = Asked::of(&parts, b"");
        for _ in 0..MAX_ENTRIES + 5 {
            book.arrive(Duration::ZERO, &asked, 0);
        }
        book.note(2, |_| panic!("line 2 is gone"));
        book.note(6, |entry| entry.status = Some(200));
        let lines = book.matching(&On::any());
        assert_eq!((lines.len(), lines[0].number, lines[0].status), (MAX_ENTRIES, 6, Some(200)));
        assert_eq!(book.totals()[&(Verb::List, "nodes".to_owned())], MAX_ENTRIES as u64 + 5);
        book.clear();
        assert_eq!((book.count(&On::any()), book.arrive(Duration::ZERO, &asked, 0)), (0, 100_006));
    }
}
