//! `config.json` to [`ModelShape`]: all problems at once, each with the path of its field and what to write
//! instead.
//!
//! Invariant: a shape that leaves this module is consistent (see [`crate::shape`]); whatever the bytes were,
//! nothing here panics or allocates more than a small multiple of them.

mod checks;
mod fields;

use serde_json::{Map, Value, json};

use crate::shape::{CandidateShape, DraftShape, EngramShape, ModelShape, RopeScaling};
use fields::Fields;

/// Why a configuration was refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The bytes are not a JSON object.
    #[error("config.json is not a JSON object: {0}")]
    NotJson(String),
    /// Fields are missing, unsupported or contradict each other.
    #[error("config.json has {} problem(s):\n  {}", .0.len(), .0.join("\n  "))]
    Problems(Vec<String>),
}

/// Widest tensor dimension, layer count times expert count, and other counts above which a configuration is
/// surely a mistake. They keep every product of two sizes inside 64 bits and every row number inside 32.
mod limit {
    pub(super) const WIDTH: usize = 1 << 20;
    pub(super) const VOCAB: usize = 1 << 24;
    pub(super) const LAYERS: usize = 1 << 10;
    pub(super) const HEADS: usize = 1 << 12;
    pub(super) const EXPERTS: usize = 1 << 13;
    pub(super) const POSITIONS: usize = 1 << 30;
    pub(super) const WINDOW: usize = 1 << 20;
    pub(super) const COPIES: usize = 16;
    pub(super) const ENGRAM_ROWS: usize = u32::MAX as usize;
}

/// Reads a configuration. The second part of the result are the keys that model.md does not name, as paths
/// (`text_config.foo`), in the order of the alphabet: they are ignored and deserve one warning.
///
/// # Errors
/// [`ConfigError`], with every missing, unsupported and contradicting field.
pub fn parse(bytes: &[u8]) -> Result<(ModelShape, Vec<String>), ConfigError> {
    let root: Value = serde_json::from_slice(bytes).map_err(|e| ConfigError::NotJson(e.to_string()))?;
    let Value::Object(root) = root else {
        return Err(ConfigError::NotJson("expected { ... }".to_string()));
    };
    parse_object(&root)
}

/// As [`parse`], from JSON that is already read.
///
/// # Errors
/// As [`parse`].
pub fn parse_object(root: &Map<String, Value>) -> Result<(ModelShape, Vec<String>), ConfigError> {
    let mut top = Fields::new("", root);
    top.exactly("model_type", json!("deepseek_v41"));
    top.only("architectures", json!(["DeepseekV41ForCausalLM"]));
    // What counts is each tensor's own type; a checkpoint of other 16-bit floats could not be read, though.
    top.one_of("dtype", &["bfloat16", "float32"]);
    let quantized = top.object("quantization_config");
    let vision = top.object("vision_config").is_some();
    let Some(text) = top.object("text_config") else {
        if top.ok(&["text_config"]) {
            top.problem("text_config", "is missing: the sizes of the text model belong there");
        }
        return Err(ConfigError::Problems(top.problems));
    };
    let mut text = Fields::new("text_config", text);
    let scaling = text.object("rope_scaling").map(|map| Fields::new("text_config.rope_scaling", map));
    let mut sections = Sections { top, text, scaling };
    let shape = sections.shape(quantized.is_some(), vision);
    let mut quant = quantized.map(|map| Fields::new("quantization_config", map));
    if let Some(quant) = &mut quant {
        read_quantization(quant);
    }
    sections.check(&shape);
    sections.finish(shape, quant)
}

fn read_quantization(quant: &mut Fields<'_>) {
    quant.exactly("quant_method", json!("fp8"));
    quant.exactly("weight_block_size", json!([32, 32]));
    quant.only("activation_scheme", json!("dynamic"));
    quant.only("scale_fmt", json!("ue8m0"));
    quant.only("expert_dtype", json!("fp4"));
}

/// The objects of a configuration.
struct Sections<'a> {
    top: Fields<'a>,
    text: Fields<'a>,
    scaling: Option<Fields<'a>>,
}

