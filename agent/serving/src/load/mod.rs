//! Which experts the tokens chose: exact counts, folded from the slots where they arrived.
//!
//! Every rank has a [`RankCounter`]. It closes a [`RankWindow`] every 100 steps of the supernode; index 0 gives
//! the windows of all ranks to its [`LoadLedger`], which sums them into reports. Where a supernode has several agents,
//! each with engines of its own, index 0 asks the others and puts the reports together ([`sum_of_agents`]).
//!
//! ```text
//!   engine: arrivals[layer][slot] --> RankCounter --(window)--> LoadLedger --> ExpertLoadReport
//!                       map of the step: slot -> expert
//! ```
//!
//! Invariant: counts are of rows that belong to requests. Padding and warm-up are not among them, so the counts of
//! all ranks add up to layers x top-k x rows.

mod balance;
mod ledger;
mod supernode;
mod window;

use deepinfer_protocol::Generation;
use deepinfer_protocol::load::WINDOW_STEPS;
use thiserror::Error;

pub use self::balance::BalanceSum;
pub use self::ledger::{Detail, LoadLedger, LoadSource};
pub use self::supernode::sum_of_agents;
pub use self::window::{CountedStep, RankCounter, RankWindow};

/// The window that a step belongs to; windows of all ranks of a supernode have the same borders.
pub const fn window_of(step: u64) -> u64 {
    step / WINDOW_STEPS as u64
}

/// Why counts were not taken.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum LoadError {
    /// A map names an expert that the model does not have.
    #[error("slot map: layer {layer} slot {slot} holds expert {expert}, the model has {experts}")]
    NoSuchExpert {
        /// Layer of the map.
        layer: usize,
        /// Slot of the layer.
        slot: usize,
        /// What it names.
        expert: u32,
        /// Experts of a layer.
        experts: u32,
    },
    /// A map whose layers have different numbers of slots.
    #[error("slot map: layer {layer} has {slots} slots, layer 0 has {first}")]
    Uneven {
        /// Layer of the map.
        layer: usize,
        /// Its slots.
        slots: usize,
        /// Slots of the first layer.
        first: usize,
    },
    /// Arrivals or a map of another shape than the counter's.
    #[error("{what}: {found}, expected {expected}")]
    Shape {
        /// Which size.
        what: &'static str,
        /// What came.
        found: usize,
        /// What fits.
        expected: usize,
    },
    /// A step that was counted already.
    #[error("step {step} comes after step {last}: it was counted already")]
    Repeated {
        /// The step.
        step: u64,
        /// The last one counted.
        last: u64,
    },
}

/// What is counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadShape {
    /// Backbone layers; draft layers are not counted.
    pub layers: usize,
    /// Logical experts of a layer.
    pub experts: u32,
    /// Experts that each row chooses.
    pub top_k: u32,
}

impl LoadShape {
    /// Cells of a table of counts.
    pub fn cells(&self) -> usize {
        self.layers * self.experts as usize
    }
}

/// Which logical expert each slot of a rank holds, by layer, under one placement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotMap {
    placement: Generation,
    experts: u32,
    slots: usize,
    logical: Vec<u32>,
}

impl SlotMap {
    /// The map `[layers][slots]` of a model with `experts` logical experts a layer.
    ///
    /// # Errors
    /// [`LoadError::NoSuchExpert`], [`LoadError::Uneven`].
    pub fn new(placement: Generation, experts: u32, layers: &[Vec<u32>]) -> Result<Self, LoadError> {
        let slots = layers.first().map_or(0, Vec::len);
        for (layer, row) in layers.iter().enumerate() {
            if row.len() != slots {
                return Err(LoadError::Uneven { layer, slots: row.len(), first: slots });
            }
            if let Some((slot, &expert)) = row.iter().enumerate().find(|&(_, &e)| e >= experts) {
                return Err(LoadError::NoSuchExpert { layer, slot, expert, experts });
            }
        }
        Ok(Self { placement, experts, slots, logical: layers.concat() })
    }

    /// The placement that it belongs to.
    pub fn placement(&self) -> Generation {
        self.placement
    }

    /// Slots of a layer.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// Adds arrivals, `[layers][slots]`, to counts, `[layers][experts]`.
    ///
    /// # Errors
    /// [`LoadError::Shape`]; then nothing was added.
    pub fn fold(&self, arrivals: &[u32], counts: &mut [u64]) -> Result<(), LoadError> {
        expect("arrivals", arrivals.len(), self.logical.len())?;
        let experts = self.experts as usize;
        let layers = self.logical.len().checked_div(self.slots).unwrap_or(0);
        expect("counts", counts.len(), layers * experts)?;
        for (i, (&arrived, &expert)) in arrivals.iter().zip(&self.logical).enumerate() {
            counts[i / self.slots * experts + expert as usize] += u64::from(arrived);
        }
        Ok(())
    }
}

fn expect(what: &'static str, found: usize, expected: usize) -> Result<(), LoadError> {
    if found == expected { Ok(()) } else { Err(LoadError::Shape { what, found, expected }) }
}
