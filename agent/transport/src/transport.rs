//! Connections to all peers: who dials, who accepts, and which connection of a pair counts.
//!
//! Between agents the one with the smaller name dials, gateways dial agents. Of two connections of one pair the
//! newest wins: the older one belongs to a process that is gone or to a path that broke.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use deepinfer_protocol::AgentId;
use deepinfer_protocol::message::{Message, Peer};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, mpsc};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::handshake::{self, HandshakeError, Remote};
use crate::link::{self, Link, Pulse};
use crate::queue::PushError;
use crate::{PeerEvent, TransportOptions, jittered};

/// Events that wait for the driver. While it is full nothing more is read from sockets.
const MAX_WAITING_EVENTS: usize = 1024;
/// Connections that may be in their handshake at once; more are closed at once, so that strangers cannot pile up.
const MAX_HANDSHAKES: usize = 256;
/// First and longest pause before dialing again.
const BACK_OFF: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));
/// A connection that lasted this long was a good one: the pause starts from the beginning.
const GOOD_AFTER: Duration = Duration::from_secs(1);
/// Longest wait for a TCP connection.
const CONNECT_DEADLINE: Duration = Duration::from_secs(2);
/// Pause after the system refused to accept (too many open files).
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Connections to all peers. Cheap to clone; dropping the last one closes everything.
#[derive(Clone, Debug)]
pub struct Transport(Arc<Owner>);

#[derive(Debug)]
struct Owner(Arc<Shared>);

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.root.cancel();
    }
}

#[derive(Debug)]
struct Shared {
    options: TransportOptions,
    root: CancellationToken,
    tasks: TaskTracker,
    runtime: Handle,
    events: mpsc::Sender<PeerEvent>,
    links: RwLock<BTreeMap<AgentId, Arc<Link>>>,
    dials: Mutex<BTreeMap<AgentId, Dial>>,
}

#[derive(Debug)]
struct Dial {
    address: SocketAddr,
    stop: CancellationToken,
}

