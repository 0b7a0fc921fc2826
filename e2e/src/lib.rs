//! Checks over the whole workspace: the words "rule" in ARCHITECTURE.md are tests here.

pub mod tidy;