impl<'a> Sections<'a> {
    fn finish(
        self,
        shape: ModelShape,
        quant: Option<Fields<'a>>,
    ) -> Result<(ModelShape, Vec<String>), ConfigError> {
        let (mut problems, mut ignored) = (Vec::new(), Vec::new());
        let sections = [Some(self.top), quant, Some(self.text), self.scaling];
        for fields in sections.into_iter().flatten() {
            ignored.extend(fields.ignored());
            problems.extend(fields.problems);
        }
        if problems.is_empty() {
            ignored.sort();
            Ok((shape, ignored))
        } else {
            Err(ConfigError::Problems(problems))
        }
    }

    fn shape(&mut self, quantized: bool, vision: bool) -> ModelShape {
        self.read_fixed();
        let rope_scaling = self.read_scaling();
        let t = &mut self.text;
        let vocab_size = t.size("vocab_size", 1, limit::VOCAB);
        let layers = t.size("num_hidden_layers", 1, limit::LAYERS);
        let draft = read_draft(t);
        let compress_ratios = t.list("compress_ratios", 0, 128);
        // Without compressed KV nothing runs an indexer, and its sizes may be absent.
        let indexed = compress_ratios.iter().any(|&r| r > 0);
        let mut index_size = |key, max| {
            if indexed { t.size(key, 1, max) } else { t.optional_size(key, 0, max).unwrap_or(0) }
        };
        let index_n_heads = index_size("index_n_heads", limit::HEADS);
        let index_head_dim = index_size("index_head_dim", limit::WIDTH);
        let index_topk = index_size("index_topk", limit::WIDTH);
        ModelShape {
            bos_token_id: token(&mut self.top, "bos_token_id"),
            eos_token_id: token(&mut self.top, "eos_token_id"),
            pad_token_id: token(&mut self.top, "pad_token_id"),
            image_token_id: self.top.optional_size("image_token_id", 0, limit::VOCAB).map(|id| id as u32),
            vocab_size,
            hidden_size: t.size("hidden_size", 1, limit::WIDTH),
            num_hidden_layers: layers,
            num_attention_heads: t.size("num_attention_heads", 1, limit::HEADS),
            head_dim: t.size("head_dim", 2, 1 << 16),
            qk_rope_head_dim: t.size("qk_rope_head_dim", 2, 1 << 16),
            q_lora_rank: t.size("q_lora_rank", 1, limit::WIDTH),
            o_lora_rank: t.size("o_lora_rank", 1, limit::WIDTH),
            o_groups: t.size("o_groups", 1, limit::HEADS),
            swiglu_limit: t.number("swiglu_limit", -1e30, 1e30) as f32,
            rms_norm_eps: t.number("rms_norm_eps", 1e-37, 1.0) as f32,
            max_position_embeddings: t.size("max_position_embeddings", 1, limit::POSITIONS),
            rope_theta: t.number("rope_theta", 2.0, 1e15),
            compress_rope_theta: t.number("compress_rope_theta", 2.0, 1e15),
            rope_scaling,
            n_routed_experts: t.size("n_routed_experts", 1, limit::EXPERTS),
            num_experts_per_tok: t.size("num_experts_per_tok", 1, limit::EXPERTS),
            moe_intermediate_size: t.size("moe_intermediate_size", 1, limit::WIDTH),
            norm_topk_prob: t.flag("norm_topk_prob"),
            routed_scaling_factor: t.number("routed_scaling_factor", 1e-30, 1e30) as f32,
            sliding_window: t.size("sliding_window", 1, limit::WINDOW),
            compress_ratios,
            kv_source_layer_ids: t.list("kv_source_layer_ids", 0, limit::LAYERS),
            index_source_layer_ids: t.list("index_source_layer_ids", 0, limit::LAYERS),
            index_n_heads,
            index_head_dim,
            index_topk,
            candidate: read_candidate(t),
            hc_mult: t.size("hc_mult", 1, limit::COPIES),
            hc_sinkhorn_iters: t.size("hc_sinkhorn_iters", 1, 1000),
            hc_eps: t.number("hc_eps", 0.0, 1.0) as f32,
            engram: read_engram(t),
            draft,
            vision,
            quantized,
        }
    }

