//! What is measured, and the goals.

use serde::{Deserialize, Serialize};

/// One kind of load.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub enum Scenario {
    /// Streams of chat answers of 64 tokens, each client one after the other.
    Stream {
        /// Clients.
        clients: usize,
        /// Microseconds between the tokens of a stream; 0: as fast as they go.
        step_micros: u64,
    },
    /// Whole answers of 16 tokens.
    Whole {
        /// Clients.
        clients: usize,
    },
    /// One client alone, a prompt of about this many words.
    FirstToken {
        /// Words of the prompt.
        words: usize,
    },
}

/// Name, load, and goal in the unit of its kind (microseconds, microseconds, milliseconds).
pub const SCENARIOS: &[(&str, Scenario, f64)] = &[
    ("64-token streams back to back, 32 clients", Scenario::Stream { clients: 32, step_micros: 0 }, 6.0),
    ("64-token streams back to back, 256 clients", Scenario::Stream { clients: 256, step_micros: 0 }, 7.0),
    (
        "64-token streams at 5 ms a token, 32 clients",
        Scenario::Stream { clients: 32, step_micros: 5000 },
        34.0,
    ),
    (
        "64-token streams at 5 ms a token, 256 clients",
        Scenario::Stream { clients: 256, step_micros: 5000 },
        18.0,
    ),
    ("whole answers of 16 tokens, 32 clients", Scenario::Whole { clients: 32 }, 80.0),
    ("time to the first token, 400 words, idle", Scenario::FirstToken { words: 400 }, 0.5),
];

/// What the clients saw.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Measured {
    pub requests: u64,
    pub tokens: u64,
    pub seconds: f64,
    pub first_token_p50_ms: f64,
}
