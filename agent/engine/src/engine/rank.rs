//! An engine as one rank of a supernode: which experts it holds, and its end of the exchange.

use std::mem;
use std::sync::Arc;

use deepinfer_kernels::Backend;
use deepinfer_serving::batch::{StepBatch, StepOutput};

use super::Engine;
use super::error::OpenError;
use crate::exchange::{ExchangeError, RankSetup, SlotMap};
use crate::model::spread::Spread;
use crate::shape::ModelShape;

/// Whether the experts are spread over ranks.
pub(super) enum Membership<B: Backend> {
    /// All experts are here.
    Alone,
    /// One of several ranks.
    Member(Box<Spread<B>>),
    /// It was; a step failed.
    Over(ExchangeError),
}

impl<B: Backend> Membership<B> {
    pub fn new(spread: Option<Spread<B>>) -> Self {
        spread.map_or(Membership::Alone, |spread| Membership::Member(Box::new(spread)))
    }

    pub fn is_alone(&self) -> bool {
        matches!(self, Membership::Alone)
    }

    pub fn spread(&mut self) -> Option<&mut Spread<B>> {
        match self {
            Membership::Member(spread) => Some(spread),
            _ => None,
        }
    }

    /// Takes it for a step. It must be put back; what stays says that it was not.
    pub fn take(&mut self) -> Result<Self, ExchangeError> {
        match self {
            Membership::Alone => Ok(Membership::Alone),
            Membership::Member(_) => Ok(mem::replace(self, Membership::Over(ExchangeError::Panicked))),
            Membership::Over(ended) => Err(ended.clone()),
        }
    }
}

impl<B: Backend> Engine<B> {
    /// Which experts each rank holds; of an engine alone: all, in order.
    pub fn slot_map(&self) -> &Arc<SlotMap> {
        &self.map
    }

    /// Logical expert of each local slot of a backbone layer, in the order of a step's arrivals.
    ///
    /// # Panics
    /// If there is no such layer.
    pub fn slot_experts(&self, layer: usize) -> &[u32] {
        self.map.local(layer, self.rank)
    }

    /// Serves the other ranks in a step that runs nothing here. What arrives is shown by the next output.
    pub(super) fn attend(&mut self) -> Result<(), ExchangeError> {
        if self.membership.is_alone() {
            return Ok(());
        }
        let (batch, mut out) = (StepBatch::default(), StepOutput::default());
        self.plan.build(&self.context, &batch, std::iter::empty(), &mut self.histories);
        self.compute(&batch, &mut out, None)?;
        self.unreported = out.arrivals;
        Ok(())
    }
}

/// Whether a place in a supernode fits a model.
pub(super) fn check_setup(setup: &RankSetup, shape: &ModelShape) -> Result<(), OpenError> {
    let RankSetup { map, exchange } = setup;
    let (experts, layers) = (shape.n_routed_experts, shape.num_hidden_layers);
    if (map.experts(), map.layers()) != (experts, layers) {
        return Err(OpenError::SlotMap(format!(
            "{} experts in {} layers, the model has {experts} in {layers}",
            map.experts(),
            map.layers()
        )));
    }
    if (map.ranks(), true) != (exchange.ranks(), exchange.rank() < map.ranks()) {
        return Err(OpenError::SlotMap(format!(
            "{} ranks, the exchange has {} and this is rank {}",
            map.ranks(),
            exchange.ranks(),
            exchange.rank()
        )));
    }
    Ok(())
}

/// The map and the rank of an engine; alone it holds all experts in order.
pub(super) fn place(
    setup: Option<&RankSetup>,
    shape: &ModelShape,
) -> Result<(Arc<SlotMap>, usize), OpenError> {
    match setup {
        Some(setup) => Ok((setup.map.clone(), setup.exchange.rank())),
        None => match SlotMap::initial(shape, 1, 0) {
            Ok(map) => Ok((Arc::new(map), 0)),
            Err(error) => Err(OpenError::SlotMap(error.to_string())),
        },
    }
}
