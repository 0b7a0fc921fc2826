//! The task that owns the request records: sockets and handlers on the outside, one machine inside.
//!
//! ```text
//! handlers -- CoreInbox ------+                     +--> Transport::send
//! agents ---- PeerEvent ------+--> Gateway machine -+
//! FleetView, ticks -----------+                     +--> streams (stream.rs) --> handlers
//! ```
//!
//! Invariants: nothing about a request is decided here; a client that does not read holds up nobody else; every
//! request that came in is counted under one result, once.

mod records;
mod stream;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use deepinfer_protocol::fleet::FleetView;
use deepinfer_protocol::message::Peer;
use deepinfer_protocol::{AgentId, Span, Time};
use deepinfer_serving::gateway::GatewayOptions as RequestOptions;
use deepinfer_transport::{ClusterKey, PeerEvent, Transport, TransportOptions};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use self::records::Records;
use crate::core::{Arrival, CoreInbox, Left};
use crate::metrics::Metrics;
use crate::signals::{GatewayStatus, Recent};

/// Messages taken in one go before anything is handed on: their tokens travel together.
const BATCH: usize = 256;
/// The machine wants time to pass at least every 50 ms.
const TICK: Duration = Duration::from_millis(40);

/// What a driver is started with.
pub(crate) struct DriverOptions {
    /// The gateway's name among the agents.
    pub(crate) name: AgentId,
    /// The cluster's keys.
    pub(crate) key: ClusterKey,
    /// Limits of requests.
    pub(crate) requests: RequestOptions,
    /// As in [`crate::limits::EdgeLimits`].
    pub(crate) waiting_tokens: usize,
    /// As in [`crate::limits::EdgeLimits`].
    pub(crate) write_stall: Duration,
    /// Of heartbeats with agents.
    pub(crate) heartbeat: Span,
    /// Of them missed, until an agent is suspect.
    pub(crate) missed_heartbeats: u32,
}

/// What the driver lets others see.
#[derive(Debug, Default)]
struct Published {
    unready: Option<String>,
    status: GatewayStatus,
    recent: Recent,
}

#[derive(Debug)]
struct Shared {
    clock: Instant,
    published: Mutex<Published>,
    /// Set once: when what still runs is cancelled.
    shutdown: watch::Sender<Option<Time>>,
    stop: CancellationToken,
}

/// The others' end of the driver. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct DriverControl {
    shared: Arc<Shared>,
}

impl DriverControl {
    /// Why a request would not be served now.
    pub(crate) fn unready_reason(&self) -> Option<String> {
        self.with(|published| published.unready.clone())
    }

    /// Everything but name, readiness and uptime.
    pub(crate) fn status(&self) -> GatewayStatus {
        let now = now(self.shared.clock);
        self.with(|published| {
            let ttft = published.recent.digest(now);
            let tokens_per_second = published.recent.tokens_per_second(now);
            GatewayStatus { ttft, tokens_per_second, ..published.status.clone() }
        })
    }

    /// Admits nothing more; what runs after `deadline` is cancelled.
    pub(crate) fn shut_down(&self, deadline: Duration) {
        self.shared.shutdown.send_replace(Some(now(self.shared.clock) + Span::from(deadline)));
    }

    /// Ends the task.
    pub(crate) fn stop(&self) {
        self.shared.stop.cancel();
    }

