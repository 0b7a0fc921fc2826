//! The steady state of decoding allocates nothing: not on the calling thread, not on the backend's, not in an
//! exchange with other ranks.

mod support;

use std::alloc::System;
use std::sync::{Arc, Barrier};
use std::time::Duration;

use deepinfer_engine::exchange::local::LocalExchange;
use deepinfer_engine::exchange::{RankSetup, SlotMap};
use deepinfer_engine::{Engine, Numerics};
use deepinfer_kernels::Cpu;
use deepinfer_serving::batch::{Logits, StepBatch};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};
use support::{Rig, Rng, checkpoint, cpu, options};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Steps before counting: the workspace grows to its size.
const WARM_UP: usize = 8;
/// Counted steps: enough to complete groups, cross a block and wrap every ring.
const COUNTED: usize = 80;
const PROMPT: usize = 100;

// One test: another one running beside it would be counted too.
#[test]
fn decode_steps_of_one_and_of_four_sequences_allocate_nothing() {
    for path in ["e2e/golden/tiny-bf16", "e2e/golden/tiny-quant", "examples/models/tiny-v41"] {
        let model = checkpoint(path);
        for numerics in [Numerics::F32, Numerics::Quantized] {
            for batch_size in [1, 4] {
                let mut rng = Rng::new(71);
                let positions = PROMPT + WARM_UP + COUNTED;
                let mut rig = Rig::open(cpu(), &model, options(numerics, batch_size, positions, 4 * PROMPT));
                for slot in 0..batch_size {
                    let prompt = rng.tokens(PROMPT, model.shape.vocab_size);
                    rig.extend(slot, &prompt);
                }
                let mut steps: Vec<StepBatch> = (0..WARM_UP + COUNTED)
                    .map(|step| StepBatch {
                        sequences: (0..batch_size)
                            .map(|slot| {
                                let token = rng.tokens(1, model.shape.vocab_size);
                                let mut sequence = rig.sequence(slot, PROMPT + step, &token);
                                sequence.logits = Logits::Last;
                                sequence
                            })
                            .collect(),
                    })
                    .collect();
                let counted = steps.split_off(WARM_UP);
                for step in &steps {
                    rig.engine.execute(step, &mut rig.out).unwrap();
                }
                let region = Region::new(ALLOCATOR);
                for step in &counted {
                    rig.engine.execute(step, &mut rig.out).unwrap();
                }
                let change = region.change();
                let what = format!("{path}, {numerics}, batch {batch_size}: {change:?}");
                assert_eq!(change.allocations + change.reallocations, 0, "{what}");
                assert_eq!(change.deallocations, 0, "{what}");
            }
        }
    }
    ranks_allocate_nothing_after_a_warm_up();
    // The counter counts.
    let region = Region::new(ALLOCATOR);
    std::thread::spawn(|| drop(vec![1u8; 1000])).join().unwrap();
    assert!(region.change().bytes_allocated >= 1000);
}

/// Three ranks that decode together on threads of their own; one of them is idle.
fn ranks_allocate_nothing_after_a_warm_up() {
    let model = checkpoint("e2e/golden/tiny-quant");
    let map = Arc::new(SlotMap::initial(&model.shape, 3, 1).expect("three ranks fit"));
    let ends = LocalExchange::new(3, Duration::from_secs(120));
    let barrier = Barrier::new(3);
    std::thread::scope(|scope| {
        for (rank, end) in ends.into_iter().enumerate() {
            let (model, map, barrier) = (&model, map.clone(), &barrier);
            scope.spawn(move || {
                let positions = PROMPT + WARM_UP + COUNTED;
                let options = options(Numerics::Quantized, 1, positions, positions);
                let setup = RankSetup { map, exchange: Box::new(end) };
                // One thread each: a worker that comes late to every warm-up step grows its scratch later.
                let engine = Engine::open_rank(Cpu::new(1), model, options, setup).expect("the rank opens");
                let mut rig = Rig::around(engine);
                // As a serving rank does it: more rows and positions than the decode steps below have.
                rig.engine.warm_up(positions).expect("all slots are empty");
                let prompt = StepBatch { sequences: vec![rig.sequence(0, 0, &[9; PROMPT])] };
                rig.engine.execute(&prompt, &mut rig.out).expect("the prompt runs");
                let mut steps: Vec<StepBatch> = (0..WARM_UP + COUNTED)
                    .map(|at| match rank {
                        2 => StepBatch::default(),
                        _ => StepBatch { sequences: vec![rig.sequence(0, PROMPT + at, &[7 + rank as u32])] },
                    })
                    .collect();
                let counted = steps.split_off(WARM_UP);
                for step in &steps {
                    rig.engine.execute(step, &mut rig.out).expect("the step runs");
                }
                barrier.wait();
                let region = Region::new(ALLOCATOR);
                for step in &counted {
                    rig.engine.execute(step, &mut rig.out).expect("the step runs");
                }
                barrier.wait();
                let change = region.change();
                // Nobody allocates an error message before all have counted.
                barrier.wait();
                assert_eq!(change.allocations + change.reallocations, 0, "rank {rank}: {change:?}");
            });
        }
    });
}
