//! Bounds that two processes must agree on. Everything that is read from a socket has one.

/// Version in the hello; a process speaks its own and refuses others by name.
pub const PROTOCOL_VERSION: u32 = 2;
/// Longest frame in bytes: a KV piece of the real shape is 114 kB, a prompt of a million tokens 5 MB.
pub const MAX_FRAME_BYTES: usize = 64 << 20;
/// Longest frame before the peer has shown the cluster's key.
pub const MAX_HELLO_BYTES: usize = 4 << 10;
/// Most tokens of a sequence that a message may carry: the context limit of the model family.
pub const MAX_SEQUENCE_TOKENS: usize = 1 << 20;
/// Most alternatives of a token (OpenAI's own limit).
pub const MAX_TOP_LOGPROBS: u8 = 20;
/// Token events that may arrive ahead of the next index and are kept (PD-11).
pub const MAX_EARLY_TOKENS: usize = 64;
