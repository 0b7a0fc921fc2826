//! Opening the checkpoints of the repository.

#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use std::path::{Path, PathBuf};

use deepinfer_engine::Checkpoint;
use deepinfer_kernels::WeightFormat;

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

const CHECKPOINTS: [&str; 8] = [
    "e2e/golden/tiny-bf16",
    "e2e/golden/tiny-quant",
    "examples/models/tiny-v41",
    "e2e/shapes/deep-quant",
    "e2e/shapes/nodraft-quant",
    "e2e/shapes/odd-bf16",
    "e2e/shapes/ratio4-quant",
    "e2e/shapes/tails-bf16",
];

#[test]
fn the_checkpoints_of_the_repository_open_without_ignored_keys() {
    for path in CHECKPOINTS {
        let checkpoint = Checkpoint::open(&repository(path)).unwrap();
        assert_eq!(checkpoint.ignored_keys, Vec::<String>::new(), "{path}");
        assert_eq!(checkpoint.shape.quantized, !path.ends_with("bf16"));
        match checkpoint.token_map().unwrap() {
            Some(map) => assert_eq!(map.len(), checkpoint.shape.vocab_size, "{path}"),
            None => assert!(checkpoint.shape.engram.is_none(), "{path}"),
        }
    }
}

#[test]
fn weights_come_in_their_stored_formats_with_shapes_and_scales() {
    let quant = Checkpoint::open(&repository("e2e/golden/tiny-quant")).unwrap();
    let wq_b = quant.matrix("layers.3.attn.wq_b.weight");
    assert_eq!((wq_b.format, wq_b.rows, wq_b.cols), (WeightFormat::Fp8, 256, 32));
    assert_eq!((wq_b.data.len(), wq_b.scales.unwrap().len()), (256 * 32, 8));
    let w2 = quant.matrix("mtp.2.ffn.experts.7.w2.weight");
    assert_eq!((w2.format, w2.rows, w2.cols), (WeightFormat::Fp4, 64, 32));
    assert_eq!((w2.data.len(), w2.scales.unwrap().len()), (64 * 16, 64));
    let table = quant.matrix("layers.1.engram.embed.weight");
    assert_eq!((table.format, table.rows, table.cols), (WeightFormat::Fp8Rows, 1092, 32));
    assert_eq!(table.scales.unwrap().len(), 1092);
    let embed = quant.matrix("embed.weight");
    assert_eq!((embed.format, embed.rows, embed.cols), (WeightFormat::Bf16, 512, 64));
    assert!(embed.scales.is_none());
    assert_eq!(quant.vector("layers.0.hc_attn_scale").len(), 3);
    assert_eq!(quant.vector("layers.1.engram.q_weight").len(), 4 * 64);

    // Vectors are the same draw in both checkpoints; the plain one has no scales anywhere.
    let plain = Checkpoint::open(&repository("e2e/golden/tiny-bf16")).unwrap();
    let name = "layers.0.attn_norm.weight";
    assert_eq!(plain.vector(name), quant.vector(name));
    assert!(plain.vector(name).iter().all(|v| (0.4..1.6).contains(v)), "norm weights are near 1");
    assert!(plain.specs().all(|spec| plain.matrix(&spec.name).scales.is_none()));
}

#[test]
fn a_checkpoint_is_known_by_its_configuration_layout_and_norms_and_its_tokenizer_apart() {
    let source = repository("e2e/golden/tiny-quant");
    let dir = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(&source).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
    }
    let digests = |dir: &Path| {
        let checkpoint = Checkpoint::open(dir).unwrap();
        (checkpoint.digest(), checkpoint.tokenizer_digest().unwrap())
    };
    let append = |file: &str| {
        let path = dir.path().join(file);
        let mut bytes = std::fs::read(&path).unwrap();
        bytes.push(b'\n');
        std::fs::write(&path, bytes).unwrap();
    };
    let original = digests(&source);
    assert_eq!(digests(dir.path()), original, "a copy is the same");
    append("tokenizer.json");
    let other_tokenizer = digests(dir.path());
    assert_eq!(other_tokenizer.0, original.0);
    assert_ne!(other_tokenizer.1, original.1);
    append("config.json");
    let other_config = digests(dir.path()).0;
    assert_ne!(other_config, original.0);
    // Another training run: the last norm differs in one value.
    let shard = dir.path().join("model-00001-of-00001.safetensors");
    let mut bytes = std::fs::read(&shard).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let head = String::from_utf8(bytes[8..8 + header].to_vec()).unwrap();
    let norm = &head[head.find("\"norm.weight\"").or(head.find("\"model.norm.weight\"")).unwrap()..];
    let offset = norm[norm.find("data_offsets").unwrap()..].split(['[', ',']).nth(1).unwrap();
    bytes[8 + header + offset.trim().parse::<usize>().unwrap()] ^= 1;
    std::fs::write(&shard, bytes).unwrap();
    assert_ne!(digests(dir.path()).0, other_config);
    assert_eq!(digests(&repository("e2e/golden/tiny-bf16")).1, original.1, "both have the same tokenizer");
}
