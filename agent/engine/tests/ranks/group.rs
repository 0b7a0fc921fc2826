//! Engines of a supernode that step together, each on a thread of its own.

// Every test binary uses its own part of this.
#![allow(dead_code)]

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use deepinfer_engine::engine::StepError;
use deepinfer_engine::exchange::local::{LocalEnd, LocalExchange};
use deepinfer_engine::exchange::{ExpertExchange, RankSetup, SlotMap};
use deepinfer_engine::{Checkpoint, Engine, EngineOptions};
use deepinfer_kernels::Cpu;
use deepinfer_serving::batch::{SequenceStep, StepBatch};

use crate::support::Rig;

/// Longer than any layer on any machine.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// All ranks of a supernode.
pub struct Group {
    pub rigs: Vec<Rig<Cpu>>,
    pub map: Arc<SlotMap>,
}

impl Group {
    /// Ranks with the layout of a new supernode.
    pub fn open(model: &Checkpoint, options: &EngineOptions, ranks: usize, extra: usize) -> Self {
        let map = SlotMap::initial(&model.shape, ranks, extra).unwrap_or_else(|e| panic!("{e}"));
        Self::with(model, options, map, PATIENCE, |end| Box::new(end))
    }

    /// Ranks with any layout; `wrap` may put something around each end.
    pub fn with(
        model: &Checkpoint,
        options: &EngineOptions,
        map: SlotMap,
        limit: Duration,
        wrap: impl Fn(LocalEnd) -> Box<dyn ExpertExchange>,
    ) -> Self {
        let map = Arc::new(map);
        let ends = LocalExchange::new(map.ranks(), limit);
        let open = |end| {
            let setup = RankSetup { map: map.clone(), exchange: wrap(end) };
            let engine = Engine::open_rank(Cpu::new(1), model, options.clone(), setup);
            Rig::around(engine.unwrap_or_else(|e| panic!("{e}")))
        };
        Self { rigs: ends.into_iter().map(open).collect(), map }
    }

    /// Lets every rank do something at the same time; `None` for one that panicked.
    pub fn together<T: Send>(&mut self, run: impl Fn(usize, &mut Rig<Cpu>) -> T + Sync) -> Vec<Option<T>> {
        thread::scope(|scope| {
            let run = &run;
            let threads: Vec<_> = self
                .rigs
                .iter_mut()
                .enumerate()
                .map(|(rank, rig)| scope.spawn(move || run(rank, rig)))
                .collect();
            threads.into_iter().map(|thread| thread.join().ok()).collect()
        })
    }

    /// One step of all ranks, each with its sequences; what each heard. `None`: it panicked.
    pub fn try_step(&mut self, batches: &[Vec<SequenceStep>]) -> Vec<Option<Result<(), StepError>>> {
        self.together(|rank, rig| {
            let batch = StepBatch { sequences: batches[rank].clone() };
            rig.engine.execute(&batch, &mut rig.out)
        })
    }

    /// A step that works on all ranks.
    pub fn step(&mut self, batches: &[Vec<SequenceStep>]) {
        for (rank, result) in self.try_step(batches).into_iter().enumerate() {
            result.expect("no rank panics").unwrap_or_else(|e| panic!("rank {rank}: {e}"));
        }
    }

    /// Adds the last step's arrivals to counts by layer and logical expert.
    pub fn fold(&self, counts: &mut [Vec<u32>]) {
        for rig in &self.rigs {
            let slots = rig.out.slots_per_layer;
            // A first batch that was refused left the output empty.
            if slots == 0 {
                continue;
            }
            assert_eq!(slots, self.map.slots_per_rank());
            for (layer, arrivals) in rig.out.arrivals.chunks(slots).enumerate() {
                for (count, expert) in arrivals.iter().zip(rig.engine.slot_experts(layer)) {
                    counts[layer][*expert as usize] += count;
                }
            }
        }
    }
}

/// No counts.
pub fn no_counts(model: &Checkpoint) -> Vec<Vec<u32>> {
    vec![vec![0; model.shape.n_routed_experts]; model.shape.num_hidden_layers]
}
