//! A rank that stops in the middle: the step ends on all of them, soon, and says why.

use std::time::Duration;

use deepinfer_engine::Numerics;
use deepinfer_engine::engine::StepError;
use deepinfer_engine::exchange::local::LocalEnd;
use deepinfer_engine::exchange::{Arrival, ExchangeError, ExpertExchange, Pick, SlotMap};
use deepinfer_serving::batch::StateSlot;

use crate::group::{Group, PATIENCE};
use crate::support::{Rig, Rng, checkpoint, cpu, options, same_bits};

/// What the faulty rank does.
#[derive(Clone, Copy)]
enum Fault {
    Panic,
    Abort,
    /// Waits until the others have given up.
    Hang,
}

/// An end whose rank 2 has a fault in some layer of some step.
struct Faulty {
    end: LocalEnd,
    fault: Fault,
    layers: usize,
}

impl ExpertExchange for Faulty {
    fn rank(&self) -> usize {
        self.end.rank()
    }
    fn ranks(&self) -> usize {
        self.end.ranks()
    }
    fn dispatch(
        &mut self,
        layer: usize,
        width: usize,
        rows: &[f32],
        picks: &[Pick],
    ) -> Result<(), ExchangeError> {
        self.end.dispatch(layer, width, rows, picks)
    }
    fn arrivals(&self) -> &[Arrival] {
        self.end.arrivals()
    }
    fn load(&mut self, first: usize, rows: &mut [f32]) -> Result<(), ExchangeError> {
        self.end.load(first, rows)
    }
    fn store(&mut self, first: usize, results: &[f32]) -> Result<(), ExchangeError> {
        self.end.store(first, results)
    }
    fn finish(&mut self) -> Result<(), ExchangeError> {
        let last = self.layers == 0;
        self.layers = self.layers.wrapping_sub(1);
        if last && self.rank() == 2 {
            match self.fault {
                Fault::Panic => panic!("injected"),
                Fault::Abort => self.end.aborter().abort("step hung"),
                Fault::Hang => {
                    while self.end.aborter().over().is_none() {
                        std::thread::yield_now();
                    }
                }
            }
        }
        self.end.finish()
    }
    fn collect(&mut self, sums: &mut [f32]) -> Result<(), ExchangeError> {
        self.end.collect(sums)
    }
}

/// Four ranks, of which 2 has a fault in the sixth layer of the third step; the group and what they heard.
fn group_with(fault: Fault, limit: Duration) -> (Group, Vec<Option<Result<(), StepError>>>) {
    let model = checkpoint("e2e/golden/tiny-quant");
    let layers = 2 * model.shape.num_hidden_layers + 5;
    let map = SlotMap::initial(&model.shape, 4, 0).unwrap();
    let options = options(Numerics::F32, 2, 128, 128);
    let wrap = |end| -> Box<dyn ExpertExchange> { Box::new(Faulty { end, fault, layers }) };
    let mut group = Group::with(&model, &options, map, limit, wrap);
    for turn in 0..3 {
        let batches: Vec<_> = (0..4)
            .map(|rank| {
                if rank == 1 {
                    return Vec::new();
                }
                vec![group.rigs[rank].sequence(0, turn * 5, &[7 + rank as u32; 5])]
            })
            .collect();
        let heard = group.try_step(&batches);
        if turn == 2 {
            return (group, heard);
        }
        assert!(heard.iter().all(|h| *h == Some(Ok(()))), "{heard:?}");
    }
    unreachable!("the third step returns")
}

#[test]
fn a_panic_in_one_rank_ends_the_step_on_all_ranks_and_their_sequences_can_be_retried() {
    let (mut group, heard) = group_with(Fault::Panic, PATIENCE);
    let gone = StepError::Exchange(ExchangeError::RankGone { rank: 2 });
    for rank in [0, 1, 3] {
        assert_eq!(heard[rank], Some(Err(gone.clone())), "rank {rank}");
    }
    assert_eq!(heard[2], None, "it panicked");
    for rank in [0, 3] {
        assert_eq!(group.rigs[rank].held(0), 0, "the sequence of the step is gone from its slot");
    }
    // The panic was caught, the engine still exists: it knows that it must not go on.
    let again = group.try_step(&vec![Vec::new(); 4]);
    assert_eq!(again[0], Some(Err(gone)));
    assert_eq!(again[2], Some(Err(StepError::Exchange(ExchangeError::Panicked))));
    // New engines over the same weights resume.
    let model = checkpoint("e2e/golden/tiny-quant");
    let tokens = Rng::new(3).tokens(20, model.shape.vocab_size);
    let mut fresh = Group::open(&model, &options(Numerics::F32, 2, 128, 128), 4, 0);
    let step = fresh.rigs[3].sequence(0, 0, &tokens);
    fresh.step(&[Vec::new(), Vec::new(), Vec::new(), vec![step]]);
    let want = Rig::open(cpu(), &model, options(Numerics::F32, 1, 128, 128)).extend(0, &tokens);
    same_bits("after the rebuild", &want, &fresh.rigs[3].out.logits);
}

#[test]
fn a_watchdog_can_end_the_step_on_all_ranks() {
    let (group, heard) = group_with(Fault::Abort, PATIENCE);
    let aborted = StepError::Exchange(ExchangeError::Aborted { reason: "step hung".to_string() });
    assert_eq!(heard, vec![Some(Err(aborted)); 4]);
    assert_eq!(group.rigs[2].engine.held(StateSlot(0)), 0);
}

#[test]
fn a_rank_that_hangs_is_named_after_the_time_limit() {
    let limit = Duration::from_secs(2);
    let (_, heard) = group_with(Fault::Hang, limit);
    let late = StepError::Exchange(ExchangeError::TimedOut { rank: 2, limit });
    assert_eq!(heard, vec![Some(Err(late)); 4]);
}

#[test]
fn idle_ranks_keep_step_with_one_that_works_and_nothing_hangs() {
    let model = checkpoint("e2e/golden/tiny-bf16");
    let steps = 300;
    let tokens = Rng::new(5).tokens(steps, model.shape.vocab_size);
    let mut group = Group::open(&model, &options(Numerics::F32, 1, steps, 64), 4, 0);
    // Every rank runs its steps without waiting for anybody but through the exchange.
    let counts = group.together(|rank, rig| {
        let mut rng = Rng::new(rank as u64);
        let mut arrived = 0u64;
        for (position, token) in tokens.iter().enumerate() {
            for _ in 0..rng.below(3) {
                std::thread::yield_now();
            }
            if rank == 0 {
                rig.run(0, position, &[*token]);
            } else {
                rig.step(Vec::new());
            }
            arrived += rig.out.arrivals.iter().map(|&n| u64::from(n)).sum::<u64>();
        }
        arrived
    });
    let total: u64 = counts.into_iter().map(|c| c.expect("no rank panics")).sum();
    assert_eq!(total, (steps * model.shape.num_hidden_layers * model.shape.num_experts_per_tok) as u64);
    let want = Rig::open(cpu(), &model, options(Numerics::F32, 1, steps, steps)).extend(0, &tokens);
    let vocab = model.shape.vocab_size;
    same_bits("the last token", &want[(steps - 1) * vocab..], &group.rigs[0].out.logits);
}
