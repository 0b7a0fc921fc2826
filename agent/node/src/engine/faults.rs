//! Faults on request (`POST /v1/fault`, only with `--fault-injection`): a step that panics, hangs or is slow.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// What happens at the next step of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fault {
    /// The step panics.
    PanicAtNextStep,
    /// The step does not begin for so many milliseconds.
    HangNextStepMs(u64),
    /// Every step takes this many milliseconds longer; 0 ends it.
    SlowMs(u64),
}

/// Faults waiting for ranks.
#[derive(Debug, Default)]
pub struct Faults(Mutex<BTreeMap<usize, Planned>>);

#[derive(Clone, Copy, Debug, Default)]
struct Planned {
    next: Option<Fault>,
    slow: Duration,
}

impl Faults {
    /// Plans a fault for a rank of this agent.
    pub fn plan(&self, rank: usize, fault: Fault) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let planned = all.entry(rank).or_default();
        match fault {
            Fault::SlowMs(ms) => planned.slow = Duration::from_millis(ms),
            other => planned.next = Some(other),
        }
    }

    /// Called by a rank before a step.
    ///
    /// # Panics
    /// If that was asked for.
    pub fn strike(&self, rank: usize) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(planned) = all.get_mut(&rank) else { return };
        let (next, slow) = (planned.next.take(), planned.slow);
        drop(all);
        match next {
            Some(Fault::PanicAtNextStep) => panic!("fault injection: rank {rank} panics"),
            Some(Fault::HangNextStepMs(ms)) => std::thread::sleep(Duration::from_millis(ms)),
            _ => {}
        }
        if !slow.is_zero() {
            std::thread::sleep(slow);
        }
    }
}
