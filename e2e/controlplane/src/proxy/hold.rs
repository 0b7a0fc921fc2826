//! Stopping time at one request: the n-th that matches is held, before it is forwarded or before it is answered, until
//! the test lets it go.

use std::time::Duration;

use anyhow::{Context as _, Result};
use tokio::sync::oneshot;

use super::asked::Asked;
use super::on::On;

/// Where a request is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// It has not reached the server; if its sender dies now, it never will.
    Before,
    /// The server has done it; its sender does not know.
    After,
}

/// Holds that wait for their request.
#[derive(Default)]
pub(super) struct Holds(Vec<Waiting>);

struct Waiting {
    on: On,
    left: u64,
    stop: Stop,
}

/// The place where a request stops.
pub(super) struct Stop {
    pub(super) when: When,
    reached: oneshot::Sender<Asked>,
    release: oneshot::Receiver<()>,
}

impl Stop {
    /// Tells the test, and waits until it lets go or forgets.
    pub(super) async fn hold(self, asked: &Asked) {
        if self.reached.send(asked.clone()).is_ok() {
            let _ = self.release.await;
        }
    }
}

impl Holds {
    /// Waits for the `n`-th request that matches from now on, counted from 1.
    pub(super) fn add(&mut self, on: On, n: u64, when: When) -> Held {
        let (reached, at) = oneshot::channel();
        let (let_go, release) = oneshot::channel();
        self.0.push(Waiting { on, left: n.max(1), stop: Stop { when, reached, release } });
        Held { at, let_go }
    }

    /// Counts a request; gives the place where it stops, if it does.
    pub(super) fn take(&mut self, asked: &Asked) -> Option<Stop> {
        self.0.retain(|waiting| !waiting.stop.reached.is_closed());
        let mut found = None;
        for (at, waiting) in self.0.iter_mut().enumerate() {
            if waiting.on.matches(asked) {
                waiting.left -= 1;
                if waiting.left == 0 && found.is_none() {
                    found = Some(at);
                }
                // A second hold at the same request waits for the next one.
                waiting.left = waiting.left.max(1);
            }
        }
        found.map(|at| self.0.remove(at).stop)
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}

/// A test's hand on a request. Dropped, it lets go.
pub struct Held {
    at: oneshot::Receiver<Asked>,
    let_go: oneshot::Sender<()>,
}

impl Held {
    /// Waits until the request is held.
    ///
    /// # Errors
    /// It did not come in this time.
    pub async fn reached(&mut self, within: Duration) -> Result<Asked> {
        let asked = tokio::time::timeout(within, &mut self.at).await;
        asked
            .context("the request that is to be held did not come in time")?
            .context("the proxy forgot a hold")
    }

    /// Lets the request go on.
    pub fn release(self) {
        let _ = self.let_go.send(());
    }
}
