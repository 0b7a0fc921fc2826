//! Random configurations: independent small numbers, and the consistent `config.json` that they stand for.

use proptest::collection::vec;
use proptest::prelude::*;
use serde_json::{Value, json};

/// What makes a configuration. Every value of every field is a model.
#[derive(Clone, Debug)]
pub struct Choices {
    pub seed: u64,
    /// Quantized numerics, if the widths allow them.
    pub rounded: bool,
    /// FP8 and FP4 weights; all widths are then multiples of 32.
    quantized: bool,
    widths: [usize; 7],
    heads: (usize, usize),
    window: usize,
    layers: Vec<Layer>,
    index: (usize, usize),
    candidate: Option<(usize, usize)>,
    experts: (usize, usize),
    copies: (usize, usize),
    engram: Option<Engram>,
    draft: Option<Draft>,
    limit: usize,
    normalize: bool,
    yarn: bool,
}

/// One backbone layer.
#[derive(Clone, Debug)]
struct Layer {
    window_only: bool,
    new_ratio: Option<usize>,
    kv_source: bool,
    index_source: bool,
    engram: bool,
    target: bool,
}

#[derive(Clone, Debug)]
struct Engram {
    ngram: usize,
    heads: usize,
    width: usize,
    start: usize,
}

#[derive(Clone, Debug)]
struct Draft {
    layers: usize,
    block: usize,
    rank: usize,
    experts: (usize, usize),
}

/// Any configuration.
pub fn any() -> impl Strategy<Value = Choices> {
    let model = (
        any_of::<u64>(),
        any_of::<bool>(),
        any_of::<bool>(),
        // Norms over a few channels only are ill-conditioned: they would ask for the same bits, not for closeness.
        [12..40usize, 8..40, 1..40, 1..40, 6..16, 1..6, 6..16],
        (1..4usize, 1..4usize),
        1..20usize,
        vec(layer(), 1..5),
    );
    let parts = (
        (1..14usize, 1..12usize),
        proptest::option::of((1..5usize, 1..6usize)),
        (1..9usize, 1..9usize),
        (1..5usize, 1..5usize),
        proptest::option::of(engram()),
        proptest::option::of(draft()),
        0..3usize,
        any_of::<bool>(),
        any_of::<bool>(),
    );
    (model, parts).prop_map(|(model, parts)| {
        let (seed, rounded, quantized, widths, heads, window, layers) = model;
        let (index, candidate, experts, copies, engram, draft, limit, normalize, yarn) = parts;
        Choices {
            seed,
            rounded,
            quantized,
            widths,
            heads,
            window,
            layers,
            index,
            candidate,
            experts,
            copies,
            engram,
            draft,
            limit,
            normalize,
            yarn,
        }
    })
}

fn any_of<T: Arbitrary>() -> impl Strategy<Value = T> {
    proptest::arbitrary::any::<T>()
}

fn layer() -> impl Strategy<Value = Layer> {
    let ratio = proptest::option::of(proptest::sample::select(vec![1, 2, 1, 4, 2, 8]));
    let flags = (any_of::<bool>(), any_of::<bool>(), any_of::<bool>(), any_of::<bool>());
    (0..4usize, ratio, flags).prop_map(|(kind, new_ratio, flags)| Layer {
        window_only: kind == 0,
        new_ratio,
        kv_source: flags.0,
        index_source: flags.1,
        engram: flags.2,
        target: flags.3,
    })
}

fn engram() -> impl Strategy<Value = Engram> {
    (2..5usize, 1..4usize, 1..10usize, 2..60usize).prop_map(|(ngram, heads, width, start)| Engram {
        ngram,
        heads,
        width,
        start,
    })
}

fn draft() -> impl Strategy<Value = Draft> {
    (1..3usize, 1..6usize, 1..10usize, (1..5usize, 1..5usize))
        .prop_map(|(layers, block, rank, experts)| Draft { layers, block, rank, experts })
}

/// Fields that have one supported value.
fn fixed_fields() -> serde_json::Map<String, Value> {
    let fields = json!({
        "model_type": "deepseek_v41_text",
        "num_key_value_heads": 1,
        "n_shared_experts": 1,
        "hidden_act": "silu",
        "attention_bias": false,
        "attention_dropout": 0.0,
        "tie_word_embeddings": false,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
    });
    fields.as_object().expect("an object").clone()
}

/// Ratios and sources of the backbone layers.
#[derive(Default)]
struct Sources {
    ratios: Vec<usize>,
    kv: Vec<usize>,
    index: Vec<usize>,
}

impl Choices {
    /// The configuration. Engram counts are left to whoever writes the checkpoint.
    pub fn config(&self) -> Value {
        let mut text = self.text();
        let fields = text.as_object_mut().expect("an object");
        fields.extend(fixed_fields());
        fields.extend(self.engram_fields());
        fields.extend(self.draft_fields());
        let mut config = json!({
            "architectures": ["DeepseekV41ForCausalLM"],
            "model_type": "deepseek_v41",
            "dtype": "bfloat16",
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 2,
            "text_config": text,
        });
        if self.quantized {
            config["quantization_config"] = json!({
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "weight_block_size": [32, 32],
                "scale_fmt": "ue8m0",
                "expert_dtype": "fp4",
            });
        }
        config
    }

