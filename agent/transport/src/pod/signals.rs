//! SIGTERM and Ctrl-C: the first asks for a clean end, the second for an end at once.

use tokio::signal::unix::{Signal, SignalKind, signal};

/// Signals that ask for the end.
#[derive(Debug)]
pub struct EndSignals {
    terminate: Signal,
    interrupt: Signal,
}

impl EndSignals {
    /// From now on they no longer end the process by themselves.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn new() -> std::io::Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    /// The next one. Safe to cancel.
    pub async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}
