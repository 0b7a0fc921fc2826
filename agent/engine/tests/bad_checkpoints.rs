//! Damaged copies of a checkpoint: each must be refused with file, tensor and what was expected.

#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use deepinfer_engine::{Checkpoint, CheckpointError};
use serde_json::{Value, json};
use tempfile::TempDir;

const INDEX: &str = "model.safetensors.index.json";
const SHARD: &str = "model-00001-of-00001.safetensors";

/// A copy of a golden checkpoint that may be damaged.
struct Copy {
    dir: TempDir,
}

/// A safetensors file taken apart.
struct Parts {
    entries: BTreeMap<String, Value>,
    data: Vec<u8>,
}

impl Parts {
    fn offsets(&self, tensor: &str) -> (usize, usize) {
        let offsets = &self.entries[tensor]["data_offsets"];
        (offsets[0].as_u64().unwrap() as usize, offsets[1].as_u64().unwrap() as usize)
    }

    fn bytes(&mut self, tensor: &str) -> &mut [u8] {
        let (begin, end) = self.offsets(tensor);
        &mut self.data[begin..end]
    }

    /// Removes tensors and gives them back as a file of their own.
    fn split(&mut self, tensors: &[&str]) -> Parts {
        let mut moved = Parts { entries: BTreeMap::new(), data: Vec::new() };
        for tensor in tensors {
            let bytes = self.bytes(tensor).to_vec();
            let mut entry = self.entries[*tensor].clone();
            entry["data_offsets"] = json!([moved.data.len(), moved.data.len() + bytes.len()]);
            moved.data.extend(bytes);
            moved.entries.insert((*tensor).to_string(), entry);
            self.remove(tensor);
        }
        moved
    }

    fn remove(&mut self, tensor: &str) {
        let (begin, end) = self.offsets(tensor);
        self.data.drain(begin..end);
        self.entries.remove(tensor);
        let moved = (end - begin) as u64;
        for entry in self.entries.values_mut().filter(|e| e.get("data_offsets").is_some()) {
            let offsets = &mut entry["data_offsets"];
            if offsets[0].as_u64().unwrap() >= end as u64 {
                *offsets =
                    json!([offsets[0].as_u64().unwrap() - moved, offsets[1].as_u64().unwrap() - moved]);
            }
        }
    }

    fn append(&mut self, tensor: &str, dtype: &str, shape: Value, bytes: &[u8]) {
        let offsets = [self.data.len(), self.data.len() + bytes.len()];
        self.data.extend(bytes);
        let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": offsets});
        self.entries.insert(tensor.to_string(), entry);
    }
}

impl Copy {
    fn of(checkpoint: &str) -> Self {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../e2e/golden").join(checkpoint);
        let dir = tempfile::tempdir().unwrap();
        for file in ["config.json", "tokenizer.json", INDEX, SHARD] {
            fs::copy(source.join(file), dir.path().join(file)).unwrap();
        }
        Self { dir }
    }

    fn quant() -> Self {
        Self::of("tiny-quant")
    }

    fn path(&self, file: &str) -> PathBuf {
        self.dir.path().join(file)
    }

    fn parts(&self) -> Parts {
        let bytes = fs::read(self.path(SHARD)).unwrap();
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let entries = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
        Parts { entries, data: bytes[8 + length..].to_vec() }
    }

