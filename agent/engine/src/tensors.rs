//! Every tensor that a model of a given shape consists of (model.md section 3): one list for the check of a
//! checkpoint, for `inspect`, for random checkpoints and for counting the bytes that a decoded token reads.

use deepinfer_kernels::WeightFormat;
use safetensors::Dtype;

use crate::shape::ModelShape;

/// What a tensor is for, and so in which formats it may be stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TensorKind {
    /// Kept in float32: sinks, biases, hyper-connection scales and bases.
    Float,
    /// Matrices of the hyper-connections: F32, or BF16 as one public writer has them.
    Mixing,
    /// BF16 in the released model: norms, embeddings, small projections.
    Plain,
    /// Dense linear: FP8 with 32 x 32 blocks if the model is quantized.
    Dense,
    /// Matrix of a routed expert: FP4 if the model is quantized.
    Expert,
    /// Engram table: FP8 with a scale per row and 32 columns if the model is quantized.
    Table,
}

impl TensorKind {
    /// Format in which the released layout stores the kind.
    pub fn format(self, quantized: bool) -> WeightFormat {
        match self {
            TensorKind::Float | TensorKind::Mixing => WeightFormat::F32,
            TensorKind::Dense if quantized => WeightFormat::Fp8,
            TensorKind::Expert if quantized => WeightFormat::Fp4,
            TensorKind::Table if quantized => WeightFormat::Fp8Rows,
            _ => WeightFormat::Bf16,
        }
    }

    /// Format of a tensor of this kind that a checkpoint stores as `dtype`; `None` if it may not.
    pub fn format_of(self, dtype: Dtype, quantized: bool) -> Option<WeightFormat> {
        match (dtype, self) {
            (Dtype::F32, _) => Some(WeightFormat::F32),
            (Dtype::BF16, kind) if kind != TensorKind::Float => Some(WeightFormat::Bf16),
            (Dtype::F8_E4M3, TensorKind::Dense) if quantized => Some(WeightFormat::Fp8),
            (Dtype::F8_E4M3, TensorKind::Table) if quantized => Some(WeightFormat::Fp8Rows),
            (Dtype::I8 | Dtype::U8, TensorKind::Expert) if quantized => Some(WeightFormat::Fp4),
            _ => None,
        }
    }

    /// The formats a checkpoint may use, for error messages.
    pub fn expected(self, quantized: bool) -> &'static str {
        match self {
            TensorKind::Float => "F32",
            TensorKind::Dense if quantized => "F8_E4M3 with a scale, BF16 or F32",
            TensorKind::Expert if quantized => "I8 (FP4 pairs) with a scale, BF16 or F32",
            TensorKind::Table if quantized => "F8_E4M3 with a scale per row, BF16 or F32",
            TensorKind::Dense | TensorKind::Expert | TensorKind::Table => {
                "BF16 or F32 (config.json has no quantization_config)"
            }
            TensorKind::Mixing | TensorKind::Plain => "BF16 or F32",
        }
    }
}

/// Part of the model, for reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Part {
    /// Token embedding.
    Embedding,
    /// Projections, norms and sinks of the attention.
    Attention,
    /// Compressors and indexers of the source layers.
    Index,
    /// Gate, its biases, and the norm before it.
    Router,
    /// Routed experts.
    Experts,
    /// Shared experts.
    SharedExperts,
    /// Mixes of the residual copies.
    HyperConnections,
    /// Engram tables.
    EngramTables,
    /// Engram projections and gates.
    EngramProjections,
    /// Output head and its norm.
    Head,
    /// Draft layers, all of their parts.
    Draft,
    /// Delimiter embeddings of image spans.
    Image,
}

impl Part {
    /// All parts in the order of reports.
    pub const ALL: [Part; 12] = [
        Part::Embedding,
        Part::Attention,
        Part::Index,
        Part::Router,
        Part::Experts,
        Part::SharedExperts,
        Part::HyperConnections,
        Part::EngramTables,
        Part::EngramProjections,
        Part::Head,
        Part::Draft,
        Part::Image,
    ];

    /// Name for people.
    pub fn name(self) -> &'static str {
        match self {
            Part::Embedding => "embedding",
            Part::Attention => "attention",
            Part::Index => "compressors and indexers",
            Part::Router => "router",
            Part::Experts => "routed experts",
            Part::SharedExperts => "shared experts",
            Part::HyperConnections => "hyper-connections",
            Part::EngramTables => "engram tables",
            Part::EngramProjections => "engram projections",
            Part::Head => "head",
            Part::Draft => "draft layers",
            Part::Image => "image delimiters",
        }
    }
}

