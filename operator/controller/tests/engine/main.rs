//! The reconcile engine against a real API server: the same objects as in memory, one leader, nobody's object touched.

mod agrees;
mod bed;
mod careful;
mod leading;
