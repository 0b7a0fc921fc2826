//! `deepinfer up` and the commands beside it as a user meets them: the real binary, real sockets, the shipped model
//! and the golden one.

mod expert_counts;
mod faults;
mod golden;
mod harness;
mod http;
mod life;
mod load;
mod openai_client;
mod refused;
mod scale;