    fn store(&self, file: &str, parts: &Parts) {
        let header = serde_json::to_vec(&parts.entries).unwrap();
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header);
        bytes.extend(&parts.data);
        fs::write(self.path(file), bytes).unwrap();
    }

    /// Changes the shard, and the index with it.
    fn edit(&self, change: impl FnOnce(&mut Parts)) {
        let mut parts = self.parts();
        change(&mut parts);
        self.store(SHARD, &parts);
        self.index(&[(SHARD, &parts)]);
    }

    /// Writes the index of these files.
    fn index(&self, files: &[(&str, &Parts)]) {
        let names =
            files.iter().flat_map(|(file, parts)| parts.entries.keys().map(move |name| (name, *file)));
        let map: BTreeMap<&String, &str> = names.filter(|(name, _)| *name != "__metadata__").collect();
        fs::write(self.path(INDEX), json!({ "weight_map": map }).to_string()).unwrap();
    }

    fn edit_index(&self, change: impl FnOnce(&mut Value)) {
        let mut index = serde_json::from_slice(&fs::read(self.path(INDEX)).unwrap()).unwrap();
        change(&mut index);
        fs::write(self.path(INDEX), index.to_string()).unwrap();
    }

    fn open(&self) -> Result<Checkpoint, CheckpointError> {
        Checkpoint::open(self.dir.path())
    }

    /// The problems of a checkpoint that is broken in the way `kind` says.
    fn problems(&self, kind: &str) -> Vec<String> {
        match self.open() {
            Err(CheckpointError::Broken { kind: found, problems, .. }) if found == kind => problems.0,
            Err(other) => panic!("expected {kind:?}, got: {other}"),
            Ok(_) => panic!("expected {kind:?}, but it opens"),
        }
    }

    /// The only problem of that kind.
    fn problem(&self, kind: &str) -> String {
        let problems = self.problems(kind);
        assert_eq!(problems.len(), 1, "{problems:#?}");
        problems.into_iter().next().unwrap()
    }
}

const UNFIT: &str = "tensors do not fit config.json";
const DAMAGED: &str = "files are damaged";

#[test]
fn an_undamaged_copy_opens_whatever_way_it_is_laid_out() {
    let copy = Copy::quant();
    copy.edit(|_| {});
    copy.open().unwrap();
    // All names with the optional prefix, but one.
    copy.edit(|parts| {
        let names: Vec<String> = parts
            .entries
            .keys()
            .filter(|n| !["__metadata__", "head.weight"].contains(&n.as_str()))
            .cloned()
            .collect();
        for name in names {
            let entry = parts.entries.remove(&name).unwrap();
            parts.entries.insert(format!("model.{name}"), entry);
        }
    });
    assert!(copy.open().unwrap().has("embed.weight"));
    // A single file without an index.
    fs::remove_file(copy.path(INDEX)).unwrap();
    fs::rename(copy.path(SHARD), copy.path("model.safetensors")).unwrap();
    copy.open().unwrap();
}

#[test]
fn tensors_of_the_vision_tower_are_skipped_and_bf16_mixes_are_read() {
    let copy = Copy::quant();
    copy.edit(|parts| {
        parts.append("vision.norm.weight", "BF16", json!([2]), &[0; 4]);
        parts.append("aligner.w1.bias", "F16", json!([1]), &[0; 2]);
        parts.remove("layers.0.hc_attn_fn");
        parts.append("layers.0.hc_attn_fn", "BF16", json!([24, 256]), &[0; 24 * 256 * 2]);
    });
    let checkpoint = copy.open().unwrap();
    assert!(checkpoint.vector("layers.0.hc_attn_fn").iter().all(|&v| v == 0.0));
    assert!(checkpoint.specs().all(|spec| !spec.name.starts_with("vision.")));
}

#[test]
fn paths_that_are_no_checkpoint_say_what_is_expected() {
    let copy = Copy::quant();
    let error = |path: PathBuf| Checkpoint::open(&path).unwrap_err().to_string();
    let missing = error(copy.path("nowhere"));
    assert!(missing.contains("nowhere: no such directory") && missing.contains("config.json"), "{missing}");
    let file = error(copy.path("config.json"));
    assert!(file.contains("config.json: is a file; name the directory"), "{file}");
    fs::remove_file(copy.path("config.json")).unwrap();
    let no_config = error(copy.dir.path().to_path_buf());
    assert!(no_config.contains("config.json: ") && no_config.contains("No such file"), "{no_config}");
    fs::write(copy.path("config.json"), "{\"model_type\": ").unwrap();
    let torn = error(copy.dir.path().to_path_buf());
    assert!(torn.contains("config.json is not a JSON object"), "{torn}");
    fs::write(copy.path("config.json"), "{\"model_type\": \"deepseek_v41\"}").unwrap();
    let empty = error(copy.dir.path().to_path_buf());
    assert!(empty.contains("text_config is missing"), "{empty}");
}

