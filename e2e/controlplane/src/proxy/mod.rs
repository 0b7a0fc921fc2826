//! A reverse proxy in front of the API server: it writes down what passes and does harm when told to.
//!
//! ```text
//!   client -- HTTP --> proxy -- TLS --> API server
//!                        |
//!             book: verb, kind, name, status, bytes, time of each request
//!             faults: refuse, drop, lose the answer, stay silent, delay, cut watches (seeded)
//!             holds: the n-th write stands still until the test has killed the client
//!             black hole: no bytes and no reset on any connection
//! ```
//!
//! Tokens pass through, so the server's RBAC is what is tested; watches stream through. Replicas of an operator that
//! are to be hurt one by one get a proxy each.

mod asked;
mod book;
mod faults;
mod hold;
mod hole;
mod on;
mod relay;
mod serve;
mod upstream;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

pub use self::asked::{Asked, Verb};
pub use self::book::{Counts, Entry};
pub use self::faults::{Cut, Fault, FaultId, What, Which};
pub use self::hold::{Held, When};
pub use self::on::{On, fits};

use self::hole::{Gated, Hole};
use self::serve::{Shared, serve};
use self::upstream::Upstream;

/// Pause after the system refused to accept a connection (too many open files).
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// A running proxy; it ends when it is dropped, and with it all connections through it.
pub struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
    hole: Arc<Hole>,
    stop: CancellationToken,
}

impl Proxy {
    /// Listens on loopback, on a free port, in front of `upstream` (`https://host:port`). `ca_pem` is the authority that
    /// signed the server's certificate; nobody asks for it if the URL says `http`.
    ///
    /// # Errors
    /// The URL or the authority cannot be read, or there is no port.
    pub async fn start(upstream: &str, ca_pem: &[u8], seed: u64) -> Result<Self> {
        let shared = Arc::new(Shared::new(Upstream::new(upstream, ca_pem)?, seed));
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.context("no port for the proxy")?;
        let address = listener.local_addr()?;
        let (hole, stop) = (Arc::new(Hole::default()), CancellationToken::new());
        tokio::spawn(accept(listener, shared.clone(), hole.clone(), stop.clone()));
        Ok(Self { address, shared, hole, stop })
    }

    /// Where clients find the API server.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Does harm from now on.
    pub fn inject(&self, on: On, which: Which, what: What) -> FaultId {
        self.shared.state().rules.add(Fault { on, which, what })
    }

    /// Ends a fault.
    pub fn remove(&self, id: FaultId) {
        self.shared.state().rules.remove(id);
    }

    /// How many requests a fault has matched, and how many of these it has hit.
    pub fn figures(&self, id: FaultId) -> (u64, u64) {
        self.shared.state().rules.figures(id)
    }

    /// Ends all faults, forgets all holds and closes the black hole; the book stays.
    pub fn heal(&self) {
        self.black_hole(false);
        let mut state = self.shared.state();
        state.rules.clear();
        state.holds.clear();
    }

    /// Holds the `n`-th matching request from now on, counted from 1.
    pub fn hold(&self, on: On, n: u64, when: When) -> Held {
        self.shared.state().holds.add(on, n, when)
    }

    /// Ends the open watches that match; gives how many there were.
    pub fn cut_watches(&self, on: &On, how: Cut) -> usize {
        self.shared.state().cut_watches(on, how)
    }

    /// The open watches that match.
    pub fn watches(&self, on: &On) -> Vec<Asked> {
        let state = self.shared.state();
        state.watches.values().map(|(asked, _)| asked).filter(|asked| on.matches(asked)).cloned().collect()
    }

    /// From now on no byte passes and no connection is reset, until it is switched off again.
    pub fn black_hole(&self, on: bool) {
        self.hole.set(on);
    }

    /// Requests since the last [`reset`](Self::reset), by verb and kind. Exact, however many there were.
    pub fn counts(&self) -> Counts {
        self.shared.state().book.totals()
    }

    /// How many requests match, of the last 100,000.
    pub fn count(&self, on: &On) -> u64 {
        self.shared.state().book.count(on)
    }

    /// The requests that match, of the last 100,000, oldest first.
    pub fn log(&self, on: &On) -> Vec<Entry> {
        self.shared.state().book.matching(on)
    }

    /// Forgets what has passed; faults and holds stay.
    pub fn reset(&self) {
        self.shared.state().book.clear();
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>, hole: Arc<Hole>, stop: CancellationToken) {
    loop {
        let accepted = tokio::select! {
            () = stop.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, _)) => {
                let connection = connection(stream, shared.clone(), hole.clone());
                let stop = stop.clone();
                tokio::spawn(async move { stop.run_until_cancelled(connection).await });
            }
            Err(error) => {
                tracing::warn!(%error, "the proxy cannot accept");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

async fn connection(stream: TcpStream, shared: Arc<Shared>, hole: Arc<Hole>) {
    let _ = stream.set_nodelay(true);
    let service = service_fn(move |request| serve(shared.clone(), request));
    let served = http1::Builder::new().serve_connection(TokioIo::new(Gated { stream, hole }), service);
    if let Err(error) = served.await {
        tracing::debug!(%error, "a connection through the proxy ended");
    }
}
