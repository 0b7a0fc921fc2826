//! The engine: a model with its caches, running one step at a time.
//!
//! A step is planned on the host (`model/plan.rs`), then computed (`model/forward.rs`); between two steps the
//! engine knows of a sequence only the bytes in its slot and blocks and how many positions they cover. What a
//! step computes for a sequence does not depend on the other sequences, on how the tokens were cut into
//! steps, or on drafts that were rejected: on the cpu backend not in a single bit.

mod check;
mod error;
mod memory_plan;
mod options;
mod pieces;
mod rank;
#[cfg(test)]
mod tests;
mod warm_up;
mod window;

use std::fmt;
use std::sync::Arc;

use deepinfer_kernels::{Backend, WeightFormat};
use deepinfer_serving::batch::{
    DraftOutput, DraftRequest, RowRange, SequenceStep, StateSlot, StepBatch, StepOutput,
};

pub use self::error::{OpenError, StepError};
pub use self::options::{BoundarySwa, EngineOptions, Truncation};
pub use self::window::IMAGE_POSITION;
pub use crate::cache::{BlockError, WindowState, WindowStateError};
pub use crate::numerics::Numerics;

use self::memory_plan::{Memory, MemoryPlan};
use self::rank::Membership;
use crate::cache::{Caches, Geometry, Histories, Slot};
use crate::engram::Hasher;
use crate::exchange::{ExchangeError, RankSetup, SlotMap};
use crate::memory::{self, Allocator};
use crate::model::Constants;
use crate::model::draft::{DraftBlock, DraftPlan};
use crate::model::forward::Pass;
use crate::model::plan::{PlanContext, SequencePlan, StepPlan};
use crate::model::rope::Frequencies;
use crate::model::spread::Spread;
use crate::model::weights::Weights;
use crate::model::workspace::Workspace;
use crate::record::Probe;
use crate::shape::ModelShape;
use crate::weights::Checkpoint;

/// A model ready to run.
pub struct Engine<B: Backend> {
    backend: B,
    options: EngineOptions,
    constants: Constants,
    context: PlanContext,
    weights: Weights<B>,
    caches: Caches<B>,
    workspace: Workspace<B>,
    histories: Histories,
    slots: Vec<Slot>,
    plan: StepPlan,
    draft_plan: DraftPlan,
    draft_blocks: Vec<DraftBlock>,
    allocated: u64,
    /// Which experts this engine holds.
    map: Arc<SlotMap>,
    rank: usize,
    membership: Membership<B>,
    /// Arrivals of other ranks' rows that no output has shown yet, `[layers, slots]`.
    unreported: Vec<u32>,
}

impl<B: Backend> Engine<B> {
    /// Opens a model. Weights stay where the checkpoint has them if the backend reads host memory.
    ///
    /// # Errors
    /// If an option is out of range or not supported by the shape, if caches and buffers do not fit into the
    /// memory that is left (nothing is allocated then), or if tokenizer.json does not give the n-gram
    /// vocabulary.
    pub fn open(backend: B, checkpoint: &Checkpoint, options: EngineOptions) -> Result<Self, OpenError> {
        Self::open_member(backend, checkpoint, options, None)
    }

    /// Opens a rank of a supernode: it holds the experts that `setup.map` gives it and exchanges rows with the
    /// other ranks in every backbone layer of every step. So all ranks run the same number of steps, one
    /// without work an empty batch; a batch that is refused takes part as an empty one.
    ///
    /// # Errors
    /// As for [`Engine::open`], and if the map or the exchange is not of this model.
    pub fn open_rank(
        backend: B,
        checkpoint: &Checkpoint,
        options: EngineOptions,
        setup: RankSetup,
    ) -> Result<Self, OpenError> {
        rank::check_setup(&setup, &checkpoint.shape)?;
        Self::open_member(backend, checkpoint, options, Some(setup))
    }

