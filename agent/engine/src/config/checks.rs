//! Contradictions between fields of a configuration. A check runs only if its fields could be read.

use super::Sections;
use crate::engram;
use crate::shape::{EngramShape, ModelShape};

/// Tensors above which a configuration is surely a mistake (the real model has about 100,000).
const MAX_EXPERT_TENSORS: usize = 1 << 22;

/// Tokens of a KV block: compressed entries may not cross it.
const BLOCK: usize = deepinfer_serving::batch::BLOCK_TOKENS;

impl Sections<'_> {
    pub(super) fn check(&mut self, s: &ModelShape) {
        self.check_tokens(s);
        self.check_widths(s);
        self.check_experts(s);
        if self.check_ratios(s) {
            self.check_sources(s);
            self.check_candidate(s);
        }
        if let Some(engram) = &s.engram {
            self.check_engram(s, engram);
        }
        self.check_draft(s);
    }

    fn check_tokens(&mut self, s: &ModelShape) {
        if !self.text.ok(&["vocab_size"]) {
            return;
        }
        let vocab = s.vocab_size;
        let above = |id: u32| id as usize >= vocab;
        let fix = |id: u32| format!("is {id}, expected an id below text_config.vocab_size ({vocab})");
        let top = [
            ("bos_token_id", Some(s.bos_token_id)),
            ("eos_token_id", Some(s.eos_token_id)),
            ("pad_token_id", Some(s.pad_token_id)),
            ("image_token_id", s.image_token_id),
        ];
        for (key, id) in top {
            if let Some(id) = id.filter(|&id| above(id)) {
                self.top.problem(key, fix(id));
            }
        }
        let text = [
            ("engram_pad_token_id", s.engram.as_ref().map(|e| e.pad_token_id)),
            ("dspark_noise_token_id", s.draft.as_ref().map(|d| d.noise_token_id)),
        ];
        for (key, id) in text {
            if let Some(id) = id.filter(|&id| above(id)) {
                self.text.problem(key, fix(id));
            }
        }
    }

    fn check_widths(&mut self, s: &ModelShape) {
        let t = &mut self.text;
        let rope = s.qk_rope_head_dim;
        if t.ok(&["qk_rope_head_dim"]) && !rope.is_multiple_of(2) {
            t.problem(
                "qk_rope_head_dim",
                format!("is {rope}, expected an even number (channels are rotated in pairs)"),
            );
        }
        if t.ok(&["qk_rope_head_dim", "head_dim"]) && rope > s.head_dim {
            t.problem("qk_rope_head_dim", format!("is {rope}, expected at most head_dim ({})", s.head_dim));
        }
        let indexed = s.compress_ratios.iter().any(|&r| r > 0);
        if indexed && t.ok(&["qk_rope_head_dim", "index_head_dim"]) && rope > s.index_head_dim {
            t.problem(
                "index_head_dim",
                format!("is {}, expected at least qk_rope_head_dim ({rope})", s.index_head_dim),
            );
        }
        if t.ok(&["o_groups", "num_attention_heads"]) && !s.num_attention_heads.is_multiple_of(s.o_groups) {
            t.problem(
                "o_groups",
                format!(
                    "is {}, expected a divisor of num_attention_heads ({})",
                    s.o_groups, s.num_attention_heads
                ),
            );
        }
    }

    fn check_experts(&mut self, s: &ModelShape) {
        let t = &mut self.text;
        if t.ok(&["n_routed_experts", "num_experts_per_tok"]) && s.num_experts_per_tok > s.n_routed_experts {
            t.problem(
                "num_experts_per_tok",
                format!(
                    "is {}, expected at most n_routed_experts ({})",
                    s.num_experts_per_tok, s.n_routed_experts
                ),
            );
        }
        let mut tensors = s.num_hidden_layers * s.n_routed_experts * 3;
        if let Some(draft) = &s.draft {
            tensors += draft.layers * draft.n_routed_experts * 3;
            let (picked, all) = (draft.num_experts_per_tok, draft.n_routed_experts);
            if t.ok(&["dspark_n_routed_experts", "dspark_num_experts_per_tok"]) && picked > all {
                t.problem(
                    "dspark_num_experts_per_tok",
                    format!("is {picked}, expected at most dspark_n_routed_experts ({all})"),
                );
            }
        }
        if tensors > MAX_EXPERT_TENSORS {
            let what = format!(
                "makes {tensors} expert matrices with the layer counts, more than {MAX_EXPERT_TENSORS}"
            );
            t.problem("n_routed_experts", what);
        }
    }

    /// Whether the ratios can be compared with the sources.
    fn check_ratios(&mut self, s: &ModelShape) -> bool {
        let t = &mut self.text;
        if !t.ok(&["compress_ratios", "num_hidden_layers", "num_nextn_predict_layers"]) {
            return false;
        }
        let (layers, draft) = (s.num_hidden_layers, s.draft_layers());
        if s.compress_ratios.len() != layers + draft {
            t.problem(
                "compress_ratios",
                format!(
                    "has {} entries, expected {} (num_hidden_layers {layers} + num_nextn_predict_layers {draft})",
                    s.compress_ratios.len(),
                    layers + draft
                ),
            );
            return false;
        }
        let wrong = |from: usize, to: usize, ok: &dyn Fn(usize) -> bool| -> Vec<usize> {
            (from..to).filter(|&layer| !ok(s.compress_ratios[layer])).collect()
        };
        let odd = wrong(0, layers, &|ratio| ratio == 0 || BLOCK.is_multiple_of(ratio));
        if let Some(&first) = odd.first() {
            let ratio = s.compress_ratios[first];
            let what = format!(
                "has ratio {ratio} for layer {first}, expected 0 or a divisor of {BLOCK} (layers {odd:?})"
            );
            t.problem("compress_ratios", what);
        }
        if let Some(&first) = wrong(layers, layers + draft, &|ratio| ratio == 0).first() {
            let ratio = s.compress_ratios[first];
            let what = format!("has ratio {ratio} for draft layer {}, only 0 is supported", first - layers);
            t.problem("compress_ratios", what);
        }
        t.ok(&["compress_ratios"])
    }

    fn check_sources(&mut self, s: &ModelShape) {
        let lists = [
            ("kv_source_layer_ids", &s.kv_source_layer_ids),
            ("index_source_layer_ids", &s.index_source_layer_ids),
        ];
        for (key, sources) in lists {
            if !self.text.ok(&[key]) {
                continue;
            }
            self.check_ascending(key, sources, s.num_hidden_layers);
            if !self.text.ok(&[key]) {
                continue;
            }
            let compressed = || (0..s.num_hidden_layers).filter(|&l| s.ratio(l) > 0);
            if let Some(&wrong) = sources.iter().find(|&&l| s.ratio(l) == 0) {
                let what = format!("names layer {wrong}, whose compress_ratios entry is 0 (window only)");
                self.text.problem(key, what);
            } else if let Some(first) = compressed().next()
                && sources.first() != Some(&first)
            {
                let what = format!(
                    "must begin with {first}, the first layer with a ratio above 0 in compress_ratios"
                );
                self.text.problem(key, what);
            } else {
                let nearest = |l: usize| sources.iter().copied().rfind(|&source| source <= l);
                let odd = compressed()
                    .find_map(|l| nearest(l).filter(|&n| s.ratio(n) != s.ratio(l)).map(|n| (l, n)));
                if let Some((layer, source)) = odd {
                    let (here, there) = (s.ratio(layer), s.ratio(source));
                    self.text.problem(
                        key,
                        format!("gives layer {layer} (ratio {here}) the source {source} (ratio {there}); add a source"),
                    );
                }
            }
        }
    }

    fn check_ascending(&mut self, key: &'static str, ids: &[usize], layers: usize) {
        if let Some(id) = ids.iter().find(|&&id| id >= layers) {
            self.text.problem(key, format!("names layer {id}, expected below num_hidden_layers ({layers})"));
        }
        if let Some(pair) = ids.windows(2).find(|pair| pair[0] >= pair[1]) {
            self.text.problem(key, format!("has {} before {}, expected ascending layers", pair[0], pair[1]));
        }
    }

    fn check_candidate(&mut self, s: &ModelShape) {
        let Some(candidate) = s.candidate else { return };
        if !self.text.ok(&["candidate_source_layer_id", "index_source_layer_ids"]) {
            return;
        }
        let source = candidate.source_layer;
        if !s.is_index_source(source) {
            let what = format!("is {source}, expected one of index_source_layer_ids or null");
            self.text.problem("candidate_source_layer_id", what);
            return;
        }
        let later = s.index_source_layer_ids.iter().find(|&&l| l > source && s.ratio(l) != s.ratio(source));
        if let Some(later) = later {
            self.text.problem(
                "candidate_source_layer_id",
                format!(
                    "is {source} (ratio {}), but its blocks would restrict index source {later} (ratio {})",
                    s.ratio(source),
                    s.ratio(*later)
                ),
            );
        }
    }

    fn check_engram(&mut self, s: &ModelShape, engram: &EngramShape) {
        if !self.text.ok(&["engram_layer_ids", "num_hidden_layers"]) {
            return;
        }
        self.check_ascending("engram_layer_ids", &engram.layer_ids, s.num_hidden_layers);
        let t = &mut self.text;
        if t.ok(&["engram_compressed_vocab_size", "vocab_size"])
            && engram.compressed_vocab_size > s.vocab_size
        {
            t.problem(
                "engram_compressed_vocab_size",
                format!(
                    "is {}, expected at most vocab_size ({})",
                    engram.compressed_vocab_size, s.vocab_size
                ),
            );
        }
        let hash = ["engram_layer_ids", "engram_max_ngram_size", "engram_vocab_size", "engram_n_heads"];
        if !t.ok(&hash) || !t.ok(&["engram_num_embeddings"]) {
            return;
        }
        match engram::table_rows(engram) {
            Err(too_many) => t.problem("engram_vocab_size", too_many),
            Ok(rows) if rows != engram.num_embeddings => t.problem(
                "engram_num_embeddings",
                format!("is {:?}, expected {rows:?} (the sums of the hash primes)", engram.num_embeddings),
            ),
            Ok(_) => {}
        }
    }

    fn check_draft(&mut self, s: &ModelShape) {
        let Some(draft) = &s.draft else { return };
        if !self.text.ok(&["dspark_target_layer_ids", "num_hidden_layers"]) {
            return;
        }
        if draft.target_layer_ids.is_empty() {
            self.text.problem("dspark_target_layer_ids", "is empty, expected at least one backbone layer");
        }
        self.check_ascending("dspark_target_layer_ids", &draft.target_layer_ids, s.num_hidden_layers);
    }
}
