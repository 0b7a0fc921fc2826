//! Draining a node (operator.md 9.1).
//!
//! ```text
//!              drain                     nothing held
//!   Accepting --------> Draining(deadline) --------> Drained
//!       ^                  |   |
//!       +------------------+   +--> at the deadline what is held is cut, then Drained
//!              undrain
//! ```
//!
//! `Drained` is no state of its own: while it drains a node takes nothing, so what it holds only becomes less, and
//! "draining and holding nothing" stays true. An agent with several ranks is drained when all of them are; who asks
//! to undrain is told no once that is so ([`DrainTotals::may_undrain`]).

use deepinfer_protocol::Time;
use deepinfer_protocol::agent_status::{DrainState, DrainStatus};

/// See the module.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Drain {
    deadline: Option<Time>,
    cut: u32,
}

impl Drain {
    /// Whether new work is taken.
    pub fn accepts(&self) -> bool {
        self.deadline.is_none()
    }

    /// Take nothing new. Asked again, the earlier deadline counts: a drain for a failure cuts a patient one short.
    pub fn start(&mut self, deadline: Time) {
        self.deadline = Some(self.deadline.map_or(deadline, |earlier| earlier.min(deadline)));
    }

    /// Take work again.
    pub fn stop(&mut self) {
        self.deadline = None;
    }

    /// Whether what is held must be cut now.
    pub fn overdue(&self, now: Time) -> bool {
        self.deadline.is_some_and(|deadline| deadline <= now)
    }

    /// Requests were cut.
    pub fn count_cut(&mut self, requests: u32) {
        self.cut += requests;
    }

    /// Requests cut so far.
    pub fn cut(&self) -> u32 {
        self.cut
    }

    /// Where it stands, holding `held` requests.
    pub fn state(&self, held: u32) -> DrainState {
        match self.deadline {
            None => DrainState::Accepting,
            Some(_) if held > 0 => DrainState::Draining,
            Some(_) => DrainState::Drained,
        }
    }
}

/// The drain of an agent, summed over its machines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DrainTotals {
    /// Any machine drains.
    pub draining: bool,
    /// Requests held by all.
    pub held: u32,
    /// Requests cut by all.
    pub cut: u32,
    /// Bytes parked by all.
    pub parked_bytes: u64,
}

impl DrainTotals {
    /// Adds one machine.
    pub fn add(&mut self, draining: bool, held: u32, cut: u32, parked_bytes: u64) {
        self.draining |= draining;
        self.held += held;
        self.cut += cut;
        self.parked_bytes += parked_bytes;
    }

    /// Whether an undrain is allowed: only while something is left.
    pub fn may_undrain(&self) -> bool {
        !self.draining || self.held > 0
    }

    /// For `GET /v1/drain`.
    pub fn status(&self) -> DrainStatus {
        let state = match (self.draining, self.held) {
            (false, _) => DrainState::Accepting,
            (true, 0) => DrainState::Drained,
            (true, _) => DrainState::Draining,
        };
        DrainStatus {
            state,
            inflight: self.held,
            handed_off: 0,
            cut: self.cut,
            remaining_kv_bytes: self.parked_bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drain_takes_nothing_until_it_is_undone_and_ends_when_nothing_is_held() {
        let mut drain = Drain::default();
        assert_eq!((drain.accepts(), drain.state(3)), (true, DrainState::Accepting));
        drain.start(Time(100));
        assert_eq!((drain.accepts(), drain.state(3)), (false, DrainState::Draining));
        assert_eq!(drain.state(0), DrainState::Drained);
        drain.stop();
        assert!(drain.accepts() && !drain.overdue(Time(u64::MAX)));
    }

    #[test]
    fn the_earlier_of_two_deadlines_counts() {
        let mut drain = Drain::default();
        drain.start(Time(100));
        drain.start(Time(50));
        drain.start(Time(200));
        assert!(!drain.overdue(Time(49)) && drain.overdue(Time(50)));
    }

    #[test]
    fn an_agent_may_undrain_only_while_one_of_its_ranks_still_holds_something() {
        let mut totals = DrainTotals::default();
        totals.add(true, 0, 1, 0);
        assert!(!totals.may_undrain());
        assert_eq!(totals.status().state, DrainState::Drained);
        totals.add(true, 2, 1, 5);
        assert!(totals.may_undrain());
        let DrainStatus { state, inflight, cut, remaining_kv_bytes, .. } = totals.status();
        assert_eq!((state, inflight, cut, remaining_kv_bytes), (DrainState::Draining, 2, 2, 5));
    }
}
