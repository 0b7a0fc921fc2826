//! Models of random shapes: cut anywhere, a text gives the same bits; `cpu` computes what `reference` computes.
//!
//! Deterministic: the same models in every run. `PROPTEST_CASES=500` makes it a long search.

// Helpers of tests unwrap like tests; the lint knows functions marked as tests only.
#![allow(clippy::unwrap_used)]

#[path = "../ranks/group.rs"]
mod group;
#[path = "../support/mod.rs"]
mod support;

mod ranks;
mod shapes;
mod states;

use deepinfer_engine::record::{Probe, Recorded};
use deepinfer_engine::{Checkpoint, Numerics, random};
use deepinfer_kernels::{Backend, Cpu, Reference};
use deepinfer_serving::batch::StepBatch;
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestRng, TestRunner};
use support::{Rig, Rng, bits, options};

/// Models of each property.
const CASES: u32 = 96;
/// Tokens of a text: more than any window here, not a multiple of any ratio.
const TOKENS: usize = 45;
/// Absolute error of an activation; grows with values above this magnitude.
const TOLERANCE: f32 = 2e-4;
const MAGNITUDE: f32 = 40.0;

/// Runs a property over `cases` random checkpoints.
fn for_random_models(cases: u32, property: impl Fn(&Checkpoint, Numerics, &mut Rng) -> Result<(), String>) {
    let config = Config {
        // The environment's number of cases, if it names one.
        cases: match Config::default().cases {
            256 => cases,
            asked => asked,
        },
        failure_persistence: None,
        ..Config::default()
    };
    let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let mut runner = TestRunner::new_with_rng(config, rng);
    let outcome = runner.run(&shapes::any(), |choices| {
        let config = choices.config();
        let text = serde_json::to_string(&config).unwrap();
        let fail = |why: String| TestCaseError::fail(format!("{why}\n{text}"));
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.json");
        std::fs::write(&path, &text).unwrap();
        let model = dir.path().join("model");
        random::write(&path, &model, choices.seed, None, &mut |_, _| ()).map_err(|e| fail(e.to_string()))?;
        let model = Checkpoint::open(&model).map_err(|e| fail(e.to_string()))?;
        let roundable = model.shape.check_quantized().is_empty();
        let numerics = match choices.rounded && roundable {
            true => Numerics::Quantized,
            false => Numerics::F32,
        };
        property(&model, numerics, &mut Rng::new(choices.seed)).map_err(fail)
    });
    if let Err(failure) = outcome {
        panic!("{failure}");
    }
}

#[test]
fn chunks_give_the_bits_of_one_pass_for_random_shapes() {
    for_random_models(CASES, |model, numerics, rng| {
        let text = rng.tokens(TOKENS, model.shape.vocab_size);
        let run = |cuts: &[usize]| {
            let mut rig = Rig::open(Cpu::new(2), model, options(numerics, 1, 2 * TOKENS, TOKENS));
            let mut out = Vec::new();
            for cut in cuts {
                let at = rig.held(0);
                out.extend(rig.extend(0, &text[at..at + cut]));
            }
            if model.shape.draft.is_some() {
                let draft = rig.draft(0, text[0]);
                out.extend(draft.logits);
                out.extend(draft.confidence);
            }
            bits(&out)
        };
        let want = run(&[TOKENS]);
        for cuts in [rng.cuts(TOKENS), vec![1; TOKENS]] {
            if run(&cuts) != want {
                return Err(format!("{numerics}: cuts {cuts:?} change bits"));
            }
        }
        Ok(())
    });
}

#[test]
fn cpu_computes_what_reference_computes_for_random_shapes() {
    for_random_models(CASES, |model, numerics, rng| {
        let text = rng.tokens(TOKENS, model.shape.vocab_size);
        let (want, want_logits) = trace(Reference, model, numerics, &text, Probe::default());
        // Each layer of the other gets the same input, so that a flipped pick does not spread.
        let mut probe = Probe::default();
        for layer in 1..model.shape.num_hidden_layers {
            let stream = floats(&want, &format!("layers.{}.stream_out", layer - 1));
            probe.force(layer, stream.to_vec(), floats(&want, &format!("layers.{layer}.pre_in")).to_vec());
        }
        let (got, got_logits) = trace(Cpu::new(2), model, numerics, &text, probe);
        let mut rows = Rows::default();
        for layer in 0..model.shape.num_hidden_layers {
            let flipped = flips(model, &want, &got, layer);
            let key = format!("layers.{layer}.stream_out");
            rows.compare(&key, floats(&want, &key), floats(&got, &key), &flipped);
            if layer + 1 == model.shape.num_hidden_layers {
                rows.compare("logits", &want_logits, &got_logits, &flipped);
            }
        }
        rows.verdict(numerics)
    });
}

