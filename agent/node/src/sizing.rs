//! How large an engine is opened: what the flags say, and for the rest what fits into the memory. Pure.
//!
//! Invariant: the longest sequence fits into the cache, so a request within the context limit can always run
//! alone.

use deepinfer_serving::batch::BLOCK_TOKENS;
use thiserror::Error;

use crate::args::{AgentArgs, RoleChoice};

/// Sequences at once if nothing is said: prompts run a few at a time, decode gains from many.
const DEFAULT_REQUESTS: (u32, u32) = (8, 64);
/// Rows of a prefill step if nothing is said: more brings nothing on a CPU, and buffers grow with it.
const DEFAULT_PREFILL_ROWS: u32 = 512;
/// Share of the memory for KV blocks if nothing is said; the rest is for state, buffers and host copies.
const KV_SHARE: u64 = 2;
/// Shares of the memory for window checkpoints and parked sequences.
const CHECKPOINT_SHARE: u64 = 16;
/// See above.
const PARKED_SHARE: u64 = 4;
/// Tokens of a cache are counted in 32 bits.
const MAX_BLOCKS: u32 = u32::MAX / BLOCK_TOKENS as u32;
/// Assumed where the system does not tell and no flag does.
const UNKNOWN_MEMORY: u64 = 2 << 30;

/// What is known of model and machine.
#[derive(Clone, Copy, Debug)]
pub struct Given {
    /// Longest sequence that the model supports, in tokens.
    pub model_context: u32,
    /// Bytes of one block of KV.
    pub block_bytes: u64,
    /// Bytes of one sequence's state.
    pub state_bytes: u64,
    /// Bytes that can be had; `None` if the system does not tell.
    pub available: Option<u64>,
}

/// Sizes of each rank's engine and of its host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizing {
    /// Sequences at once.
    pub requests: u32,
    /// Blocks of KV.
    pub blocks: u32,
    /// Rows of a step at most.
    pub max_rows: u32,
    /// Longest sequence in tokens.
    pub context_limit: u32,
    /// Bytes of window checkpoints.
    pub checkpoint_bytes: u64,
    /// Bytes of parked sequences.
    pub parked_bytes: u64,
}

/// Sizes that contradict each other or the machine.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum SizingError {
    /// Longer than the model supports.
    #[error("--context-limit is {asked}, the model supports {model}")]
    Context {
        /// Of the flag.
        asked: u32,
        /// Of the model.
        model: u32,
    },
    /// The cache cannot hold one longest sequence.
    #[error(
        "the KV cache has {tokens} tokens, a sequence may have {context}: raise --kv-tokens or lower --context-limit"
    )]
    Cache {
        /// Tokens of the cache.
        tokens: u64,
        /// The context limit.
        context: u32,
    },
    /// Not even one block and one state.
    #[error("--memory of {memory} bytes does not hold one sequence of 128 tokens ({needed} bytes): raise it")]
    Memory {
        /// What may be taken.
        memory: u64,
        /// What is needed at least.
        needed: u64,
    },
    /// More blocks than can be counted.
    #[error("--kv-tokens or --kv-blocks is too large: more than 2^32 tokens")]
    TooLarge,
    /// A flag that the role does not have.
    #[error("{flag}: {reason}")]
    Flag {
        /// The flag.
        flag: &'static str,
        /// Why not.
        reason: &'static str,
    },
}

impl Sizing {
    /// Sizes by flags and memory.
    ///
    /// # Errors
    /// [`SizingError`], which names the flag.
    pub fn of(args: &AgentArgs, given: &Given) -> Result<Self, SizingError> {
        check_role(args)?;
        let prefill = args.role == RoleChoice::Prefill;
        let ranks = u64::from(args.ranks);
        let memory = args.memory.unwrap_or_else(|| given.available.map_or(UNKNOWN_MEMORY, |bytes| bytes / 2));
        let default_requests = if prefill { DEFAULT_REQUESTS.0 } else { DEFAULT_REQUESTS.1 };
        let requests = args.max_requests.unwrap_or(default_requests);
        if let Some(asked) = args.context_limit.filter(|&asked| asked > given.model_context || asked < 2) {
            return Err(SizingError::Context { asked, model: given.model_context });
        }
        let wanted_context = args.context_limit.unwrap_or(given.model_context);
        let blocks = match (args.kv_blocks, args.kv_tokens) {
            (Some(blocks), _) => u64::from(blocks.max(1)),
            (None, Some(tokens)) => blocks_of(tokens).max(1),
            (None, None) => {
                let least = given.block_bytes + given.state_bytes;
                if memory / ranks < least {
                    return Err(SizingError::Memory { memory, needed: least * ranks });
                }
                let room = memory / KV_SHARE / ranks / given.block_bytes.max(1);
                (u64::from(requests) * blocks_of(u64::from(wanted_context))).min(room).max(1)
            }
        };
        let tokens = blocks * BLOCK_TOKENS as u64;
        let context_limit = match args.context_limit {
            Some(context) if u64::from(context) > tokens => {
                return Err(SizingError::Cache { tokens, context });
            }
            Some(context) => context,
            None => u64::from(given.model_context).min(tokens) as u32,
        };
        let default_rows = if prefill { DEFAULT_PREFILL_ROWS.max(requests) } else { requests };
        Ok(Self {
            requests,
            blocks: u32::try_from(blocks).ok().filter(|b| *b <= MAX_BLOCKS).ok_or(SizingError::TooLarge)?,
            max_rows: args.max_rows.unwrap_or(default_rows),
            context_limit,
            checkpoint_bytes: args.checkpoint_memory.unwrap_or(memory / CHECKPOINT_SHARE),
            parked_bytes: args.parked_memory.unwrap_or(memory / PARKED_SHARE),
        })
    }
}

