//! Checkpoints with random weights: whole, deterministic, refused where they would do harm.

#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use deepinfer_engine::random::{self, RandomError, RandomOptions};
use deepinfer_engine::{Checkpoint, Engine, EngineOptions, Numerics, tensors};
use deepinfer_kernels::Cpu;
use deepinfer_serving::batch::{BlockId, Logits, SequenceStep, StateSlot, StepBatch, StepOutput};

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

fn write(config: &Path, out: &Path, options: &RandomOptions) -> random::Written {
    random::write_with(config, out, options, &mut |_, _| {}).unwrap()
}

/// Data and scale bytes of every tensor.
fn bytes_by_name(dir: &Path) -> BTreeMap<String, (Vec<u8>, Vec<u8>)> {
    let checkpoint = Checkpoint::open(dir).unwrap();
    let matrices = checkpoint.specs().map(|spec| (spec.name.clone(), checkpoint.matrix(&spec.name)));
    matrices
        .map(|(name, m)| (name, (m.data.to_vec(), m.scales.map(|s| s.to_vec()).unwrap_or_default())))
        .collect()
}

#[test]
fn every_shape_gives_a_checkpoint_that_opens() {
    let dir = tempfile::tempdir().unwrap();
    let configs = [
        "e2e/golden/tiny-bf16",
        "e2e/golden/tiny-quant",
        "examples/models/tiny-v41",
        "e2e/shapes/deep-quant",
        "e2e/shapes/nodraft-quant",
        "e2e/shapes/odd-bf16",
        "e2e/shapes/ratio4-quant",
        "e2e/shapes/tails-bf16",
    ];
    for config in configs {
        let out = dir.path().join(config);
        let written = write(&repository(config).join("config.json"), &out, &RandomOptions::new(5));
        let checkpoint = Checkpoint::open(&out).unwrap();
        assert_eq!(checkpoint.ignored_keys, Vec::<String>::new());
        assert_eq!(written.tensors, tensors::expected(&checkpoint.shape).len());
        assert!(checkpoint.mapped_bytes() > written.bytes, "headers come on top");
        assert_eq!(written.files, 1);
        match checkpoint.token_map().unwrap() {
            Some(map) => {
                let counts = checkpoint.shape.engram.as_ref().unwrap();
                assert_eq!(map.compressed_len(), counts.compressed_vocab_size);
                assert_eq!(map.len(), checkpoint.shape.vocab_size);
            }
            None => assert!(checkpoint.shape.engram.is_none()),
        }
    }
}

#[test]
fn the_same_seed_gives_the_same_tensors_however_they_are_cut() {
    let dir = tempfile::tempdir().unwrap();
    let config = repository("e2e/golden/tiny-quant/config.json");
    let out = |name: &str| dir.path().join(name);
    let one = RandomOptions { threads: 1, ..RandomOptions::new(9) };
    write(&config, &out("one"), &one);
    let cut = RandomOptions { threads: 3, shard_bytes: 100_000, ..RandomOptions::new(9) };
    let written = write(&config, &out("cut"), &cut);
    assert!(written.files > 10, "{} files", written.files);
    let (a, b) = (bytes_by_name(&out("one")), bytes_by_name(&out("cut")));
    assert!(a == b, "tensors differ between one file and many");
    write(&config, &out("other"), &RandomOptions { seed: 10, ..one });
    let c = bytes_by_name(&out("other"));
    assert!(
        a.keys().eq(c.keys()) && a.iter().all(|(name, bytes)| *bytes != c[name]),
        "another seed, other values"
    );
}

#[test]
fn a_given_tokenizer_is_copied_and_sets_the_engram_counts() {
    let dir = tempfile::tempdir().unwrap();
    let (out, config) = (dir.path().join("out"), dir.path().join("config.json"));
    let text = fs::read_to_string(repository("e2e/golden/tiny-quant/config.json")).unwrap();
    let text = text.replace("\"engram_compressed_vocab_size\": 347", "\"engram_compressed_vocab_size\": 12");
    let text = text.replace("1854", "77");
    assert!(text.contains(": 12,") && text.contains("77"));
    fs::write(&config, text).unwrap();
    let tokenizer = repository("e2e/golden/tiny-quant/tokenizer.json");
    random::write(&config, &out, 1, Some(&tokenizer), &mut |_, _| {}).unwrap();
    assert_eq!(fs::read(out.join("tokenizer.json")).unwrap(), fs::read(&tokenizer).unwrap());
    let engram = Checkpoint::open(&out).unwrap().shape.engram.unwrap();
    assert_eq!(engram.compressed_vocab_size, 347);
    assert_eq!(engram.num_embeddings, [1092, 1854]);
}

