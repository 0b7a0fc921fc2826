//! The gateway's machine with scripted agents.

mod admission;
mod flow;
mod scripted;
