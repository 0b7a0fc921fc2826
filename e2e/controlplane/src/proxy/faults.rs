//! What goes wrong, at which of the matching requests. The same seed and the same order of matching requests give
//! the same faults.

use std::collections::BTreeSet;
use std::time::Duration;

use super::asked::{Asked, Verb};
use super::on::On;

/// A fault that is waiting for its requests.
#[derive(Clone, Debug)]
pub struct Fault {
    /// Requests that count.
    pub on: On,
    /// Which of them are hit.
    pub which: Which,
    /// What happens to those.
    pub what: What,
}

/// Which of the matching requests, counted from 1 since the fault was injected.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Which {
    /// Each of them.
    All,
    /// One of them.
    Nth(u64),
    /// From the first to this one.
    First(u64),
    /// Each whose number is a multiple.
    Every(u64),
    /// The first of each verb, kind and name: whoever tries again comes through. Names that differ only in a random
    /// part are one name, because who tries again may draw another one.
    FirstOfEach,
    /// Each with this probability, drawn from the proxy's seed.
    Probability(f64),
}

/// What happens to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// Refused with this status before it reaches the server, with `Retry-After` if given.
    Refuse {
        /// 409, 429, 500, 503, ...
        status: u16,
        /// Seconds.
        retry_after: Option<u32>,
    },
    /// Taken, and never answered nor forwarded.
    Silence,
    /// The connection is closed before anything is forwarded.
    Drop,
    /// Forwarded; then the connection is closed instead of the answer.
    LoseAnswer,
    /// Forwarded after this time.
    Delay(Duration),
    /// A watch that ends after so many lines.
    CutWatch {
        /// Lines that still pass.
        after: u64,
        /// How it ends.
        how: Cut,
    },
    /// The request goes its way, and all open watches end.
    CutAllWatches(Cut),
}

/// How a watch ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// As if the server had ended it in good order.
    Clean,
    /// The connection is closed in the middle.
    Broken,
}

impl What {
    /// Refused with a status.
    pub const fn status(status: u16) -> Self {
        Self::Refuse { status, retry_after: None }
    }

    /// 429 with `Retry-After`.
    pub const fn too_many(retry_after: u32) -> Self {
        Self::Refuse { status: 429, retry_after: Some(retry_after) }
    }

    /// A word for the log.
    pub(super) fn word(self) -> &'static str {
        match self {
            Self::Refuse { .. } => "refused",
            Self::Silence => "not answered",
            Self::Drop => "dropped",
            Self::LoseAnswer => "answer lost",
            Self::Delay(_) => "delayed",
            Self::CutWatch { .. } => "watch to be cut",
            Self::CutAllWatches(_) => "cuts all watches",
        }
    }
}

/// Names a fault that was injected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FaultId(u64);

struct Rule {
    id: FaultId,
    fault: Fault,
    matched: u64,
    fired: u64,
    /// For [`Which::FirstOfEach`].
    seen: BTreeSet<(Verb, String, String)>,
}

/// All faults in force.
pub(super) struct Rules {
    seed: u64,
    next: u64,
    rules: Vec<Rule>,
}

impl Rules {
    pub(super) fn new(seed: u64) -> Self {
        Self { seed, next: 0, rules: Vec::new() }
    }

    pub(super) fn add(&mut self, fault: Fault) -> FaultId {
        let id = FaultId(self.next);
        self.next += 1;
        self.rules.push(Rule { id, fault, matched: 0, fired: 0, seen: BTreeSet::new() });
        id
    }

    pub(super) fn remove(&mut self, id: FaultId) {
        self.rules.retain(|rule| rule.id != id);
    }

    /// Forgets all faults; their draws start again.
    pub(super) fn clear(&mut self) {
        self.rules.clear();
        self.next = 0;
    }

    /// How many requests a fault has matched, and how many of these it has hit.
    pub(super) fn figures(&self, id: FaultId) -> (u64, u64) {
        self.rules.iter().find(|rule| rule.id == id).map_or((0, 0), |rule| (rule.matched, rule.fired))
    }

