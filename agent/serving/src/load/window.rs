//! Counts of one rank: the open window, and everything since the start.

use std::sync::Arc;

use deepinfer_protocol::load::WINDOW_STEPS;
use deepinfer_protocol::{Generation, Rank, Span};

use super::{LoadError, LoadShape, SlotMap, expect, window_of};

/// A step that ran, as a rank counts it.
#[derive(Clone, Copy, Debug)]
pub struct CountedStep<'a> {
    /// Its number: of the supernode, equal on all ranks; of the engine for a prefill worker.
    pub step: u64,
    /// Rows of requests that this rank brought; a rank without work brings none and still receives arrivals.
    pub rows: u32,
    /// Arrivals by layer and local slot, `[layers][slots]`, from the rows of all ranks.
    pub arrivals: &'a [u32],
    /// The map that was in force.
    pub map: &'a Arc<SlotMap>,
    /// How long the step took.
    pub elapsed: Span,
    /// The step ran for no request: it is not counted.
    pub warm_up: bool,
}

#[derive(Clone, Debug)]
pub(super) struct StepRecord {
    pub(super) step: u64,
    pub(super) rows: u32,
    pub(super) arrivals: Box<[u32]>,
    pub(super) map: Arc<SlotMap>,
}

impl StepRecord {
    /// Tokens that the rank received in a layer.
    pub(super) fn load(&self, layer: usize) -> u64 {
        let slots = self.map.slots();
        self.arrivals[layer * slots..(layer + 1) * slots].iter().map(|&n| u64::from(n)).sum()
    }
}

/// Up to 100 steps of one rank, with every step's arrivals and map.
#[derive(Clone, Debug)]
pub struct RankWindow {
    rank: Rank,
    window: u64,
    pub(super) steps: Vec<StepRecord>,
    busy: Span,
}

impl RankWindow {
    /// Whose.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// Its number.
    pub fn window(&self) -> u64 {
        self.window
    }

    /// Rows that the rank brought.
    pub fn rows(&self) -> u64 {
        self.steps.iter().map(|s| u64::from(s.rows)).sum()
    }

    /// Time spent in its steps.
    pub fn busy(&self) -> Span {
        self.busy
    }

    /// (token, choice) pairs that arrived.
    pub fn arrived(&self) -> u64 {
        self.steps.iter().flat_map(|s| s.arrivals.iter()).map(|&n| u64::from(n)).sum()
    }

    /// Adds the counts of all steps to `counts`, `[layers][experts]`.
    pub(super) fn fold(&self, counts: &mut [u64]) {
        for step in &self.steps {
            step.map.fold(&step.arrivals, counts).expect("shapes were checked when the step was counted");
        }
    }

    fn is_full(&self) -> bool {
        self.steps.last().is_some_and(|s| s.step % u64::from(WINDOW_STEPS) == u64::from(WINDOW_STEPS) - 1)
    }
}

/// Counts of one rank. Outlives its engine: a replaced engine goes on with the same counter.
#[derive(Clone, Debug)]
pub struct RankCounter {
    rank: Rank,
    shape: LoadShape,
    open: Option<RankWindow>,
    last: Option<u64>,
    placement: Generation,
    counts: Vec<u64>,
    arrived: u64,
    rows: u64,
    steps: u64,
    busy: Span,
}

impl RankCounter {
    /// All counts are 0.
    pub fn new(rank: Rank, shape: LoadShape) -> Self {
        Self {
            rank,
            shape,
            open: None,
            last: None,
            placement: Generation::default(),
            counts: vec![0; shape.cells()],
            arrived: 0,
            rows: 0,
            steps: 0,
            busy: Span::ZERO,
        }
    }

    /// Counts a step. Gives a window when it closes: after its last step, or when a step of a later one comes.
    ///
    /// # Errors
    /// [`LoadError`]; then nothing was counted.
    pub fn record(&mut self, step: &CountedStep<'_>) -> Result<Option<RankWindow>, LoadError> {
        if step.warm_up {
            return Ok(None);
        }
        if let Some(last) = self.last.filter(|&last| step.step <= last) {
            return Err(LoadError::Repeated { step: step.step, last });
        }
        expect("experts of the slot map", step.map.experts as usize, self.shape.experts as usize)?;
        expect("arrivals", step.arrivals.len(), self.shape.layers * step.map.slots())?;
        step.map.fold(step.arrivals, &mut self.counts)?;
        self.last = Some(step.step);
        self.placement = step.map.placement();
        self.arrived += step.arrivals.iter().map(|&n| u64::from(n)).sum::<u64>();
        self.rows += u64::from(step.rows);
        self.steps += 1;
        self.busy = self.busy.plus(step.elapsed);

        let window = window_of(step.step);
        let mut closed = self.open.take_if(|open| open.window != window);
        let open = self.open.get_or_insert_with(|| RankWindow {
            rank: self.rank,
            window,
            steps: Vec::with_capacity(WINDOW_STEPS as usize),
            busy: Span::ZERO,
        });
        open.busy = open.busy.plus(step.elapsed);
        open.steps.push(StepRecord {
            step: step.step,
            rows: step.rows,
            arrivals: step.arrivals.into(),
            map: Arc::clone(step.map),
        });
        // After skipped steps two windows may end at once: then the second one closes with the next step.
        if closed.is_none() && open.is_full() {
            closed = self.open.take();
        }
        Ok(closed)
    }

    /// Whose counts.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// The window that is not closed yet, if it has any step.
    pub fn open(&self) -> Option<&RankWindow> {
        self.open.as_ref()
    }

    /// Counts since the start, `[layers][experts]`.
    pub fn counts(&self) -> &[u64] {
        &self.counts
    }

    /// (token, choice) pairs that arrived since the start.
    pub fn arrived(&self) -> u64 {
        self.arrived
    }

    /// Rows that the rank brought since the start.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Steps counted since the start.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Time spent in steps since the start.
    pub fn busy(&self) -> Span {
        self.busy
    }

    /// Placement of the last step.
    pub fn placement(&self) -> Generation {
        self.placement
    }
}
