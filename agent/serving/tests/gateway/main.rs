//! The gateway's machine with scripted agents.

mod admission;
mod flow;
mod rebuilt;
mod scripted;