#[test]
fn missing_files_are_all_named() {
    let copy = Copy::quant();
    copy.edit_index(|index| {
        index["weight_map"]["embed.weight"] = json!("model-00002-of-00003.safetensors");
        index["weight_map"]["head.weight"] = json!("model-00003-of-00003.safetensors");
        index["weight_map"]["norm.weight"] = json!("model-00003-of-00003.safetensors");
    });
    let problems = copy.problems("files are missing");
    assert_eq!(problems.len(), 2, "{problems:#?}");
    assert!(
        problems[0].contains("model-00002-of-00003.safetensors") && problems[0].contains("for 1 tensors")
    );
    assert!(
        problems[1].contains("model-00003-of-00003.safetensors") && problems[1].contains("for 2 tensors")
    );
    fs::remove_file(copy.path(INDEX)).unwrap();
    let none = copy.problem("files are missing");
    assert!(none.contains(INDEX) && none.contains("model.safetensors"), "{none}");
}

#[test]
fn a_damaged_index_is_refused() {
    let copy = Copy::quant();
    copy.edit_index(|index| index["weight_map"]["embed.weight"] = json!("../model.safetensors"));
    let outside = copy.problem("the index is damaged");
    assert!(outside.contains("embed.weight") && outside.contains("../model.safetensors"), "{outside}");
    fs::write(copy.path(INDEX), "{\"weight_map\": {").unwrap();
    assert!(copy.problem("the index is damaged").contains(INDEX));
    fs::write(copy.path(INDEX), "{\"weight_map\": {}}").unwrap();
    assert!(copy.problem("the index is damaged").contains("names no tensor"));
}

#[test]
fn tensors_that_are_not_where_the_index_says_are_named() {
    let copy = Copy::quant();
    copy.edit_index(|index| {
        let map = index["weight_map"].as_object_mut().unwrap();
        map.remove("norm.weight");
        map.insert("ghost.weight".to_string(), json!(SHARD));
    });
    let problems = copy.problems("the index does not fit its files");
    assert_eq!(problems.len(), 2, "{problems:#?}");
    assert!(problems[0].contains(SHARD) && problems[0].contains("norm.weight is not in"), "{problems:#?}");
    assert!(problems[1].contains("ghost.weight is not there"), "{problems:#?}");

    let copy = Copy::quant();
    let mut first = copy.parts();
    let second = first.split(&["norm.weight", "head.weight"]);
    copy.store("a.safetensors", &first);
    copy.store("b.safetensors", &second);
    copy.index(&[("a.safetensors", &first), ("b.safetensors", &second)]);
    assert_eq!(copy.open().unwrap().shard_count(), 2);
    copy.edit_index(|index| index["weight_map"]["norm.weight"] = json!("a.safetensors"));
    let elsewhere = copy.problem("the index does not fit its files");
    assert!(elsewhere.contains("b.safetensors: tensor norm.weight lies here"), "{elsewhere}");
    assert!(elsewhere.contains("says a.safetensors"), "{elsewhere}");
}

#[test]
fn a_tensor_that_is_there_twice_is_refused() {
    let copy = Copy::quant();
    copy.edit(|parts| {
        let bytes = parts.bytes("norm.weight").to_vec();
        parts.append("model.norm.weight", "BF16", json!([64]), &bytes);
    });
    assert!(copy.problem("tensors are there twice").contains("norm.weight"));
}

