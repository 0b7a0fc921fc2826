//! The shape of a model: every number of `config.json`, checked, and the maps that follow from them.
//!
//! Invariant: a `ModelShape` comes from [`crate::config::parse`] only, so its fields do not contradict each
//! other and no product of two of them overflows. Fields keep the names of the configuration.

/// YaRN parameters of the layers with compressed KV.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RopeScaling {
    /// How much longer the context is than the original one.
    pub factor: f64,
    /// Rotations above which a frequency is kept.
    pub beta_fast: f64,
    /// Rotations below which a frequency is divided by `factor`.
    pub beta_slow: f64,
    /// Context length before the extension, tokens.
    pub original_max_position_embeddings: usize,
}

/// The first level of the two-level selection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CandidateShape {
    /// Index source whose scores choose the blocks; later index sources look only inside them.
    pub source_layer: usize,
    /// Blocks kept per row.
    pub topk_blocks: usize,
    /// Entries in a block.
    pub block_size: usize,
}

/// The n-gram table lookup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngramShape {
    /// Layers that have a table, ascending.
    pub layer_ids: Vec<usize>,
    /// Table rows of each of these layers; equals the sum of its hash primes.
    pub num_embeddings: Vec<usize>,
    /// Longest n-gram; 2 to this length are hashed.
    pub max_ngram_size: usize,
    /// Where the prime search starts.
    pub vocab_size: usize,
    /// Rows per token and n-gram length.
    pub n_heads: usize,
    /// Channels of a row.
    pub head_dim: usize,
    /// Raw token id whose compressed id stands for "nothing before".
    pub pad_token_id: u32,
    /// Number of compressed token ids.
    pub compressed_vocab_size: usize,
}

impl EngramShape {
    /// Table rows read per token and layer: n-gram lengths times heads.
    pub fn columns(&self) -> usize {
        (self.max_ngram_size - 1) * self.n_heads
    }

    /// Channels of the gathered rows of one token: input of `engram.wkv`.
    pub fn width(&self) -> usize {
        self.columns() * self.head_dim
    }
}

/// The draft layers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DraftShape {
    /// Number of draft layers, `num_nextn_predict_layers`.
    pub layers: usize,
    /// Tokens proposed at once.
    pub block_size: usize,
    /// Id of the tokens not known yet in a draft block.
    pub noise_token_id: u32,
    /// Backbone layers whose input feeds the draft, ascending.
    pub target_layer_ids: Vec<usize>,
    /// Width of the Markov embedding.
    pub markov_rank: usize,
    /// Experts of a draft layer.
    pub n_routed_experts: usize,
    /// Experts picked per row in a draft layer.
    pub num_experts_per_tok: usize,
}

