//! Who is away: what a gateway owns here is kept for the lease after it was lost, then freed (PD-8). A gateway that
//! is heard of in time loses nothing.

use std::collections::BTreeMap;

use deepinfer_protocol::{AgentId, Span, Time};

/// See the module.
#[derive(Clone, Debug)]
pub struct Leases {
    away: BTreeMap<AgentId, Time>,
    lease: Span,
}

impl Leases {
    /// Nobody is away.
    pub fn new(lease: Span) -> Self {
        Self { away: BTreeMap::new(), lease }
    }

    /// A word of a peer.
    pub fn heard(&mut self, peer: &AgentId) {
        if !self.away.is_empty() {
            self.away.remove(peer);
        }
    }

    /// A peer was lost; the lease counts from the first loss.
    pub fn lost(&mut self, now: Time, peer: AgentId) {
        self.away.entry(peer).or_insert(now);
    }

    /// Peers whose lease ran out. They are forgotten: what they own must be freed now.
    pub fn expired(&mut self, now: Time) -> Vec<AgentId> {
        let lease = self.lease;
        self.away.extract_if(.., |_, since| now.since(*since) >= lease).map(|(peer, _)| peer).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_that_returns_within_the_lease_loses_nothing() {
        let mut leases = Leases::new(Span::secs(30));
        let (a, b) = (AgentId::from("a"), AgentId::from("b"));
        leases.lost(Time(0), a.clone());
        leases.lost(Time(0), b.clone());
        leases.lost(Time(0) + Span::secs(20), b.clone());
        leases.heard(&a);
        assert_eq!(leases.expired(Time(0) + Span::secs(29)), []);
        assert_eq!(leases.expired(Time(0) + Span::secs(30)), [b]);
        assert_eq!(leases.expired(Time(0) + Span::secs(90)), []);
    }
}