    fn with<T>(&self, read: impl FnOnce(&mut Published) -> T) -> T {
        read(&mut self.shared.published.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

fn now(clock: Instant) -> Time {
    Time(Span::from(clock.elapsed()).0)
}

/// A random number for this process, so that ids of requests never repeat after a restart.
///
/// # Panics
/// If the operating system gives no random bytes.
pub(crate) fn process_number() -> u64 {
    getrandom::u64().expect("the operating system has random bytes")
}

/// Starts the driver's task.
pub(crate) fn spawn(
    options: DriverOptions,
    inbox: CoreInbox,
    fleet: watch::Receiver<Arc<FleetView>>,
    metrics: Arc<Metrics>,
) -> (DriverControl, JoinHandle<()>) {
    let transport_options = TransportOptions {
        heartbeat: options.heartbeat,
        missed: options.missed_heartbeats,
        process: inbox.process(),
        ..TransportOptions::new(options.name, Peer::Gateway, options.key)
    };
    let (transport, peers) = Transport::start(transport_options, None);
    let unready = Some("no fleet view has come yet".to_owned());
    let shared = Arc::new(Shared {
        clock: Instant::now(),
        published: Mutex::new(Published { unready, ..Published::default() }),
        shutdown: watch::Sender::new(None),
        stop: CancellationToken::new(),
    });
    let records = Records::new(
        options.requests,
        transport,
        metrics,
        options.waiting_tokens,
        options.write_stall.into(),
    );
    let driver = Driver { records, inbox, peers, shared: Arc::clone(&shared), left: Vec::new() };
    (DriverControl { shared }, tokio::spawn(driver.run(fleet)))
}

struct Driver {
    records: Records,
    inbox: CoreInbox,
    peers: mpsc::Receiver<PeerEvent>,
    shared: Arc<Shared>,
    left: Vec<Left>,
}

impl Driver {
    async fn run(mut self, fleet: watch::Receiver<Arc<FleetView>>) {
        self.serve(fleet).await;
        self.records.close().await;
    }

    async fn serve(&mut self, mut fleet: watch::Receiver<Arc<FleetView>>) {
        let mut tick = interval(TICK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let shared = Arc::clone(&self.shared);
        let mut shutdown = shared.shutdown.subscribe();
        let mut batch = Vec::with_capacity(BATCH);
        let mut followed = true;
        self.records.follow(self.now(), &fleet.borrow_and_update().clone());
        loop {
            tokio::select! {
                () = shared.stop.cancelled() => return,
                count = self.peers.recv_many(&mut batch, BATCH) => {
                    if count == 0 {
                        tracing::error!("the connections' task has ended: the gateway cannot go on");
                        return;
                    }
                }
                arrival = self.inbox.arrival() => match arrival {
                    Arrival::Request(submitted) => {
                        let now = self.now();
                        self.records.submit(now, *submitted);
                    }
                    Arrival::Left => {}
                    Arrival::Closed => return,
                },
                changed = fleet.changed(), if followed => {
                    followed = changed.is_ok();
                    let view = fleet.borrow_and_update().clone();
                    self.records.follow(self.now(), &view);
                }
                Ok(()) = shutdown.changed() => {
                    if let Some(deadline) = *shutdown.borrow_and_update() {
                        self.records.shut_down(self.now(), deadline);
                    }
                }
                _ = tick.tick() => {
                    let now = self.now();
                    self.records.tick(now);
                }
            }
            self.catch_up(&mut batch);
        }
    }

    /// Everything that is ready by now, then one hand-over to the streams.
    fn catch_up(&mut self, batch: &mut Vec<PeerEvent>) {
        let now = self.now();
        for event in batch.drain(..) {
            self.records.peer(now, event);
        }
        for _ in 0..BATCH {
            let Some(submitted) = self.inbox.try_next() else { break };
            self.records.submit(now, submitted);
        }
        self.inbox.take_left(&mut self.left);
        for left in self.left.drain(..) {
            self.records.leave(now, left);
        }
        self.records.flush(now);
        self.publish();
    }

    fn publish(&mut self) {
        let mut published = self.shared.published.lock().unwrap_or_else(PoisonError::into_inner);
        let published = &mut *published;
        self.records.publish(&mut published.status, &mut published.recent);
        if let Some(unready) = self.records.take_readiness() {
            self.inbox.set_ready(unready.is_none());
            if unready != published.unready {
                match &unready {
                    Some(reason) => tracing::warn!(reason, "the gateway is not ready"),
                    None => tracing::info!("the gateway is ready"),
                }
            }
            published.unready = unready;
        }
    }

    fn now(&self) -> Time {
        now(self.shared.clock)
    }
}