/// All sizes of a model. See the module's invariant.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelShape {
    /// Begin of sequence.
    pub bos_token_id: u32,
    /// End of sequence.
    pub eos_token_id: u32,
    /// Padding; also the default Engram pad token.
    pub pad_token_id: u32,
    /// Stands for every position of an image span; `None` for a text model.
    pub image_token_id: Option<u32>,
    /// Rows of embedding and head.
    pub vocab_size: usize,
    /// Channels of a copy of the stream, `H`.
    pub hidden_size: usize,
    /// Backbone layers, `L`.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Channels of a query head and of the one key/value vector.
    pub head_dim: usize,
    /// Last channels of a head that are rotated.
    pub qk_rope_head_dim: usize,
    /// Width of the query latent.
    pub q_lora_rank: usize,
    /// Width of each group of the output projection.
    pub o_lora_rank: usize,
    /// Groups of the output projection.
    pub o_groups: usize,
    /// Clamp of SwiGLU; 0 or less: none.
    pub swiglu_limit: f32,
    /// Epsilon of every norm of the text model.
    pub rms_norm_eps: f32,
    /// Context limit, tokens.
    pub max_position_embeddings: usize,
    /// RoPE base of window-only and draft layers.
    pub rope_theta: f64,
    /// RoPE base of the layers with compressed KV.
    pub compress_rope_theta: f64,
    /// YaRN of the layers with compressed KV.
    pub rope_scaling: Option<RopeScaling>,
    /// Experts of a backbone layer.
    pub n_routed_experts: usize,
    /// Experts picked per row in a backbone layer.
    pub num_experts_per_tok: usize,
    /// Hidden channels of an expert, routed or shared.
    pub moe_intermediate_size: usize,
    /// Whether picked scores are divided by their sum.
    pub norm_topk_prob: bool,
    /// Factor on routed expert weights.
    pub routed_scaling_factor: f32,
    /// Window length, the query's own position included.
    pub sliding_window: usize,
    /// Tokens per compressed entry of every backbone and draft layer; 0: window only.
    pub compress_ratios: Vec<usize>,
    /// Layers that produce compressed KV and index keys, ascending.
    pub kv_source_layer_ids: Vec<usize>,
    /// Layers that select entries, ascending.
    pub index_source_layer_ids: Vec<usize>,
    /// Index heads.
    pub index_n_heads: usize,
    /// Channels of an index head and key.
    pub index_head_dim: usize,
    /// Entries selected per row.
    pub index_topk: usize,
    /// Two-level selection, if configured.
    pub candidate: Option<CandidateShape>,
    /// Copies of the stream, `m`.
    pub hc_mult: usize,
    /// Sinkhorn iterations.
    pub hc_sinkhorn_iters: usize,
    /// Epsilon of the hyper-connection mixes.
    pub hc_eps: f32,
    /// N-gram tables, if any layer has one.
    pub engram: Option<EngramShape>,
    /// Draft layers, if there are any.
    pub draft: Option<DraftShape>,
    /// Whether the checkpoint carries a vision tower (its tensors are skipped).
    pub vision: bool,
    /// Whether linear weights are stored in FP8 and FP4 (`quantization_config`).
    pub quantized: bool,
}

impl ModelShape {
    /// Backbone and draft layers; draft layer `i` has the number `num_hidden_layers + i`.
    pub fn total_layers(&self) -> usize {
        self.num_hidden_layers + self.draft_layers()
    }

    /// Draft layers; 0 without any.
    pub fn draft_layers(&self) -> usize {
        self.draft.as_ref().map_or(0, |d| d.layers)
    }

    /// Whether the layer belongs to the draft head.
    pub fn is_draft(&self, layer: usize) -> bool {
        layer >= self.num_hidden_layers
    }

    /// Prefix of the tensors of a layer: `layers.3.` or `mtp.0.`.
    pub fn layer_prefix(&self, layer: usize) -> String {
        match layer.checked_sub(self.num_hidden_layers) {
            None => format!("layers.{layer}."),
            Some(draft) => format!("mtp.{draft}."),
        }
    }

    /// Tokens per compressed entry that the layer attends to; 0 for a window-only layer.
    pub fn ratio(&self, layer: usize) -> usize {
        self.compress_ratios[layer]
    }

    /// Layer whose compressed KV this layer reads; `None` for a window-only layer.
    pub fn kv_source(&self, layer: usize) -> Option<usize> {
        self.nearest(layer, &self.kv_source_layer_ids)
    }

    /// Layer whose selection this layer uses; `None` for a window-only layer.
    pub fn index_source(&self, layer: usize) -> Option<usize> {
        self.nearest(layer, &self.index_source_layer_ids)
    }

    fn nearest(&self, layer: usize, sources: &[usize]) -> Option<usize> {
        if self.ratio(layer) == 0 {
            return None;
        }
        sources.iter().copied().rfind(|&s| s <= layer)
    }

    /// Whether the layer owns a compressor and index keys.
    pub fn is_kv_source(&self, layer: usize) -> bool {
        self.kv_source_layer_ids.contains(&layer)
    }

    /// Whether the layer runs an indexer.
    pub fn is_index_source(&self, layer: usize) -> bool {
        self.index_source_layer_ids.contains(&layer)
    }