fn check_role(args: &AgentArgs) -> Result<(), SizingError> {
    let refuse = |flag, reason| Err(SizingError::Flag { flag, reason });
    match args.role {
        RoleChoice::Prefill if args.ranks > 1 => {
            refuse("--ranks", "a prefill worker has one rank until context parallelism is built")
        }
        RoleChoice::Prefill if args.supernode.is_some() => {
            refuse("--supernode", "prefill workers belong to no supernode")
        }
        RoleChoice::Decode if args.supernode.is_none() => {
            refuse("--supernode", "a decode agent belongs to one: name it")
        }
        _ => Ok(()),
    }
}

fn blocks_of(tokens: u64) -> u64 {
    tokens.div_ceil(BLOCK_TOKENS as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIVEN: Given =
        Given { model_context: 4096, block_bytes: 1 << 20, state_bytes: 1 << 16, available: Some(1 << 30) };

    fn args(extra: &[&str]) -> AgentArgs {
        let base = ["--name=a", "--role=decode", "--supernode=s", "--checkpoint=x"];
        let flags: Vec<&str> = base.iter().chain(extra).copied().collect();
        AgentArgs::from_flags(&flags).expect("good flags")
    }

    #[test]
    fn what_is_not_said_fits_into_the_memory() {
        let sizing = Sizing::of(&args(&[]), &GIVEN).expect("sizes");
        assert_eq!((sizing.requests, sizing.max_rows), (64, 64));
        // Half of what is available may be taken, and half of that is for KV.
        assert_eq!(sizing.blocks, 256);
        assert_eq!(sizing.context_limit, 4096);
        let roomy = Given { available: Some(1 << 40), ..GIVEN };
        assert_eq!(Sizing::of(&args(&[]), &roomy).expect("sizes").blocks, 64 * 32);
        let two = Sizing::of(&args(&["--ranks=2"]), &GIVEN).expect("sizes");
        assert_eq!(two.blocks, 128, "ranks share the memory");
    }

    #[test]
    fn a_small_cache_lowers_the_default_context_and_refuses_a_given_one() {
        let small = Sizing::of(&args(&["--kv-tokens=1000"]), &GIVEN).expect("sizes");
        assert_eq!((small.blocks, small.context_limit), (8, 1024));
        let error = Sizing::of(&args(&["--kv-tokens=1000", "--context-limit=2000"]), &GIVEN);
        assert_eq!(error, Err(SizingError::Cache { tokens: 1024, context: 2000 }));
        let error = Sizing::of(&args(&["--context-limit=5000"]), &GIVEN);
        assert_eq!(error, Err(SizingError::Context { asked: 5000, model: 4096 }));
        let error = Sizing::of(&args(&["--memory=1MiB"]), &GIVEN);
        assert!(matches!(error, Err(SizingError::Memory { .. })), "{error:?}");
    }

    #[test]
    fn flags_that_a_role_does_not_have_are_named() {
        let prefill = ["--name=a", "--role=prefill", "--checkpoint=x"];
        let of = |extra: &[&str]| {
            let flags: Vec<&str> = prefill.iter().chain(extra).copied().collect();
            Sizing::of(&AgentArgs::from_flags(&flags).expect("good flags"), &GIVEN)
        };
        assert_eq!(of(&[]).expect("sizes").max_rows, 512);
        for extra in [&["--ranks=2"][..], &["--supernode=s"]] {
            let flag = extra[0].split('=').next().expect("a flag");
            assert!(of(extra).expect_err("refused").to_string().starts_with(flag));
        }
    }
}