impl Transport {
    /// Starts: accepts on `listener` if there is one. Events come over a bounded channel; while it is full nothing
    /// more is read from sockets.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub fn start(
        options: TransportOptions,
        listener: Option<TcpListener>,
    ) -> (Self, mpsc::Receiver<PeerEvent>) {
        let (events, receiver) = tokio::sync::mpsc::channel(MAX_WAITING_EVENTS);
        let shared = Arc::new(Shared {
            options,
            root: CancellationToken::new(),
            tasks: TaskTracker::new(),
            runtime: Handle::current(),
            events,
            links: RwLock::default(),
            dials: Mutex::default(),
        });
        if let Some(listener) = listener {
            shared.spawn(accept_all(shared.clone(), listener));
        }
        (Self(Arc::new(Owner(shared))), receiver)
    }

    /// Keeps connections to these peers open, with back-off; connections to others that this side opened are closed.
    /// Peers that dial this side (agents with a smaller name) may be in the list; they are waited for.
    pub fn set_peers(&self, peers: &[(AgentId, SocketAddr)]) {
        let shared = &self.0.0;
        let wanted: BTreeMap<&AgentId, SocketAddr> =
            peers.iter().filter(|(name, _)| shared.dials_to(name)).map(|(name, at)| (name, *at)).collect();
        let mut dials = shared.dials();
        dials.retain(|name, dial| {
            let stays = wanted.get(name) == Some(&dial.address);
            if !stays {
                dial.stop.cancel();
            }
            stays
        });
        for (name, address) in wanted {
            if dials.contains_key(name) {
                continue;
            }
            let stop = shared.root.child_token();
            dials.insert(name.clone(), Dial { address, stop: stop.clone() });
            shared.spawn(keep_open(shared.clone(), name.clone(), address, stop));
        }
    }

    /// Queues a message. `false`: not connected, or its queue is full (then the connection is closed: a peer that
    /// does not read is as good as gone).
    pub fn send(&self, to: &AgentId, message: &Message, payload: Arc<[u8]>) -> bool {
        let links = self.0.0.links.read().unwrap_or_else(PoisonError::into_inner);
        let Some(link) = links.get(to) else {
            return false;
        };
        match link.queue.push(message, &payload) {
            Ok(wake) => {
                if wake {
                    link.wake.notify_one();
                }
                !link.closed.is_cancelled()
            }
            Err(PushError::Full) => {
                tracing::warn!(peer = %to, "the peer does not read, its connection is closed");
                link.closed.cancel();
                false
            }
            Err(PushError::Frame(error)) => {
                tracing::error!(peer = %to, %error, "a message that cannot be sent");
                false
            }
        }
    }

    /// Names of the peers with an open connection, ascending.
    pub fn connected(&self) -> Vec<AgentId> {
        self.0.0.links.read().unwrap_or_else(PoisonError::into_inner).keys().cloned().collect()
    }

    /// Tasks that run for this transport, for metrics and leak tests.
    pub fn tasks(&self) -> usize {
        self.0.0.tasks.len()
    }

    /// Waits until what was queued is written, at most this long, then closes everything.
    pub async fn close(&self, flush: Duration) {
        let shared = &self.0.0;
        let idle = async {
            while !shared.links.read().unwrap_or_else(PoisonError::into_inner).values().all(|l| l.idle()) {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        let _ = tokio::time::timeout(flush, idle).await;
        shared.root.cancel();
        shared.tasks.close();
        // Tasks end by the token; a driver that no longer reads events must not keep them.
        let _ = tokio::time::timeout(HANDS_OFF, shared.tasks.wait()).await;
    }
}

/// Longest wait for tasks after everything was told to close.
const HANDS_OFF: Duration = Duration::from_secs(1);

impl Shared {
    fn spawn(self: &Arc<Self>, task: impl Future<Output = ()> + Send + 'static) {
        let root = self.root.clone();
        self.tasks.spawn_on(
            async move {
                tokio::select! {
                    () = root.cancelled() => {}
                    () = task => {}
                }
            },
            &self.runtime,
        );
    }

    fn dials(&self) -> MutexGuard<'_, BTreeMap<AgentId, Dial>> {
        self.dials.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether this side opens the connection to that agent.
    fn dials_to(&self, name: &AgentId) -> bool {
        match self.options.peer {
            Peer::Gateway => true,
            Peer::Agent => self.options.name < *name,
        }
    }

    fn own(&self) -> Remote {
        let TransportOptions { name, peer, process, .. } = &self.options;
        Remote { name: name.clone(), peer: *peer, process: Some(*process) }
    }

    /// Runs an open connection until it ends; an older one of the same peer ends first.
    async fn run(&self, stream: TcpStream, remote: &Remote, early: Vec<u8>, parent: &CancellationToken) {
        let link = Arc::new(Link::new(parent));
        let older = {
            let mut links = self.links.write().unwrap_or_else(PoisonError::into_inner);
            links.insert(remote.name.clone(), link.clone())
        };
        if let Some(older) = older {
            older.closed.cancel();
            older.finished.cancelled().await;
        }
        let pulse = Pulse { interval: self.options.heartbeat.into(), missed: self.options.missed };
        link::run(&link, remote, stream.into_split(), early, &self.events, pulse).await;
        let mut links = self.links.write().unwrap_or_else(PoisonError::into_inner);
        if links.get(&remote.name).is_some_and(|current| Arc::ptr_eq(current, &link)) {
            links.remove(&remote.name);
        }
    }
}

async fn accept_all(shared: Arc<Shared>, listener: TcpListener) {
    let handshakes = Arc::new(Semaphore::new(MAX_HANDSHAKES));
    loop {
        let (mut stream, address) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "data port: cannot accept");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let Ok(permit) = handshakes.clone().try_acquire_owned() else {
            continue;
        };
        let inner = shared.clone();
        shared.spawn(async move {
            let _ = stream.set_nodelay(true);
            let opened = handshake::accept(&mut stream, &inner.options.name, &inner.options.key).await;
            drop(permit);
            match opened {
                Ok((remote, early)) => {
                    let root = inner.root.clone();
                    inner.run(stream, &remote, early, &root).await;
                }
                Err(error) => tracing::warn!(%address, %error, "data port: a connection was not opened"),
            }
        });
    }
}

/// Dials again and again until told to stop.
async fn keep_open(shared: Arc<Shared>, name: AgentId, address: SocketAddr, stop: CancellationToken) {
    let mut pause = BACK_OFF.0;
    let mut said = String::new();
    loop {
        let begun = tokio::time::Instant::now();
        tokio::select! {
            () = stop.cancelled() => return,
            opened = open(&shared, &name, address) => match opened {
                Ok((stream, early)) => {
                    said.clear();
                    let remote = Remote { name: name.clone(), peer: Peer::Agent, process: None };
                    shared.run(stream, &remote, early, &stop).await;
                }
                Err(error) => {
                    // One line for each new reason, not one for each try.
                    let text = error.to_string();
                    if text != said {
                        tracing::warn!(peer = %name, %address, error = %text, "cannot connect, trying again");
                        said = text;
                    }
                }
            }
        }
        if stop.is_cancelled() {
            return;
        }
        if begun.elapsed() >= GOOD_AFTER {
            pause = BACK_OFF.0;
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(jittered(pause)) => {}
        }
        pause = (pause * 2).min(BACK_OFF.1);
    }
}

async fn open(
    shared: &Shared,
    name: &AgentId,
    address: SocketAddr,
) -> Result<(TcpStream, Vec<u8>), HandshakeError> {
    let connect = tokio::time::timeout(CONNECT_DEADLINE, TcpStream::connect(address));
    let mut stream = connect.await.map_err(|_| HandshakeError::TooSlow)??;
    stream.set_nodelay(true)?;
    let early = handshake::dial(&mut stream, &shared.own(), name, &shared.options.key).await?;
    Ok((stream, early))
}