    /// Whether the layer's indexer looks only inside the candidate blocks of an earlier layer.
    pub fn is_restricted(&self, layer: usize) -> bool {
        self.is_index_source(layer) && self.candidate.is_some_and(|c| layer > c.source_layer)
    }

    /// First layer that reads one entry per token: there the decoder half starts. `None` if no layer does.
    pub fn first_consumer(&self) -> Option<usize> {
        (0..self.num_hidden_layers).find(|&l| self.ratio(l) == 1)
    }

    /// Which Engram table the layer has, counted from 0.
    pub fn engram_ordinal(&self, layer: usize) -> Option<usize> {
        self.engram.as_ref()?.layer_ids.iter().position(|&l| l == layer)
    }

    /// Routed experts of a layer, backbone or draft.
    pub fn experts(&self, layer: usize) -> usize {
        match &self.draft {
            Some(draft) if self.is_draft(layer) => draft.n_routed_experts,
            _ => self.n_routed_experts,
        }
    }

    /// Experts picked per row in a layer, backbone or draft.
    pub fn top_k(&self, layer: usize) -> usize {
        match &self.draft {
            Some(draft) if self.is_draft(layer) => draft.num_experts_per_tok,
            _ => self.num_experts_per_tok,
        }
    }

    /// Channels of the features that feed the draft: target layers times hidden size; 0 without draft layers.
    pub fn draft_features(&self) -> usize {
        self.draft.as_ref().map_or(0, |d| d.target_layer_ids.len() * self.hidden_size)
    }

    /// Rows of the hyper-connection matrices: pre, post and comb of one sublayer.
    pub fn hc_rows(&self) -> usize {
        self.hc_mult * (2 + self.hc_mult)
    }

    /// What keeps the quantized numerics from running on this shape, each with its field; empty if nothing
    /// does. Widths that are rounded in groups must be whole groups.
    pub fn check_quantized(&self) -> Vec<String> {
        let mut widths = vec![("text_config.head_dim".to_string(), self.head_dim)];
        if !self.kv_source_layer_ids.is_empty() {
            widths.push(("text_config.index_head_dim".to_string(), self.index_head_dim));
        }
        if self.quantized {
            widths.extend(self.quantized_inputs());
        }
        widths
            .into_iter()
            .filter(|&(_, width)| !width.is_multiple_of(deepinfer_kernels::formats::GROUP))
            .map(|(field, width)| {
                format!(
                    "{field} is {width}, quantized numerics need a multiple of 32 (or use --numerics f32)"
                )
            })
            .collect()
    }

    /// Input widths of the weights that are stored in FP8 or FP4, whose inputs are rounded.
    fn quantized_inputs(&self) -> Vec<(String, usize)> {
        let mut widths = vec![
            ("text_config.hidden_size".to_string(), self.hidden_size),
            ("text_config.q_lora_rank".to_string(), self.q_lora_rank),
            ("text_config.o_groups * o_lora_rank".to_string(), self.o_groups * self.o_lora_rank),
            ("text_config.moe_intermediate_size".to_string(), self.moe_intermediate_size),
        ];
        if let Some(engram) = &self.engram {
            let field = "text_config.(engram_max_ngram_size - 1) * engram_n_heads * engram_head_dim";
            widths.push((field.to_string(), engram.width()));
        }
        widths
    }

    /// What keeps consumer truncation (`mask`, `compact`) from running on this shape; empty if nothing does.
    pub fn check_truncation(&self) -> Vec<String> {
        match self.first_consumer() {
            None => vec![
                "text_config.compress_ratios has no layer with ratio 1: there is no decoder half".to_string(),
            ],
            Some(first) if self.kv_source_layer_ids.last() != Some(&first) => vec![format!(
                "text_config.kv_source_layer_ids: the first layer with ratio 1 ({first}) must be the last KV source"
            )],
            Some(_) => Vec::new(),
        }
    }
}