    fn open_member(
        backend: B,
        checkpoint: &Checkpoint,
        options: EngineOptions,
        setup: Option<RankSetup>,
    ) -> Result<Self, OpenError> {
        let shape = &checkpoint.shape;
        let geometry = Geometry::of(shape);
        options.check(shape, geometry.ring)?;
        let numerics = options.numerics_of(shape);
        let plan = MemoryPlan::new(shape, &geometry, numerics, &options, setup.is_some());
        let needed = plan.bytes(&backend);
        if let Some(available) = memory::available().filter(|&available| available < needed) {
            return Err(OpenError::Memory {
                needed,
                available,
                blocks: options.blocks,
                slots: options.slots,
                max_rows: options.max_rows,
            });
        }
        let hasher = match checkpoint.token_map()? {
            Some(map) => Some(Hasher::new(shape, map)?),
            None => None,
        };
        let (map, rank) = rank::place(setup.as_ref(), shape)?;
        check_experts(checkpoint, numerics)?;
        let weights = Weights::load(&backend, checkpoint, &map, rank);
        let Memory { caches, workspace, spread } = plan.build(&mut Allocator::new(&backend));
        let truncated = options.truncation != Truncation::Off;
        let boundary = shape.first_consumer().filter(|_| truncated);
        let (reach, slack) = (plan.reach(), geometry.slack);
        let context = PlanContext {
            frequencies: Frequencies::of(shape),
            hidden: shape.hidden_size,
            compact: options.truncation == Truncation::Compact,
            hasher,
            geometry: geometry.clone(),
        };
        let engram_layers = shape.engram.as_ref().map_or(0, |e| e.layer_ids.len());
        Ok(Self {
            constants: Constants::new(shape, &geometry, numerics, boundary),
            weights,
            caches,
            workspace,
            histories: Histories::new(options.slots, reach, slack),
            slots: vec![Slot::default(); options.slots],
            plan: StepPlan::new(&context, engram_layers, plan.capacity),
            draft_plan: DraftPlan::default(),
            draft_blocks: Vec::new(),
            allocated: needed,
            context,
            options,
            backend,
            membership: Membership::new(
                setup.zip(spread).map(|(setup, buffers)| Spread::new(setup, buffers)),
            ),
            unreported: Vec::new(),
            map,
            rank,
        })
    }

    /// Sizes of the model.
    pub fn shape(&self) -> &ModelShape {
        &self.constants.shape
    }

    /// How activations and caches are rounded.
    pub fn numerics(&self) -> Numerics {
        self.constants.numerics
    }

    /// How the engine was opened.
    pub fn options(&self) -> &EngineOptions {
        &self.options
    }

    /// The backend.
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// Bytes of caches and buffers, weights not included.
    pub fn allocated_bytes(&self) -> u64 {
        self.allocated
    }

    /// Tokens that can be forgotten after a step, see [`Engine::truncate`].
    pub fn slack(&self) -> usize {
        self.context.geometry.slack
    }

    /// Runs a step: prefill chunks and decode rows together.
    ///
    /// With consumer truncation only the kept rows of a prompt return logits, whatever was asked for.
    ///
    /// # Errors
    /// If the batch cannot run; then no state and not `out` has changed. Only [`StepError::Exchange`] resets
    /// the batch's sequences: the step ended on all ranks, and no other can follow.
    pub fn execute(&mut self, batch: &StepBatch, out: &mut StepOutput) -> Result<(), StepError> {
        self.run(batch, out, None)
    }

    /// Like [`Engine::execute`], and records intermediate values. The batch should have one sequence.
    ///
    /// # Errors
    /// As for [`Engine::execute`].
    ///
    /// # Panics
    /// If an input that the probe forces does not have the step's rows.
    pub fn execute_probed(
        &mut self,
        batch: &StepBatch,
        out: &mut StepOutput,
        probe: &mut Probe,
    ) -> Result<(), StepError> {
        self.run(batch, out, Some(probe))
    }

