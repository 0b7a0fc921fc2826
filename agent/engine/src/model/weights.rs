//! The weights of a model by layer and role, taken from a checkpoint in their stored formats.

use deepinfer_kernels::{Backend, ExpertSet, ExpertWeights};

use crate::exchange::SlotMap;
use crate::shape::ModelShape;
use crate::weights::Checkpoint;

/// All weights of a model.
pub(crate) struct Weights<B: Backend> {
    /// Token embedding `[vocab, H]`.
    pub embed: B::Weight,
    /// Backbone layers.
    pub layers: Vec<LayerWeights<B>>,
    /// Norm before the head `[H]`.
    pub norm: B::Buf<f32>,
    /// Head `[vocab, H]`.
    pub head: B::Weight,
    /// Draft head, if the model has one.
    pub draft: Option<DraftWeights<B>>,
}

/// One layer, backbone or draft.
pub(crate) struct LayerWeights<B: Backend> {
    /// Layer number, draft layers after the backbone.
    pub number: usize,
    pub attn_norm: B::Buf<f32>,
    pub ffn_norm: B::Buf<f32>,
    pub hc_attn: HcWeights<B>,
    pub hc_ffn: HcWeights<B>,
    pub attention: AttentionWeights<B>,
    /// On KV sources.
    pub compressor: Option<CompressorWeights<B>>,
    /// On index sources.
    pub indexer: Option<IndexerWeights<B>>,
    /// On Engram layers.
    pub engram: Option<EngramWeights<B>>,
    pub moe: MoeWeights<B>,
}

/// Mixes of one sublayer.
pub(crate) struct HcWeights<B: Backend> {
    /// `[m (2 + m), m H]`.
    pub f: B::Weight,
    /// `[3]`.
    pub scale: B::Buf<f32>,
    /// `[m (2 + m)]`.
    pub base: B::Buf<f32>,
}

/// Projections of the attention.
pub(crate) struct AttentionWeights<B: Backend> {
    pub wq_a: B::Weight,
    pub q_norm: B::Buf<f32>,
    pub wq_b: B::Weight,
    pub wkv: B::Weight,
    pub kv_norm: B::Buf<f32>,
    pub wo_a: B::Weight,
    pub wo_b: B::Weight,
    pub sink: B::Buf<f32>,
}

/// From tokens to compressed entries.
pub(crate) struct CompressorWeights<B: Backend> {
    /// Ordinal of the source.
    pub source: usize,
    pub wkv: B::Weight,
    /// Missing where an entry is one token.
    pub wgate: Option<B::Weight>,
    pub norm: B::Buf<f32>,
    pub wk: B::Weight,
    pub k_norm: B::Buf<f32>,
}

/// Index queries.
pub(crate) struct IndexerWeights<B: Backend> {
    pub wq_b: B::Weight,
    pub weights_proj: B::Weight,
}

/// N-gram table of a layer.
pub(crate) struct EngramWeights<B: Backend> {
    /// Ordinal of the table.
    pub ordinal: usize,
    pub table: B::Weight,
    pub wkv: B::Weight,
    /// `[m, H]`.
    pub q_weight: B::Buf<f32>,
    /// `[m, H]`.
    pub k_weight: B::Buf<f32>,
}

/// Experts of a layer.
pub(crate) struct MoeWeights<B: Backend> {
    /// Experts picked per row.
    pub top_k: usize,
    pub gate: B::Weight,
    pub bias: B::Buf<f32>,
    pub bias_image: B::Buf<f32>,
    pub experts: ExpertSet<B::Weight>,
    pub shared: ExpertWeights<B::Weight>,
}

/// Draft layers and what is special about them.
pub(crate) struct DraftWeights<B: Backend> {
    pub layers: Vec<LayerWeights<B>>,
    /// `[H, targets * H]`.
    pub main_proj: B::Weight,
    pub main_norm: B::Buf<f32>,
    pub norm: B::Buf<f32>,
    /// `[vocab, rank]`.
    pub markov_embed: B::Weight,
    /// `[vocab, rank]`.
    pub markov_head: B::Weight,
    /// `[1, H + rank]`.
    pub confidence: B::Weight,
}

/// Takes tensors by name.
struct Loader<'a, B> {
    backend: &'a B,
    checkpoint: &'a Checkpoint,
    shape: &'a ModelShape,
    /// Experts of each backbone layer that this rank holds.
    map: &'a SlotMap,
    rank: usize,
}

impl<B: Backend> Weights<B> {
    /// Takes all weights that a rank uses: of the backbone's experts only its own. A host backend copies no
    /// matrix.
    pub fn load(backend: &B, checkpoint: &Checkpoint, map: &SlotMap, rank: usize) -> Self {
        let shape = &checkpoint.shape;
        let loader = Loader { backend, checkpoint, shape, map, rank };
        Self {
            embed: loader.matrix("", "embed.weight"),
            layers: (0..shape.num_hidden_layers).map(|layer| loader.layer(layer)).collect(),
            norm: loader.vector("", "norm.weight"),
            head: loader.matrix("", "head.weight"),
            draft: shape.draft.as_ref().map(|_| loader.draft()),
        }
    }
}