/// How much of a tensor one decoded token reads (plain decoding, without proposing drafts).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reads {
    /// All of it.
    All,
    /// `picked` of the `experts` tensors of its kind, so on average this share.
    Picked {
        /// Experts of the layer.
        experts: usize,
        /// Experts that a token picks.
        picked: usize,
    },
    /// So many of its rows.
    Rows(usize),
    /// Nothing: read only for drafts or image spans.
    Nothing,
}

/// One tensor of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Name without the optional `model.` prefix.
    pub name: String,
    /// Logical shape, `[out, in]` or `[len]`. FP4 data has half as many columns.
    pub shape: Vec<usize>,
    /// What it is for.
    pub kind: TensorKind,
    /// Part of the model.
    pub part: Part,
    /// Share that a decoded token reads.
    pub reads: Reads,
    /// Whether a checkpoint without it is broken.
    pub required: bool,
}

impl TensorSpec {
    /// Rows of the tensor as a matrix; a vector is one row.
    pub fn rows(&self) -> usize {
        if self.shape.len() == 1 { 1 } else { self.shape[0] }
    }

    /// Columns of the tensor as a matrix.
    pub fn cols(&self) -> usize {
        self.shape[self.shape.len() - 1]
    }

    /// Number of values.
    pub fn elements(&self) -> u64 {
        self.rows() as u64 * self.cols() as u64
    }

    /// Name of the scale, should the tensor be stored with one.
    pub fn scale_name(&self) -> String {
        scale_name(&self.name)
    }

    /// Shape of the stored values.
    pub fn data_shape(&self, format: WeightFormat) -> Vec<usize> {
        let mut shape = self.shape.clone();
        if format == WeightFormat::Fp4
            && let Some(cols) = shape.last_mut()
        {
            *cols /= 2;
        }
        shape
    }

    /// Bytes of values and scales in a format.
    pub fn bytes(&self, format: WeightFormat) -> u64 {
        let (rows, cols) = (self.rows(), self.cols());
        let (scale_rows, scale_cols) = format.scale_shape(rows, cols);
        format.data_bytes(rows, cols) as u64 + (scale_rows * scale_cols) as u64
    }

    /// Share of the tensor that one decoded token reads on average.
    pub fn active_share(&self) -> f64 {
        match self.reads {
            Reads::All => 1.0,
            Reads::Picked { experts, picked } => picked as f64 / experts as f64,
            Reads::Rows(rows) => rows as f64 / self.rows() as f64,
            Reads::Nothing => 0.0,
        }
    }
}

/// Name of the scale of a weight: `X.weight` has `X.scale`.
pub fn scale_name(weight: &str) -> String {
    format!("{}scale", weight.strip_suffix("weight").unwrap_or(weight))
}

/// Whether a checkpoint may carry a tensor of this name that the text model does not use.
pub fn is_skipped(name: &str) -> bool {
    name.starts_with("vision.") || name.starts_with("aligner.")
}

/// All tensors of a model, in the order in which a token meets them.
pub fn expected(shape: &ModelShape) -> Vec<TensorSpec> {
    let mut list = List { shape, specs: Vec::new() };
    let (vocab, hidden) = (shape.vocab_size, shape.hidden_size);
    list.matrix("embed.weight", [vocab, hidden], TensorKind::Plain, Part::Embedding, Reads::Rows(1));
    for name in ["image_start", "image_end", "image_newline"] {
        list.vector(name, hidden, TensorKind::Plain, Part::Image, Reads::Nothing);
        // A text model may leave them out.
        list.last().required = shape.vision;
    }
    for layer in 0..shape.num_hidden_layers {
        list.layer(layer);
    }
    list.vector("norm.weight", hidden, TensorKind::Plain, Part::Head, Reads::All);
    list.matrix("head.weight", [vocab, hidden], TensorKind::Plain, Part::Head, Reads::All);
    if let Some(draft) = &shape.draft {
        let first = shape.layer_prefix(shape.num_hidden_layers);
        let features = [hidden, shape.draft_features()];
        list.matrix(
            &format!("{first}main_proj.weight"),
            features,
            TensorKind::Dense,
            Part::Draft,
            Reads::All,
        );
        list.vector(&format!("{first}main_norm.weight"), hidden, TensorKind::Plain, Part::Draft, Reads::All);
        for layer in shape.num_hidden_layers..shape.total_layers() {
            list.layer(layer);
        }
        let last = shape.layer_prefix(shape.total_layers() - 1);
        let rank = draft.markov_rank;
        let mut plain = |name: &str, dims: [usize; 2]| {
            list.matrix(&format!("{last}{name}"), dims, TensorKind::Plain, Part::Draft, Reads::Nothing);
        };
        plain("markov_head.embed.weight", [vocab, rank]);
        plain("markov_head.head.weight", [vocab, rank]);
        plain("confidence_head.proj.weight", [1, hidden + rank]);
        list.vector(&format!("{last}norm.weight"), hidden, TensorKind::Plain, Part::Draft, Reads::Nothing);
    }
    list.specs
}