    /// A width as chosen, or the multiple of 32 that stands for it.
    fn width(&self, chosen: usize) -> usize {
        if self.quantized { 32 * (1 + chosen / 20) } else { chosen }
    }

    fn text(&self) -> Value {
        let [hidden, q_rank, o_rank, expert, above, pairs, index_above] = self.widths;
        let rope = 2 * pairs;
        let head = |above: usize| {
            if self.quantized { 32 * (1 + above / 8) } else { rope + above }
        };
        let (groups, heads) = self.heads;
        let (experts, top_k) = self.experts;
        let sources = self.sources();
        let draft_layers = self.draft.as_ref().map_or(0, |d| d.layers);
        let ratios: Vec<usize> = sources.ratios.iter().copied().chain(vec![0; draft_layers]).collect();
        let candidate = self.candidate_layer(&sources);
        let (topk_blocks, block_size) = self.candidate.unwrap_or((1, 1));
        let limit = [0.0, 0.5, 10.0][self.limit];
        let yarn = json!({
            "rope_type": "yarn", "factor": 4, "beta_fast": 16, "beta_slow": 1,
            "original_max_position_embeddings": 32,
        });
        json!({
            "vocab_size": 512 + self.window,
            "hidden_size": self.width(hidden),
            "moe_intermediate_size": self.width(expert),
            "num_hidden_layers": self.layers.len(),
            "num_attention_heads": groups * heads,
            "head_dim": head(above),
            "qk_rope_head_dim": rope,
            "q_lora_rank": self.width(q_rank),
            "o_lora_rank": self.width(o_rank),
            "o_groups": groups,
            "swiglu_limit": limit,
            "rms_norm_eps": 1e-12,
            "max_position_embeddings": 512,
            "rope_theta": 10_000,
            "compress_rope_theta": 20_000,
            "rope_scaling": if self.yarn { yarn } else { Value::Null },
            "n_routed_experts": experts,
            "num_experts_per_tok": top_k.min(experts),
            "norm_topk_prob": self.normalize,
            "routed_scaling_factor": 1.5,
            "sliding_window": self.window,
            "compress_ratios": ratios,
            "kv_source_layer_ids": sources.kv,
            "index_source_layer_ids": sources.index,
            "index_n_heads": self.index.0,
            "index_head_dim": head(index_above),
            "index_topk": self.index.1,
            "candidate_source_layer_id": candidate,
            "candidate_topk_blocks": topk_blocks,
            "candidate_block_size": block_size,
            "hc_mult": self.copies.0,
            "hc_sinkhorn_iters": self.copies.1,
            "hc_eps": 1e-6,
        })
    }

    /// Sources that fit the ratios: a new ratio begins with both of them, and so does the first compressed layer.
    fn sources(&self) -> Sources {
        let mut sources = Sources::default();
        let mut current = None;
        for (number, layer) in self.layers.iter().enumerate() {
            if layer.window_only {
                sources.ratios.push(0);
                continue;
            }
            let ratio = layer.new_ratio.or(current).unwrap_or(1);
            let begins = current != Some(ratio);
            if begins || layer.kv_source {
                sources.kv.push(number);
            }
            if begins || layer.index_source {
                sources.index.push(number);
            }
            sources.ratios.push(ratio);
            current = Some(ratio);
        }
        sources
    }

    /// The first index source after which no other ratio is indexed, if candidates are chosen at all.
    fn candidate_layer(&self, sources: &Sources) -> Option<usize> {
        self.candidate?;
        let last = sources.ratios[*sources.index.last()?];
        let same = sources.index.iter().rev().take_while(|l| sources.ratios[**l] == last);
        same.last().copied()
    }

    fn engram_fields(&self) -> serde_json::Map<String, Value> {
        let layers: Vec<usize> = (0..self.layers.len()).filter(|l| self.layers[*l].engram).collect();
        let layers = if self.engram.is_some() { layers } else { Vec::new() };
        let chosen = self.engram.clone().unwrap_or(Engram { ngram: 2, heads: 1, width: 1, start: 2 });
        let fields = json!({
            "engram_layer_ids": layers,
            "engram_num_embeddings": vec![1; layers.len()],
            "engram_max_ngram_size": chosen.ngram,
            "engram_vocab_size": chosen.start,
            "engram_n_heads": chosen.heads,
            "engram_head_dim": if self.quantized { 32 } else { chosen.width },
            "engram_pad_token_id": 2,
            "engram_compressed_vocab_size": 1,
        });
        fields.as_object().expect("an object").clone()
    }

    fn draft_fields(&self) -> serde_json::Map<String, Value> {
        let Some(draft) = &self.draft else {
            return serde_json::Map::new();
        };
        let mut targets: Vec<usize> = (0..self.layers.len()).filter(|l| self.layers[*l].target).collect();
        if targets.is_empty() {
            targets.push(self.layers.len() - 1);
        }
        let (experts, top_k) = draft.experts;
        let fields = json!({
            "num_nextn_predict_layers": draft.layers,
            "dspark_block_size": draft.block,
            "dspark_noise_token_id": 3,
            "dspark_target_layer_ids": targets,
            "dspark_markov_rank": self.width(draft.rank),
            "dspark_n_routed_experts": experts,
            "dspark_num_experts_per_tok": top_k.min(experts),
        });
        fields.as_object().expect("an object").clone()
    }
}