#[test]
fn truncated_and_torn_shards_name_the_file() {
    let copy = Copy::quant();
    let whole = fs::read(copy.path(SHARD)).unwrap();
    for (len, expected) in [
        (whole.len() - 1, "is truncated: its tensors end at byte"),
        (whole.len() / 2, "is truncated: its tensors end at byte"),
        (1000, "is truncated: the header ends at byte"),
        (5, "is truncated: 5 bytes"),
        (0, "is truncated: 0 bytes"),
    ] {
        fs::write(copy.path(SHARD), &whole[..len]).unwrap();
        let found = copy.problem(DAMAGED);
        assert!(found.starts_with(SHARD) && found.contains(expected), "{len}: {found}");
    }
    let mut longer = whole.clone();
    longer.push(0);
    fs::write(copy.path(SHARD), longer).unwrap();
    assert!(copy.problem(DAMAGED).contains("has 1 bytes after its last tensor"));
    fs::write(copy.path(SHARD), b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n").unwrap();
    assert!(copy.problem(DAMAGED).contains("is no safetensors file"));
}

#[test]
fn wrong_dtypes_and_shapes_name_tensor_and_expectation() {
    let copy = Copy::quant();
    copy.edit(|parts| {
        parts.entries.get_mut("norm.weight").unwrap()["dtype"] = json!("F16");
        parts.entries.get_mut("embed.weight").unwrap()["shape"] = json!([64, 512]);
        parts.entries.get_mut("layers.0.attn.wkv.weight").unwrap()["dtype"] = json!("U8");
        parts.entries.get_mut("layers.0.ffn.experts.3.w1.weight").unwrap()["dtype"] = json!("F8_E4M3");
        parts.entries.get_mut("layers.0.attn.wq_b.scale").unwrap()["dtype"] = json!("U8");
        parts.entries.get_mut("layers.1.engram.embed.scale").unwrap()["shape"] = json!([1, 1092]);
        parts.entries.get_mut("layers.0.attn.attn_sink").unwrap()["dtype"] = json!("I32");
    });
    let problems = copy.problems(UNFIT);
    let expected = [
        "tensor norm.weight is F16, expected BF16 or F32",
        "tensor embed.weight has shape [64, 512], expected [512, 64]",
        "tensor layers.0.attn.wkv.weight is U8, expected F8_E4M3 with a scale, BF16 or F32",
        "tensor layers.0.ffn.experts.3.w1.weight is F8_E4M3, expected I8 (FP4 pairs) with a scale, BF16 or F32",
        "tensor layers.0.attn.wq_b.scale is U8, expected F8_E8M0",
        "tensor layers.1.engram.embed.scale has shape [1, 1092], expected [1092, 1]",
        "tensor layers.0.attn.attn_sink is I32, expected F32",
    ];
    for line in expected {
        assert!(problems.iter().any(|p| p == &format!("{SHARD}: {line}")), "{line}: {problems:#?}");
    }
    assert_eq!(problems.len(), expected.len(), "{problems:#?}");
}

#[test]
fn missing_and_unknown_tensors_are_all_named() {
    let copy = Copy::quant();
    copy.edit(|parts| {
        parts.remove("layers.4.attn.wo_b.scale");
        parts.remove("layers.9.ffn_norm.weight");
        parts.remove("mtp.2.confidence_head.proj.weight");
        parts.append("layers.10.attn_norm.weight", "BF16", json!([64]), &[0; 128]);
        parts.append("layers.0.attn.wq_a.bias", "BF16", json!([1]), &[0; 2]);
        parts.append("norm.scale", "F8_E8M0", json!([1]), &[127]);
    });
    let problems = copy.problems(UNFIT);
    for line in [
        "layers.4.attn.wo_b.weight is FP8, but its scale layers.4.attn.wo_b.scale is missing",
        "tensor layers.9.ffn_norm.weight [64] is missing in all files",
        "tensor mtp.2.confidence_head.proj.weight [1, 96] is missing",
        "layers.10.attn_norm.weight is unknown",
        "layers.0.attn.wq_a.bias is unknown",
        "norm.scale is unknown",
    ] {
        assert_eq!(problems.iter().filter(|p| p.contains(line)).count(), 1, "{line}: {problems:#?}");
    }
    assert_eq!(problems.len(), 6, "{problems:#?}");
}

#[test]
fn a_long_list_of_problems_is_cut_when_printed() {
    let copy = Copy::quant();
    let config = fs::read_to_string(copy.path("config.json")).unwrap();
    fs::write(copy.path("config.json"), config.replace("\"hidden_size\": 64", "\"hidden_size\": 96"))
        .unwrap();
    let problems = copy.problems(UNFIT);
    assert!(problems.len() > 100, "every layer's shapes differ: {}", problems.len());
    let text = copy.open().unwrap_err().to_string();
    assert_eq!(text.lines().count(), 22, "a headline, 20 problems and a count");
    assert!(text.ends_with(&format!("and {} more", problems.len() - 20)), "{text}");
}

#[test]
fn quantized_tensors_need_a_quantization_config() {
    let copy = Copy::quant();
    let mut config: Value = serde_json::from_slice(&fs::read(copy.path("config.json")).unwrap()).unwrap();
    config.as_object_mut().unwrap().remove("quantization_config");
    fs::write(copy.path("config.json"), config.to_string()).unwrap();
    let problems = copy.problems(UNFIT);
    assert!(problems.iter().all(|p| p.contains("config.json has no quantization_config")), "{problems:#?}");
    assert!(problems.len() > 100);
}

#[test]
fn plain_tensors_are_fine_in_a_quantized_model() {
    let copy = Copy::quant();
    copy.edit(|parts| {
        for (name, shape, bytes) in [
            ("layers.0.attn.wkv", json!([64, 64]), 64 * 64 * 2),
            ("layers.5.ffn.experts.2.w2", json!([64, 32]), 64 * 32 * 2),
            ("layers.3.engram.embed", json!([1854, 32]), 1854 * 32 * 2),
        ] {
            parts.remove(&format!("{name}.weight"));
            parts.remove(&format!("{name}.scale"));
            parts.append(&format!("{name}.weight"), "BF16", shape, &vec![0; bytes]);
        }
    });
    let checkpoint = copy.open().unwrap();
    assert_eq!(checkpoint.vector("layers.0.attn.wkv.weight").len(), 64 * 64);
}

#[test]
fn nan_and_overflowing_scales_are_refused_with_their_place() {
    let copy = Copy::quant();
    copy.edit(|parts| {
        parts.bytes("layers.0.ffn.experts.1.w1.scale")[3] = 0xFF;
        parts.bytes("layers.1.engram.embed.scale")[1000] = 0xFF;
        parts.bytes("layers.1.engram.embed.scale")[1001] = 0xFF;
        parts.bytes("layers.2.attn.wq_b.scale")[5] = 247;
        // The largest that fit: 448 * 2^119 and 6 * 2^125 are float32 numbers.
        parts.bytes("layers.3.attn.wq_b.scale")[5] = 246;
        parts.bytes("layers.3.ffn.experts.1.w1.scale")[5] = 252;
    });
    let problems = copy.problems("scales are damaged");
    let expected = [
        "tensor layers.0.ffn.experts.1.w1.scale: scale [1, 1] is NaN (byte 255); 1 such scales",
        "tensor layers.1.engram.embed.scale: scale [1000, 0] is NaN (byte 255); 2 such scales",
        "tensor layers.2.attn.wq_b.scale: scale [5, 0] is byte 247, too large for float32 weights; 1 such scales",
    ];
    for line in expected {
        assert!(problems.contains(&format!("{SHARD}: {line}")), "{line}: {problems:#?}");
    }
    assert_eq!(problems.len(), 3, "{problems:#?}");
}

#[test]
fn an_engram_table_and_its_scale_lie_in_one_file() {
    let copy = Copy::quant();
    let mut first = copy.parts();
    let second = first.split(&["layers.1.engram.embed.scale", "layers.0.attn.wkv.scale"]);
    copy.store("a.safetensors", &first);
    copy.store("b.safetensors", &second);
    copy.index(&[("a.safetensors", &first), ("b.safetensors", &second)]);
    let found = copy.problem(UNFIT);
    assert!(
        found.starts_with("b.safetensors: tensor layers.1.engram.embed.scale must lie in one file"),
        "{found}"
    );
    assert!(found.contains("a.safetensors"), "{found}");
}

#[test]
fn the_engram_files_beside_the_weights_are_never_opened() {
    let copy = Copy::quant();
    let map = copy.open().unwrap().token_map().unwrap().unwrap();
    for file in ["engram_token_map.json", "engram_hash.json"] {
        fs::write(copy.path(file), "not even JSON").unwrap();
    }
    assert_eq!(copy.open().unwrap().token_map().unwrap().unwrap(), map);
    fs::remove_file(copy.path("tokenizer.json")).unwrap();
    let checkpoint = copy.open().unwrap();
    assert_eq!(checkpoint.tokenizer_path(), None);
    let error = checkpoint.token_map().unwrap_err().to_string();
    assert!(error.contains("tokenizer.json") && error.contains("Engram"), "{error}");
}