    /// What happens to a request: the first fault that hits it. All faults count it.
    pub(super) fn decide(&mut self, asked: &Asked) -> Option<What> {
        let mut chosen = None;
        for rule in &mut self.rules {
            if !rule.fault.on.matches(asked) {
                continue;
            }
            rule.matched += 1;
            let hit = match rule.fault.which {
                Which::All => true,
                Which::Nth(n) => rule.matched == n,
                Which::First(n) => rule.matched <= n,
                Which::Every(n) => n > 0 && rule.matched.is_multiple_of(n),
                Which::FirstOfEach => {
                    let place = format!("{}/{}", asked.namespace, undrawn(&asked.name));
                    rule.seen.insert((asked.verb, asked.kind(), place))
                }
                Which::Probability(p) => draw(self.seed, rule.id.0, rule.matched) < p,
            };
            if hit && chosen.is_none() {
                rule.fired += 1;
                chosen = Some(rule.fault.what);
            }
        }
        chosen
    }
}

/// A name with five stars for each part that is drawn: five of Kubernetes' letters for random names.
fn undrawn(name: &str) -> String {
    let drawn = |part: &str| {
        part.len() == 5 && part.bytes().all(|letter| b"bcdfghjklmnpqrstvwxz2456789".contains(&letter))
    };
    let parts = name.split('-').map(|part| if drawn(part) { "*****" } else { part });
    parts.collect::<Vec<_>>().join("-")
}

/// A number in [0, 1) that depends on nothing but the arguments, so that other traffic does not move it.
fn draw(seed: u64, fault: u64, number: u64) -> f64 {
    let mut x = seed ^ fault.rotate_left(32) ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    for _ in 0..2 {
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^= x >> 31;
    }
    (x >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;

    fn create() -> Asked {
        let request = Request::post("/api/v1/namespaces/a/pods").body(()).unwrap();
        Asked::of(&request.into_parts().0, b"")
    }

    fn hits(seed: u64, which: Which, of: u64) -> Vec<u64> {
        let mut rules = Rules::new(seed);
        rules.add(Fault { on: On::writes(), which, what: What::Drop });
        (1..=of).filter(|_| rules.decide(&create()).is_some()).collect()
    }

    #[test]
    fn the_numbers_of_the_requests_decide() {
        assert_eq!(hits(1, Which::Nth(3), 7), [3]);
        assert_eq!(hits(1, Which::First(2), 7), [1, 2]);
        assert_eq!(hits(1, Which::Every(3), 7), [3, 6]);
        assert_eq!(hits(1, Which::All, 2), [1, 2]);
        assert_eq!(hits(1, Which::FirstOfEach, 5), [1]);
    }

    #[test]
    fn drawn_parts_of_names_do_not_count() {
        for (name, wanted) in [
            ("c-decode-9x2gs-00", "c-decode-*****-00"),
            ("c-gateway", "c-gateway"),
            ("c-decode", "c-decode"),
            ("c-agent-1", "c-agent-1"),
        ] {
            assert_eq!(undrawn(name), wanted);
        }
    }

    #[test]
    fn a_seed_repeats_and_another_seed_differs() {
        let drawn = hits(7, Which::Probability(0.3), 1000);
        assert!((250..350).contains(&drawn.len()), "{}", drawn.len());
        assert_eq!(drawn, hits(7, Which::Probability(0.3), 1000));
        assert_ne!(drawn, hits(8, Which::Probability(0.3), 1000));
    }

    #[test]
    fn the_first_fault_that_hits_wins_and_all_of_them_count() {
        let mut rules = Rules::new(1);
        let first = rules.add(Fault { on: On::writes(), which: Which::Nth(1), what: What::status(500) });
        let second = rules.add(Fault { on: On::writes(), which: Which::All, what: What::Drop });
        assert_eq!(rules.decide(&create()), Some(What::status(500)));
        assert_eq!(rules.decide(&create()), Some(What::Drop));
        assert_eq!(rules.figures(first), (2, 1));
        assert_eq!(rules.figures(second), (2, 1));
        rules.remove(second);
        assert_eq!(rules.decide(&create()), None);
    }
}
