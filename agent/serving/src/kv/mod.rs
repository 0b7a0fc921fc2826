//! Accounting of blocks, never of their bytes: who holds which block ([`BlockPool`]), what is in it ([`BlockKey`]),
//! and how much of a prompt need not be computed again ([`plan_prefix`]).

mod checkpoints;
mod key;
mod pool;
mod prefix;

pub use self::checkpoints::{CheckpointCounts, CheckpointStore};
pub use self::key::{BlockKey, ExtraInput, KEY_FORMAT, KeyDomain, ReplayMode, block_key, chain};
pub use self::pool::{BlockPool, NoRoom, PoolCounts, blocks_for};
pub use self::prefix::{PrefixPlan, RECOMPUTE_LIMIT, Start, checkpoint_position, plan_prefix};