#[test]
fn weights_follow_the_fixtures_draw() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    write(&repository("e2e/golden/tiny-bf16/config.json"), &out, &RandomOptions::new(3));
    let random = Checkpoint::open(&out).unwrap();
    let drawn = Checkpoint::open(&repository("e2e/golden/tiny-bf16")).unwrap();
    let moments = |values: &[f32]| {
        let n = values.len() as f32;
        let mean = values.iter().sum::<f32>() / n;
        (mean, (values.iter().map(|v| (v - mean) * (v - mean)).sum::<f32>() / n).sqrt())
    };
    let mut compared = 0;
    for spec in drawn.specs().filter(|spec| spec.elements() >= 1000) {
        let (a, b) = (moments(&random.vector(&spec.name)), moments(&drawn.vector(&spec.name)));
        assert!((a.0 - b.0).abs() < 0.15 * b.1, "{}: means {} and {}", spec.name, a.0, b.0);
        assert!((a.1 / b.1 - 1.0).abs() < 0.15, "{}: deviations {} and {}", spec.name, a.1, b.1);
        compared += 1;
    }
    assert!(compared > 100);
}

#[test]
fn progress_ends_at_the_total() {
    let dir = tempfile::tempdir().unwrap();
    let config = repository("e2e/golden/tiny-quant/config.json");
    let mut calls = Vec::new();
    let written = random::write(&config, &dir.path().join("out"), 1, None, &mut |done, total| {
        calls.push((done, total))
    });
    let total = written.unwrap().bytes;
    assert_eq!(calls.first(), Some(&(0, total)));
    assert_eq!(calls.last(), Some(&(total, total)));
    assert!(calls.windows(2).all(|pair| pair[0].0 < pair[1].0));
}

#[test]
fn a_directory_with_files_is_left_alone_and_a_failure_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let config = repository("e2e/golden/tiny-quant/config.json");
    let out = dir.path().join("out");
    fs::create_dir(&out).unwrap();
    fs::write(out.join("precious"), "data").unwrap();
    let refused = random::write(&config, &out, 1, None, &mut |_, _| {});
    assert!(matches!(refused, Err(RandomError::Exists(path)) if path == out));
    assert_eq!(fs::read_dir(&out).unwrap().count(), 1);
    fs::remove_file(out.join("precious")).unwrap();
    random::write(&config, &out, 1, None, &mut |_, _| {}).unwrap();
    Checkpoint::open(&out).unwrap();

    let broken = dir.path().join("broken.json");
    fs::write(&broken, fs::read_to_string(&config).unwrap().replace("\"o_groups\": 2", "\"o_groups\": 3"))
        .unwrap();
    let refused = random::write(&broken, &dir.path().join("new"), 1, None, &mut |_, _| {}).unwrap_err();
    assert!(
        refused.to_string().contains("broken.json") && refused.to_string().contains("o_groups is 3"),
        "{refused}"
    );
    let names = fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect::<Vec<_>>();
    assert_eq!(names.len(), 2, "{names:?}");
}

#[test]
fn a_random_model_computes_finite_logits_and_uses_many_experts() {
    let dir = tempfile::tempdir().unwrap();
    // 8 layers and 3 draft layers, every part of the architecture on.
    write(&repository("examples/models/tiny-v41/config.json"), dir.path(), &RandomOptions::new(11));
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    for numerics in [Numerics::F32, Numerics::Quantized] {
        let options = EngineOptions {
            numerics: Some(numerics),
            slots: 1,
            blocks: 2,
            max_rows: 200,
            ..EngineOptions::default()
        };
        let mut engine = Engine::open(Cpu::new(1), &checkpoint, options).unwrap();
        let tokens = (0..200).map(|i| 20 + i * 37 % 3000).collect();
        let mut step = SequenceStep::text(StateSlot(0), 0, tokens, vec![BlockId(0), BlockId(1)]);
        step.logits = Logits::All;
        let mut out = StepOutput::default();
        engine.execute(&StepBatch { sequences: vec![step] }, &mut out).unwrap();
        assert!(out.logits.iter().all(|v| v.is_finite()), "{numerics}");
        let n = out.logits.len() as f32;
        let spread = (out.logits.iter().map(|v| v * v).sum::<f32>() / n).sqrt();
        assert!((0.5..5.0).contains(&spread), "{numerics}: logits spread by {spread}");
        let best = |row: usize| {
            let logits = out.row(0, row);
            (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap()
        };
        let answers: std::collections::HashSet<usize> = (0..200).map(best).collect();
        assert!(answers.len() > 100, "{numerics}: only {} different answers", answers.len());
        for layer in out.arrivals.chunks(out.slots_per_layer) {
            assert!(layer.iter().filter(|&&count| count > 0).count() > 12, "{numerics}: arrivals {layer:?}");
        }
    }
}