    fn run(
        &mut self,
        batch: &StepBatch,
        out: &mut StepOutput,
        probe: Option<&mut Probe>,
    ) -> Result<(), StepError> {
        if let Err(refused) = self.check(batch) {
            self.attend()?;
            return Err(refused);
        }
        for step in &batch.sequences {
            self.enter(step);
        }
        let (slots, context) = (&self.slots, &self.context);
        let full = self.options.boundary_swa == BoundarySwa::Full;
        let sequences =
            batch.sequences.iter().map(|step| sequence_plan(&slots[step.slot.0 as usize], step, full));
        self.plan.build(context, batch, sequences, &mut self.histories);
        if let Err(ended) = self.compute(batch, out, probe) {
            // Rows of some layers are written and of others not.
            batch.sequences.iter().for_each(|step| self.reset(step.slot));
            return Err(ended.into());
        }
        for step in &batch.sequences {
            self.slots[step.slot.0 as usize].extend(step.end());
        }
        Ok(())
    }

    /// Brings a slot to where its step begins.
    fn enter(&mut self, step: &SequenceStep) {
        let keep = self.options.keep_of(&self.constants.shape);
        let slot = &mut self.slots[step.slot.0 as usize];
        if step.start < slot.held || step.start == 0 {
            slot.cut(step.start);
        }
        if let Some(prompt) = step.prompt_tokens.filter(|_| self.constants.boundary.is_some()) {
            slot.consumer_from = slot.consumer_from.max(prompt.saturating_sub(keep));
        }
    }

    /// Computes the planned step.
    fn compute(
        &mut self,
        batch: &StepBatch,
        out: &mut StepOutput,
        probe: Option<&mut Probe>,
    ) -> Result<(), ExchangeError> {
        let shape = &self.constants.shape;
        let plan = &self.plan;
        out.vocab_size = shape.vocab_size;
        out.slots_per_layer = self.map.slots_per_rank();
        out.logits.clear();
        out.ranges.clear();
        out.arrivals.clear();
        out.arrivals.append(&mut self.unreported);
        out.arrivals.resize(shape.num_hidden_layers * out.slots_per_layer, 0);
        let mut first = 0;
        for &len in &plan.logit_counts {
            out.ranges.push(RowRange { first, len });
            first += len;
        }
        // Taken out while the step runs: a panic drops it, and so ends the step on the other ranks.
        let mut membership = self.membership.take()?;
        if plan.tokens.is_empty() && membership.is_alone() {
            self.membership = membership;
            return Ok(());
        }
        let mut pass = Pass {
            backend: &self.backend,
            constants: &self.constants,
            caches: &mut self.caches,
            ws: &mut self.workspace,
            rows: plan.tokens.len(),
            spread: membership.spread(),
            probe,
        };
        match pass.backbone(&self.weights, plan, batch, &mut out.arrivals) {
            Ok(true) => {
                pass.logits(&self.weights.norm, &self.weights.head, &plan.logit_rows, &mut out.logits);
            }
            Ok(false) => {}
            Err(ended) => {
                self.membership = Membership::Over(ended.clone());
                return Err(ended);
            }
        }
        self.membership = membership;
        Ok(())
    }

    /// Proposes a block of tokens after each request's token, greedily. Changes no state.
    ///
    /// # Errors
    /// [`StepError::NoDraftLayers`], [`StepError::NoSlot`], [`StepError::BadToken`].
    pub fn draft(&mut self, requests: &[DraftRequest], out: &mut Vec<DraftOutput>) -> Result<(), StepError> {
        self.check_drafts(requests)?;
        let (block, noise) = match &self.constants.shape.draft {
            Some(draft) => (draft.block_size, draft.noise_token_id),
            None => return Err(StepError::NoDraftLayers),
        };
        out.resize_with(requests.len(), DraftOutput::default);
        let together = (self.workspace.rows / block).min(self.options.slots);
        for (requests, out) in requests.chunks(together).zip(out.chunks_mut(together)) {
            let slots = &self.slots;
            self.draft_blocks.clear();
            self.draft_blocks.extend(requests.iter().map(|request| DraftBlock {
                slot: request.slot.0 as usize,
                state: slots[request.slot.0 as usize],
                token: request.token,
            }));
            self.draft_plan.build(&self.context, block, noise, &self.draft_blocks);
            let mut pass = Pass {
                backend: &self.backend,
                constants: &self.constants,
                caches: &mut self.caches,
                ws: &mut self.workspace,
                rows: requests.len() * block,
                spread: None,
                probe: None,
            };
            pass.draft(&self.weights, &mut self.draft_plan, out);
        }
        Ok(())
    }

