//! The words that two processes share, and nothing else: no I/O, no clock, no decisions.
//!
//! * [`ids`] and [`time`]: newtypes, so that a rank is never taken for a slot.
//! * [`generate`]: what a request asks for and what comes back, token by token.
//! * [`message`]: everything that travels between gateways and agents; [`frame`]: its bytes.
//! * [`fleet`]: who exists, in which role, and who leads, as the planner says it.
//! * [`agent_status`], [`load`]: what an agent says about itself and about its experts.
//! * [`limits`]: bounds that both ends of a connection must agree on.

pub mod agent_status;
pub mod fleet;
pub mod frame;
#[doc(hidden)]
pub mod fuzzing;
pub mod generate;
pub mod ids;
pub mod limits;
pub mod load;
pub mod message;
pub mod time;

pub use self::ids::{AgentId, Attempt, Epoch, Generation, Rank, RankId, RequestId, SupernodeId};
pub use self::time::{Span, Time};