    /// Fields with one supported value.
    fn read_fixed(&mut self) {
        let t = &mut self.text;
        t.only("model_type", json!("deepseek_v41_text"));
        t.only("num_key_value_heads", json!(1));
        t.only("n_shared_experts", json!(1));
        t.only("hidden_act", json!("silu"));
        t.only("attention_bias", json!(false));
        t.only("attention_dropout", json!(0.0));
        t.only("tie_word_embeddings", json!(false));
        t.only("scoring_func", json!("sqrtsoftplus"));
        t.only("topk_method", json!("noaux_tc"));
        t.only("hc_shifted", json!(true));
        t.only("dspark_target_attn_input", json!(true));
        t.only("use_fp4_sparse_kv", json!(true));
        let sources = t.get("kv_source_layer_ids").cloned().unwrap_or(Value::Null);
        t.only("index_k_source_layer_ids", sources);
    }

    fn read_scaling(&mut self) -> Option<RopeScaling> {
        let s = self.scaling.as_mut()?;
        // Older files say `type`.
        s.only("type", json!("yarn"));
        if s.get("type").is_some() {
            s.only("rope_type", json!("yarn"));
        } else {
            s.exactly("rope_type", json!("yarn"));
        }
        Some(RopeScaling {
            factor: s.number("factor", 1.0, 1e9),
            beta_fast: s.number("beta_fast", 1e-6, 1e9),
            beta_slow: s.number("beta_slow", 1e-6, 1e9),
            original_max_position_embeddings: s.size("original_max_position_embeddings", 1, limit::POSITIONS),
        })
    }
}

fn token(fields: &mut Fields<'_>, key: &'static str) -> u32 {
    fields.size(key, 0, limit::VOCAB) as u32
}

fn read_candidate(t: &mut Fields<'_>) -> Option<CandidateShape> {
    match t.optional_size("candidate_source_layer_id", 0, limit::LAYERS) {
        Some(source_layer) => Some(CandidateShape {
            source_layer,
            topk_blocks: t.size("candidate_topk_blocks", 1, limit::VOCAB),
            block_size: t.size("candidate_block_size", 1, limit::WIDTH),
        }),
        None => {
            t.get("candidate_topk_blocks");
            t.get("candidate_block_size");
            None
        }
    }
}

const ENGRAM_KEYS: [&str; 7] = [
    "engram_num_embeddings",
    "engram_max_ngram_size",
    "engram_vocab_size",
    "engram_n_heads",
    "engram_head_dim",
    "engram_pad_token_id",
    "engram_compressed_vocab_size",
];

fn read_engram(t: &mut Fields<'_>) -> Option<EngramShape> {
    let layer_ids = t.optional_list("engram_layer_ids", 0, limit::LAYERS);
    if layer_ids.is_empty() {
        for key in ENGRAM_KEYS {
            t.get(key);
        }
        return None;
    }
    Some(EngramShape {
        layer_ids,
        num_embeddings: t.list("engram_num_embeddings", 1, limit::ENGRAM_ROWS),
        max_ngram_size: t.size("engram_max_ngram_size", 2, 64),
        vocab_size: t.size("engram_vocab_size", 2, limit::ENGRAM_ROWS),
        n_heads: t.size("engram_n_heads", 1, 256),
        head_dim: t.size("engram_head_dim", 1, limit::WIDTH),
        pad_token_id: token(t, "engram_pad_token_id"),
        compressed_vocab_size: t.size("engram_compressed_vocab_size", 1, limit::VOCAB),
    })
}

const DRAFT_KEYS: [&str; 6] = [
    "dspark_block_size",
    "dspark_noise_token_id",
    "dspark_target_layer_ids",
    "dspark_markov_rank",
    "dspark_n_routed_experts",
    "dspark_num_experts_per_tok",
];

fn read_draft(t: &mut Fields<'_>) -> Option<DraftShape> {
    let draft_layers = t.optional_size("num_nextn_predict_layers", 0, limit::LAYERS).unwrap_or(0);
    if draft_layers == 0 {
        for key in DRAFT_KEYS {
            t.get(key);
        }
        return None;
    }
    Some(DraftShape {
        layers: draft_layers,
        block_size: t.size("dspark_block_size", 1, 1 << 10),
        noise_token_id: token(t, "dspark_noise_token_id"),
        target_layer_ids: t.list("dspark_target_layer_ids", 0, limit::LAYERS),
        markov_rank: t.size("dspark_markov_rank", 1, limit::WIDTH),
        n_routed_experts: t.size("dspark_n_routed_experts", 1, limit::EXPERTS),
        num_experts_per_tok: t.size("dspark_num_experts_per_tok", 1, limit::EXPERTS),
    })
}
