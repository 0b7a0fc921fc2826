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
#[cfg(test)]
mod tests;
mod window;

use std::fmt;

use deepinfer_kernels::{Backend, WeightFormat, WeightInfo};
use deepinfer_serving::batch::{
    DraftOutput, DraftRequest, RowRange, SequenceStep, StateSlot, StepBatch, StepOutput,
};

pub use self::error::{OpenError, StepError};
pub use self::options::{BoundarySwa, EngineOptions, Truncation};
pub use self::window::IMAGE_POSITION;
pub use crate::cache::{WindowState, WindowStateError};
pub use crate::numerics::Numerics;

use self::memory_plan::MemoryPlan;
use crate::cache::{Caches, Geometry, Histories, Slot};
use crate::engram::Hasher;
use crate::memory::{self, Allocator};
use crate::model::Constants;
use crate::model::draft::{DraftBlock, DraftPlan};
use crate::model::forward::Pass;
use crate::model::plan::{PlanContext, SequencePlan, StepPlan};
use crate::model::rope::Frequencies;
use crate::model::weights::{LayerWeights, Weights};
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
}

impl<B: Backend> Engine<B> {
    /// Opens a model. Weights stay where the checkpoint has them if the backend reads host memory.
    ///
    /// # Errors
    /// If an option is out of range or not supported by the shape, if caches and buffers do not fit into the
    /// memory that is left (nothing is allocated then), or if tokenizer.json does not give the n-gram
    /// vocabulary.
    pub fn open(backend: B, checkpoint: &Checkpoint, options: EngineOptions) -> Result<Self, OpenError> {
        let shape = &checkpoint.shape;
        let geometry = Geometry::of(shape);
        options.check(shape, geometry.ring)?;
        let numerics = options.numerics_of(shape);
        let plan = MemoryPlan::new(shape, &geometry, numerics, &options);
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
        let weights = Weights::load(&backend, checkpoint);
        check_experts(&weights, numerics)?;
        let (caches, workspace) = plan.build(&mut Allocator::new(&backend));
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
    /// If the batch cannot run; then no state and not `out` has changed.
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
        self.check(batch)?;
        for step in &batch.sequences {
            self.enter(step);
        }
        let (slots, context) = (&self.slots, &self.context);
        let full = self.options.boundary_swa == BoundarySwa::Full;
        let sequences =
            batch.sequences.iter().map(|step| sequence_plan(&slots[step.slot.0 as usize], step, full));
        self.plan.build(context, batch, sequences, &mut self.histories);
        self.compute(batch, out, probe);
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
    fn compute(&mut self, batch: &StepBatch, out: &mut StepOutput, probe: Option<&mut Probe>) {
        let shape = &self.constants.shape;
        let plan = &self.plan;
        out.vocab_size = shape.vocab_size;
        out.slots_per_layer = shape.n_routed_experts;
        out.logits.clear();
        out.ranges.clear();
        out.arrivals.clear();
        out.arrivals.resize(shape.num_hidden_layers * shape.n_routed_experts, 0);
        let mut first = 0;
        for &len in &plan.logit_counts {
            out.ranges.push(RowRange { first, len });
            first += len;
        }
        if plan.tokens.is_empty() {
            return;
        }
        let mut pass = Pass {
            backend: &self.backend,
            constants: &self.constants,
            caches: &mut self.caches,
            ws: &mut self.workspace,
            rows: plan.tokens.len(),
            probe,
        };
        if pass.backbone(&self.weights, plan, batch, &mut out.arrivals) {
            pass.logits(&self.weights.norm, &self.weights.head, &plan.logit_rows, &mut out.logits);
        }
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

/// The picked experts of a layer share one flag for rounding.
fn check_experts<B: Backend>(weights: &Weights<B>, numerics: Numerics) -> Result<(), OpenError> {
    let rounds = |w: &B::Weight| matches!(w.format(), WeightFormat::Fp8 | WeightFormat::Fp4);
    let mixed = |layer: &&LayerWeights<B>| {
        let mut all = layer.moe.experts.slots.iter().flat_map(|e| [&e.w1, &e.w3, &e.w2]).map(rounds);
        let first = all.next();
        all.any(|r| Some(r) != first)
    };
    let drafts = weights.draft.iter().flat_map(|d| &d.layers);
    let layers: Vec<String> =
        weights.layers.iter().chain(drafts).filter(mixed).map(|l| l.number.to_string()).collect();
    if numerics == Numerics::F32 || layers.is_empty() {
        return Ok(());
    }
    Err(OpenError::Unsupported(vec![format!(
        "quantized numerics with some experts of one layer in FP4 and some not (layers {})",
        layers.join(", ")
    )]))
}