    /// Positions that a slot holds; 0 for a slot that does not exist.
    pub fn held(&self, slot: StateSlot) -> usize {
        self.slots.get(slot.0 as usize).map_or(0, |s| s.held)
    }

    /// Forgets all positions from `tokens` on: rejected drafts. At most [`Engine::slack`] positions below the
    /// highest one that was run, or all of them.
    ///
    /// # Errors
    /// [`StepError::NoSlot`], [`StepError::NotHeld`] if the slot holds fewer, [`StepError::RollbackTooDeep`].
    pub fn truncate(&mut self, slot: StateSlot, tokens: usize) -> Result<(), StepError> {
        let held = self.slot(slot)?.held;
        if tokens > held {
            return Err(StepError::NotHeld { slot: slot.0, position: tokens, held });
        }
        self.check_cut(slot, tokens)?;
        if tokens < held {
            self.slots[slot.0 as usize].cut(tokens);
        }
        Ok(())
    }

    /// Empties a slot; nothing happens for one that does not exist.
    pub fn reset(&mut self, slot: StateSlot) {
        if let Some(slot) = self.slots.get_mut(slot.0 as usize) {
            *slot = Slot::default();
        }
    }

    /// First position that the boundary layer may see.
    fn boundary_from(&self, slot: &Slot) -> usize {
        match self.options.boundary_swa {
            BoundarySwa::Truncated => slot.consumer_from,
            BoundarySwa::Full => slot.window_from,
        }
    }
}

impl<B: Backend> fmt::Debug for Engine<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine")
            .field("backend", &self.backend.name())
            .field("numerics", &self.constants.numerics)
            .field("options", &self.options)
            .field("allocated", &self.allocated)
            .finish_non_exhaustive()
    }
}

/// What a step does with a sequence whose slot stands where the step begins.
fn sequence_plan(slot: &Slot, step: &SequenceStep, boundary_full: bool) -> SequencePlan {
    SequencePlan {
        slot: step.slot.0 as usize,
        start: step.start,
        end: step.end(),
        window_from: slot.window_from,
        boundary_from: if boundary_full { slot.window_from } else { slot.consumer_from },
        consumer_from: slot.consumer_from,
        replay: step.replay,
    }
}

/// The picked experts of a layer share one flag for rounding, on whichever ranks they are.
fn check_experts(checkpoint: &Checkpoint, numerics: Numerics) -> Result<(), OpenError> {
    let shape = &checkpoint.shape;
    let mixed = |layer: &usize| {
        let p = shape.layer_prefix(*layer);
        let mut rounds =
            (0..shape.experts(*layer)).flat_map(|e| ["w1", "w3", "w2"].map(|w| (e, w))).map(|(e, w)| {
                let format = checkpoint.format(&format!("{p}ffn.experts.{e}.{w}.weight"));
                matches!(format, WeightFormat::Fp8 | WeightFormat::Fp4)
            });
        let first = rounds.next();
        rounds.any(|r| Some(r) != first)
    };
    if numerics == Numerics::F32 {
        return Ok(());
    }
    let layers: Vec<String> = (0..shape.total_layers()).filter(mixed).map(|l| l.to_string()).collect();
    if layers.is_empty() {
        return Ok(());
    }
    Err(OpenError::Unsupported(vec![format!(
        "quantized numerics with some experts of one layer in FP4 and some not (layers {})",
        layers.join(", ")
    )]))
}