/// Runs a text and records everything.
fn trace<B: Backend>(
    backend: B,
    model: &Checkpoint,
    numerics: Numerics,
    text: &[u32],
    mut probe: Probe,
) -> (Probe, Vec<f32>) {
    let mut rig = Rig::open(backend, model, options(numerics, 1, TOKENS, TOKENS));
    let batch = StepBatch { sequences: vec![rig.sequence(0, 0, text)] };
    rig.engine.execute_probed(&batch, &mut rig.out, &mut probe).unwrap_or_else(|e| panic!("{e}"));
    (probe, rig.out.logits)
}

fn floats<'a>(probe: &'a Probe, key: &str) -> &'a [f32] {
    match probe.get(key) {
        Some(Recorded::Floats { values, .. }) => values,
        _ => panic!("`{key}` is recorded"),
    }
}

/// Rows whose experts or selected entries differ between two runs of a layer.
fn flips(model: &Checkpoint, want: &Probe, got: &Probe, layer: usize) -> Vec<bool> {
    let mut flipped = vec![false; TOKENS];
    let mut keys = vec![format!("layers.{layer}.route_ids")];
    if let Some(source) = model.shape.index_source(layer) {
        keys.push(format!("layers.{source}.selected"));
    }
    for key in keys {
        let [want, got] = [want, got].map(|probe| match probe.get(&key) {
            Some(Recorded::Whole { values, .. }) => values,
            _ => panic!("`{key}` is recorded"),
        });
        let width = want.len() / TOKENS;
        for (row, flipped) in flipped.iter_mut().enumerate() {
            let part = row * width..(row + 1) * width;
            let [mut want, mut got] = [want, got].map(|values| values[part.clone()].to_vec());
            if key.ends_with("route_ids") {
                want.sort_unstable();
                got.sort_unstable();
            }
            *flipped |= want != got;
        }
    }
    flipped
}

/// The higher of two errors; NaN is the highest.
fn worse(a: f32, b: f32) -> f32 {
    if a >= b || a.is_nan() { a } else { b }
}

/// Rows compared so far.
#[derive(Default)]
struct Rows {
    compared: usize,
    flipped: usize,
    off: Vec<String>,
}

impl Rows {
    fn compare(&mut self, key: &str, want: &[f32], got: &[f32], flipped: &[bool]) {
        assert_eq!(want.len(), got.len(), "{key}");
        let width = want.len() / TOKENS;
        for row in 0..TOKENS {
            self.compared += 1;
            if flipped[row] {
                self.flipped += 1;
                continue;
            }
            let [want, got] = [want, got].map(|values| &values[row * width..(row + 1) * width]);
            let top = want.iter().fold(0.0_f32, |m, v| m.max(v.abs()));
            let error = want.iter().zip(got).map(|(w, g)| (w - g).abs()).fold(0.0, worse);
            if error.is_nan() || error > TOLERANCE * (top / MAGNITUDE).max(1.0) {
                self.off.push(format!("{key}, row {row}: {error:.1e} off at magnitude {top:.1}"));
            }
        }
    }

    /// In f32 no row is off, whose picks are the same. In quantized one value on a rounding edge moves its row and,
    /// through the caches, all rows that see it: most rows have none in sight.
    fn verdict(&self, numerics: Numerics) -> Result<(), String> {
        let allowed = match numerics {
            Numerics::F32 => 0,
            Numerics::Quantized => self.compared / 2,
        };
        if self.off.len() > allowed || self.flipped * 20 > self.compared {
            return Err(format!(
                "{numerics}: of {} rows {} took another pick and {} are off: {:?}",
                self.compared,
                self.flipped,
                self.off.len(),
                &self.off[..self.off.len().min(5)]
            ));
        }
        Ok(())
    }
}
