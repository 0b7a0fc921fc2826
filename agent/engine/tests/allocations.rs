//! The steady state of decoding allocates nothing: not on the calling thread, not on the backend's.

mod support;

use std::alloc::System;

use deepinfer_engine::Numerics;
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
    // The counter counts.
    let region = Region::new(ALLOCATOR);
    std::thread::spawn(|| drop(vec![1u8; 1000])).join().unwrap();
    assert!(region.change().bytes_allocated >= 1000);
}
