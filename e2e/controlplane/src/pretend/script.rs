//! What a pretend agent says.

use std::time::Duration;

use deepinfer_protocol::agent_status::AgentPhase;

/// How an agent answers calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answering {
    /// At once.
    AtOnce,
    /// After this time.
    After(Duration),
    /// Never: the node is off or cut off.
    Never,
    /// The connection is closed: nothing listens.
    Closed,
    /// With this status and nothing else.
    Status(u16),
}

/// How long running work takes to leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drains {
    /// Nothing runs.
    AtOnce,
    /// After this time, or cut at the deadline.
    After(Duration),
    /// Never, not even at the deadline.
    Never,
}

/// What an agent says; the same for all pods of a pattern.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Script {
    /// From the first call to Serving.
    pub warm_up: Duration,
    /// Where it stays, and why; `None` lets it serve.
    pub stuck: Option<(AgentPhase, String)>,
    /// How it answers.
    pub answering: Answering,
    /// How it drains.
    pub drains: Drains,
    /// Requests that run here until it is drained.
    pub inflight: u32,
}

impl Default for Script {
    fn default() -> Self {
        Self::serving()
    }
}

impl Script {
    /// Serves at once and has nothing to do.
    pub fn serving() -> Self {
        Self {
            warm_up: Duration::ZERO,
            stuck: None,
            answering: Answering::AtOnce,
            drains: Drains::AtOnce,
            inflight: 0,
        }
    }

    /// Serves after a time.
    pub fn warms_up(time: Duration) -> Self {
        Self { warm_up: time, ..Self::serving() }
    }

    /// Never comes so far.
    pub fn never_ready(reason: &str) -> Self {
        Self { stuck: Some((AgentPhase::Starting, reason.to_owned())), ..Self::serving() }
    }

    /// Has failed for good.
    pub fn failed(reason: &str) -> Self {
        Self { stuck: Some((AgentPhase::Failed, reason.to_owned())), ..Self::serving() }
    }

    /// Is not heard of.
    pub fn lost() -> Self {
        Self { answering: Answering::Never, ..Self::serving() }
    }

    /// Works, and takes this long to drain.
    pub fn busy(inflight: u32, drains: Drains) -> Self {
        Self { inflight, drains, ..Self::serving() }
    }
}
