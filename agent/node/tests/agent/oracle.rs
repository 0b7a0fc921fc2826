//! What an engine alone says: the answer that every agent must give, whatever happens to it.

use std::path::PathBuf;
use std::sync::OnceLock;

use deepinfer_engine::sampler::Sampler;
use deepinfer_engine::{Checkpoint, Engine, EngineOptions};
use deepinfer_kernels::Cpu;
use deepinfer_protocol::generate::GenerateSpec;
use deepinfer_serving::batch::{BlockId, SequenceStep, StateSlot, StepBatch, StepOutput};
use deepinfer_serving::node::Sample;

pub fn checkpoint_dir() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../examples/models/tiny-v41")
}

pub fn checkpoint() -> &'static Checkpoint {
    static CHECKPOINT: OnceLock<Checkpoint> = OnceLock::new();
    CHECKPOINT.get_or_init(|| Checkpoint::open(&checkpoint_dir()).unwrap())
}

/// A prompt of plausible ids: the model's own special tokens stay out.
pub fn prompt(length: usize, variant: u32) -> Vec<u32> {
    (0..length as u32).map(|i| 100 + (i * 37 + variant * 911 + i * i % 53) % 2900).collect()
}

pub fn spec(max_tokens: u32) -> GenerateSpec {
    GenerateSpec {
        temperature: 0.0,
        top_p: 1.0,
        seed: 7,
        max_tokens,
        min_tokens: 0,
        stop_tokens: Vec::new(),
        logprobs: None,
    }
}

/// The tokens that an engine alone gives, without stop tokens.
pub fn alone(prompt: &[u32], spec: &GenerateSpec) -> Vec<u32> {
    let options = EngineOptions { max_rows: 512, ..EngineOptions::default() };
    let mut engine = Engine::open(Cpu::new(1), checkpoint(), options).unwrap();
    let mut tokens = prompt.to_vec();
    let (mut held, mut out, mut sampler) = (0, StepOutput::default(), Sampler::default());
    while tokens.len() < prompt.len() + spec.max_tokens as usize {
        let end = tokens.len().min(held + 512);
        let blocks = (0..end.div_ceil(128) as u32).map(BlockId).collect();
        let step = SequenceStep::text(StateSlot(0), held, tokens[held..end].to_vec(), blocks);
        engine.execute(&StepBatch { sequences: vec![step] }, &mut out).unwrap();
        held = end;
        if held == tokens.len() {
            let sample = Sample {
                temperature: spec.temperature,
                top_p: spec.top_p,
                seed: spec.seed,
                position: tokens.len() as u64,
                logprobs: None,
                forbidden: Vec::new(),
            };
            tokens.push(sampler.token(out.row(0, 0), &sample).id);
        }
    }
    tokens.split_off(prompt.len())
}
