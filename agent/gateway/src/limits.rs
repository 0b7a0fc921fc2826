//! Bounds of the gateway's HTTP edge: everything that a client can make grow or wait has one here.
//!
//! Limits of requests (queue, tenants, attempts) belong to the machine in `deepinfer-serving`.

use std::time::Duration;

/// Limits of connections, headers and bodies. Every field has a default with its reason.
#[derive(Clone, Debug)]
pub struct EdgeLimits {
    /// Open client connections; one more is answered 503 and closed. Default 16,384: ten thousand idle clients and
    /// their probes, at about 3 kB of memory each.
    pub connections: usize,
    /// A connection without a request is closed after this. Default 180 s: client pools and load balancers keep
    /// connections for 60 to 120 s, and who closes first must not be the server.
    pub idle: Duration,
    /// From the first byte of a request to the end of its header, and for a TLS handshake. Default 15 s.
    pub header_time: Duration,
    /// Bytes of a request's header. Default 64 KiB.
    pub header_bytes: usize,
    /// Fields of a request's header. Default 100.
    pub headers: usize,
    /// Bytes of a request's body. Default 32 MiB: a prompt of a million tokens as text or as ids.
    pub body_bytes: usize,
    /// From the end of the header to the end of the body. Default 60 s.
    pub body_time: Duration,
    /// Bytes of all bodies that are being read or parsed. Default 1 GiB.
    pub bodies_bytes: usize,
    /// A client that takes no byte for this long is cut off and its request cancelled. Default 60 s.
    pub write_stall: Duration,
    /// Tokens (an alternative of a log-probability counts as one) that wait for a client that reads slower than they
    /// are generated; above, the request is cancelled. Default 131,072, about 4 MB: a long answer fits whole.
    pub waiting_tokens: usize,
}

impl Default for EdgeLimits {
    fn default() -> Self {
        Self {
            connections: 16_384,
            idle: Duration::from_secs(180),
            header_time: Duration::from_secs(15),
            header_bytes: 64 << 10,
            headers: 100,
            body_bytes: 32 << 20,
            body_time: Duration::from_secs(60),
            bodies_bytes: 1 << 30,
            write_stall: Duration::from_secs(60),
            waiting_tokens: 131_072,
        }
    }
}
