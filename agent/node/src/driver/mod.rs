//! The one task that drives an agent's machines: everything that happens comes in here as an event and leaves as
//! an action. No request is decided here.
//!
//! ```text
//!  data port --PeerEvent--+                    +--> messages to peers, and to itself
//!  engines ----Output-----+--> Core (machines)-+--> commands and steps to engines
//!  fleet, clock, control -+                    +--> status, metrics, expert load
//! ```
//!
//! * `core.rs`: the state and its events; `view.rs`: how it is seen. * `machines.rs`: the worker or the ranks behind one face.
//!   * `leading.rs`: the leader, if the fleet names this agent. * `book.rs`: expert counts.

mod book;
mod core;
mod leading;
mod machines;
mod view;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use deepinfer_protocol::fleet::FleetView;
use deepinfer_transport::PeerEvent;
use tokio::sync::{mpsc, watch};
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

pub use self::book::{Book, LoadDetail};
pub use self::core::{Core, CoreSetup, hex};
pub use self::machines::Machines;
pub use self::view::UndrainTooLate;

use crate::engine::thread::Output;

/// Machines hear of time this often.
const TICK: Duration = Duration::from_millis(20);
/// Events taken at once before engines are looked after again.
const BATCH: usize = 256;

/// Where events come from.
pub struct Inputs {
    /// Of the data port.
    pub peers: mpsc::Receiver<PeerEvent>,
    /// Of the engines.
    pub outputs: mpsc::Receiver<Output>,
    /// Who exists.
    pub fleet: watch::Receiver<Arc<FleetView>>,
}

/// The core; never held across an await.
pub fn lock(core: &Mutex<Core>) -> MutexGuard<'_, Core> {
    // A panic inside is a bug that a test will find; the next event still finds machines in a state between two
    // events of theirs, which is better than an agent that answers nothing.
    core.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs until stopped.
pub async fn run(core: Arc<Mutex<Core>>, mut inputs: Inputs, stop: CancellationToken) {
    let mut ticks = tokio::time::interval(TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut peers = Vec::with_capacity(BATCH);
    let mut outputs = Vec::with_capacity(BATCH);
    let mut fleet_lives = true;
    let first = inputs.fleet.borrow_and_update().clone();
    lock(&core).on_fleet(first);
    loop {
        let (mut ticked, mut refleet) = (false, false);
        tokio::select! {
            () = stop.cancelled() => return,
            _ = inputs.peers.recv_many(&mut peers, BATCH) => {}
            _ = inputs.outputs.recv_many(&mut outputs, BATCH) => {}
            changed = inputs.fleet.changed(), if fleet_lives => match changed {
                Ok(()) => refleet = true,
                // Nobody tells any more: the last view stays.
                Err(_) => fleet_lives = false,
            },
            _ = ticks.tick() => ticked = true,
        }
        // Whatever else has come is taken in the same turn: one look at the engines for all of it.
        while peers.len() < BATCH
            && let Ok(event) = inputs.peers.try_recv()
        {
            peers.push(event);
        }
        while outputs.len() < BATCH
            && let Ok(output) = inputs.outputs.try_recv()
        {
            outputs.push(output);
        }
        let view = refleet.then(|| inputs.fleet.borrow_and_update().clone());
        let mut core = lock(&core);
        outputs.drain(..).for_each(|output| core.on_output(output));
        peers.drain(..).for_each(|event| core.on_peer(event));
        if let Some(view) = view {
            core.on_fleet(view);
        }
        if ticked {
            core.on_tick();
        }
        core.advance();
    }
}