struct List<'a> {
    shape: &'a ModelShape,
    specs: Vec<TensorSpec>,
}

impl List<'_> {
    fn push(&mut self, name: &str, shape: Vec<usize>, kind: TensorKind, part: Part, reads: Reads) {
        self.specs.push(TensorSpec { name: name.to_string(), shape, kind, part, reads, required: true });
    }

    fn matrix(&mut self, name: &str, dims: [usize; 2], kind: TensorKind, part: Part, reads: Reads) {
        self.push(name, dims.to_vec(), kind, part, reads);
    }

    fn vector(&mut self, name: &str, len: usize, kind: TensorKind, part: Part, reads: Reads) {
        self.push(name, vec![len], kind, part, reads);
    }

    fn last(&mut self) -> &mut TensorSpec {
        self.specs.last_mut().expect("called after a push")
    }

    /// A backbone layer, or a draft layer: window only, and most of it read for drafts only.
    fn layer(&mut self, layer: usize) {
        let first = self.specs.len();
        let prefix = self.shape.layer_prefix(layer);
        if self.shape.engram_ordinal(layer).is_some() {
            self.engram(layer, &format!("{prefix}engram."));
        }
        self.hyper_connection(&prefix, "attn");
        self.attention(&prefix);
        if self.shape.is_kv_source(layer) {
            self.compressor(layer, &format!("{prefix}attn."));
        }
        if self.shape.is_index_source(layer) {
            self.indexer(&format!("{prefix}attn.indexer."));
        }
        self.hyper_connection(&prefix, "ffn");
        self.experts(layer, &prefix);
        if self.shape.is_draft(layer) {
            // Every token writes the context KV of the draft layers; the rest of them runs when drafts are
            // proposed.
            let context = [format!("{prefix}attn.wkv.weight"), format!("{prefix}attn.kv_norm.weight")];
            for spec in &mut self.specs[first..] {
                spec.part = Part::Draft;
                spec.reads = if context.contains(&spec.name) { Reads::All } else { Reads::Nothing };
            }
        }
    }

    fn engram(&mut self, layer: usize, p: &str) {
        let shape = self.shape;
        let engram = shape.engram.as_ref().expect("the layer has a table");
        let ordinal = shape.engram_ordinal(layer).expect("the layer has a table");
        let table = [engram.num_embeddings[ordinal], engram.head_dim];
        let rows = Reads::Rows(engram.columns());
        self.matrix(&format!("{p}embed.weight"), table, TensorKind::Table, Part::EngramTables, rows);
        let (copies, hidden) = (shape.hc_mult, shape.hidden_size);
        let part = Part::EngramProjections;
        let wkv = [(copies + 1) * hidden, engram.width()];
        self.matrix(&format!("{p}wkv.weight"), wkv, TensorKind::Dense, part, Reads::All);
        for name in ["q_weight", "k_weight"] {
            self.matrix(&format!("{p}{name}"), [copies, hidden], TensorKind::Plain, part, Reads::All);
        }
    }

    fn hyper_connection(&mut self, p: &str, which: &str) {
        let (rows, cols) = (self.shape.hc_rows(), self.shape.hc_mult * self.shape.hidden_size);
        let part = Part::HyperConnections;
        self.matrix(&format!("{p}hc_{which}_fn"), [rows, cols], TensorKind::Mixing, part, Reads::All);
        self.vector(&format!("{p}hc_{which}_base"), rows, TensorKind::Float, part, Reads::All);
        self.vector(&format!("{p}hc_{which}_scale"), 3, TensorKind::Float, part, Reads::All);
        let part = if which == "attn" { Part::Attention } else { Part::Router };
        let name = format!("{p}{which}_norm.weight");
        self.vector(&name, self.shape.hidden_size, TensorKind::Plain, part, Reads::All);
    }

    fn attention(&mut self, prefix: &str) {
        let s = self.shape;
        let (heads, width, hidden) = (s.num_attention_heads, s.head_dim, s.hidden_size);
        let p = format!("{prefix}attn.");
        let (part, all) = (Part::Attention, Reads::All);
        self.vector(&format!("{p}attn_sink"), heads, TensorKind::Float, part, all);
        self.matrix(&format!("{p}wq_a.weight"), [s.q_lora_rank, hidden], TensorKind::Dense, part, all);
        self.vector(&format!("{p}q_norm.weight"), s.q_lora_rank, TensorKind::Plain, part, all);
        self.matrix(&format!("{p}wq_b.weight"), [heads * width, s.q_lora_rank], TensorKind::Dense, part, all);
        self.matrix(&format!("{p}wkv.weight"), [width, hidden], TensorKind::Dense, part, all);
        self.vector(&format!("{p}kv_norm.weight"), width, TensorKind::Plain, part, all);
        let latent = s.o_groups * s.o_lora_rank;
        let wo_a = [latent, heads * width / s.o_groups];
        self.matrix(&format!("{p}wo_a.weight"), wo_a, TensorKind::Dense, part, all);
        self.matrix(&format!("{p}wo_b.weight"), [hidden, latent], TensorKind::Dense, part, all);
    }

    fn compressor(&mut self, layer: usize, p: &str) {
        let s = self.shape;
        let (part, all) = (Part::Index, Reads::All);
        let wkv = [s.head_dim, s.hidden_size];
        self.matrix(&format!("{p}compressor.wkv.weight"), wkv, TensorKind::Plain, part, all);
        if s.ratio(layer) > 1 {
            self.matrix(&format!("{p}compressor.wgate.weight"), wkv, TensorKind::Plain, part, all);
        }
        self.vector(&format!("{p}compressor.norm.weight"), s.head_dim, TensorKind::Plain, part, all);
        let wk = [s.index_head_dim, s.head_dim];
        self.matrix(&format!("{p}indexer.wk.weight"), wk, TensorKind::Plain, part, all);
        self.vector(&format!("{p}indexer.k_norm.weight"), s.index_head_dim, TensorKind::Plain, part, all);
    }

    fn indexer(&mut self, p: &str) {
        let s = self.shape;
        let (part, all) = (Part::Index, Reads::All);
        let wq_b = [s.index_n_heads * s.index_head_dim, s.q_lora_rank];
        self.matrix(&format!("{p}wq_b.weight"), wq_b, TensorKind::Dense, part, all);
        let proj = [s.index_n_heads, s.hidden_size];
        self.matrix(&format!("{p}weights_proj.weight"), proj, TensorKind::Plain, part, all);
    }

    fn experts(&mut self, layer: usize, prefix: &str) {
        let s = self.shape;
        let (experts, picked) = (s.experts(layer), s.top_k(layer));
        let p = format!("{prefix}ffn.");
        let gate = [experts, s.hidden_size];
        self.matrix(&format!("{p}gate.weight"), gate, TensorKind::Plain, Part::Router, Reads::All);
        self.vector(&format!("{p}gate.bias"), experts, TensorKind::Float, Part::Router, Reads::All);
        self.vector(&format!("{p}gate.bias_vl"), experts, TensorKind::Float, Part::Router, Reads::Nothing);
        for expert in 0..experts {
            let share = Reads::Picked { experts, picked };
            self.expert(&format!("{p}experts.{expert}."), TensorKind::Expert, Part::Experts, share);
        }
        self.expert(&format!("{p}shared_experts."), TensorKind::Dense, Part::SharedExperts, Reads::All);
    }

    fn expert(&mut self, p: &str, kind: TensorKind, part: Part, reads: Reads) {
        let (hidden, inner) = (self.shape.hidden_size, self.shape.moe_intermediate_size);
        self.matrix(&format!("{p}w1.weight"), [inner, hidden], kind, part, reads);
        self.matrix(&format!("{p}w3.weight"), [inner, hidden], kind, part, reads);
        self.matrix(&format!("{p}w2.weight"), [hidden, inner], kind, part, reads);
    }
}