impl<B: Backend> Loader<'_, B> {
    fn matrix(&self, prefix: &str, name: &str) -> B::Weight {
        self.backend.weight(self.checkpoint.matrix(&format!("{prefix}{name}")))
    }

    fn vector(&self, prefix: &str, name: &str) -> B::Buf<f32> {
        let values = self.checkpoint.vector(&format!("{prefix}{name}"));
        let mut buffer = self.backend.alloc(values.len());
        self.backend.write(&mut buffer, 0, &values);
        buffer
    }

    fn layer(&self, number: usize) -> LayerWeights<B> {
        let shape = self.shape;
        let p = shape.layer_prefix(number);
        let compressed = !shape.is_draft(number);
        LayerWeights {
            number,
            attn_norm: self.vector(&p, "attn_norm.weight"),
            ffn_norm: self.vector(&p, "ffn_norm.weight"),
            hc_attn: self.hyper_connection(&p, "attn"),
            hc_ffn: self.hyper_connection(&p, "ffn"),
            attention: self.attention(&p),
            compressor: (compressed && shape.is_kv_source(number)).then(|| self.compressor(number, &p)),
            indexer: (compressed && shape.is_index_source(number)).then(|| IndexerWeights {
                wq_b: self.matrix(&p, "attn.indexer.wq_b.weight"),
                weights_proj: self.matrix(&p, "attn.indexer.weights_proj.weight"),
            }),
            engram: shape.engram_ordinal(number).map(|ordinal| self.engram(ordinal, &p)),
            moe: self.moe(number, &p),
        }
    }

    fn hyper_connection(&self, p: &str, sublayer: &str) -> HcWeights<B> {
        HcWeights {
            f: self.matrix(p, &format!("hc_{sublayer}_fn")),
            scale: self.vector(p, &format!("hc_{sublayer}_scale")),
            base: self.vector(p, &format!("hc_{sublayer}_base")),
        }
    }

    fn attention(&self, p: &str) -> AttentionWeights<B> {
        AttentionWeights {
            wq_a: self.matrix(p, "attn.wq_a.weight"),
            q_norm: self.vector(p, "attn.q_norm.weight"),
            wq_b: self.matrix(p, "attn.wq_b.weight"),
            wkv: self.matrix(p, "attn.wkv.weight"),
            kv_norm: self.vector(p, "attn.kv_norm.weight"),
            wo_a: self.matrix(p, "attn.wo_a.weight"),
            wo_b: self.matrix(p, "attn.wo_b.weight"),
            sink: self.vector(p, "attn.attn_sink"),
        }
    }

    fn compressor(&self, number: usize, p: &str) -> CompressorWeights<B> {
        let sources = &self.shape.kv_source_layer_ids;
        CompressorWeights {
            source: sources.iter().position(|&l| l == number).expect("the layer is a source"),
            wkv: self.matrix(p, "attn.compressor.wkv.weight"),
            wgate: (self.shape.ratio(number) > 1).then(|| self.matrix(p, "attn.compressor.wgate.weight")),
            norm: self.vector(p, "attn.compressor.norm.weight"),
            wk: self.matrix(p, "attn.indexer.wk.weight"),
            k_norm: self.vector(p, "attn.indexer.k_norm.weight"),
        }
    }

    fn engram(&self, ordinal: usize, p: &str) -> EngramWeights<B> {
        EngramWeights {
            ordinal,
            table: self.matrix(p, "engram.embed.weight"),
            wkv: self.matrix(p, "engram.wkv.weight"),
            q_weight: self.vector(p, "engram.q_weight"),
            k_weight: self.vector(p, "engram.k_weight"),
        }
    }

    fn moe(&self, number: usize, p: &str) -> MoeWeights<B> {
        let expert = |e: u32| self.expert(&format!("{p}ffn.experts.{e}."));
        let slots: Vec<_> = if self.shape.is_draft(number) {
            (0..self.shape.experts(number) as u32).map(expert).collect()
        } else {
            self.map.local(number, self.rank).iter().copied().map(expert).collect()
        };
        MoeWeights {
            top_k: self.shape.top_k(number),
            gate: self.matrix(p, "ffn.gate.weight"),
            bias: self.vector(p, "ffn.gate.bias"),
            bias_image: self.vector(p, "ffn.gate.bias_vl"),
            // Alone, a rank holds all experts in order; among several, rows come by slot.
            experts: ExpertSet { slot_of: (0..slots.len() as u32).collect(), slots },
            shared: self.expert(&format!("{p}ffn.shared_experts.")),
        }
    }

    fn expert(&self, p: &str) -> ExpertWeights<B::Weight> {
        ExpertWeights {
            w1: self.matrix(p, "w1.weight"),
            w3: self.matrix(p, "w3.weight"),
            w2: self.matrix(p, "w2.weight"),
        }
    }

    fn draft(&self) -> DraftWeights<B> {
        let layers = self.shape.num_hidden_layers..self.shape.total_layers();
        let first = self.shape.layer_prefix(layers.start);
        let last = self.shape.layer_prefix(layers.end - 1);
        DraftWeights {
            main_proj: self.matrix(&first, "main_proj.weight"),
            main_norm: self.vector(&first, "main_norm.weight"),
            norm: self.vector(&last, "norm.weight"),
            markov_embed: self.matrix(&last, "markov_head.embed.weight"),
            markov_head: self.matrix(&last, "markov_head.head.weight"),
            confidence: self.matrix(&last, "confidence_head.proj.weight"),
            layers: layers.map(|layer| self.layer(layer)).collect(),
        }
    }
}
