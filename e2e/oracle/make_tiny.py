"""Write tiny random checkpoints in the real DeepSeek-V4.1-Flash layout (own code).

  python make_tiny.py OUT_DIR      -> OUT_DIR/tiny-bf16, OUT_DIR/tiny-quant

Both variants come from the same float32 draw. `tiny-bf16` has no quantized tensors; `tiny-quant` uses FP8 32x32 +
UE8M0 for dense linears and Engram tables and FP4/32 + UE8M0 for routed experts, as the released checkpoint does.

make_shapes.py uses the same drawing and writing functions for checkpoints of other shapes.
"""
import json
import os
import sys
from dataclasses import dataclass, field

import torch
from safetensors.torch import save_file

import engram
import quant
from engram import token_map

N_LAYERS, N_MTP = 10, 3
TEXT = {
    "model_type": "deepseek_v41_text", "vocab_size": 512, "hidden_size": 64, "moe_intermediate_size": 32,
    "num_hidden_layers": N_LAYERS, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64,
    "qk_rope_head_dim": 16, "q_lora_rank": 32, "o_lora_rank": 32, "o_groups": 2, "hidden_act": "silu",
    "swiglu_limit": 2.0, "rms_norm_eps": 1e-20, "attention_bias": False, "attention_dropout": 0.0,
    "tie_word_embeddings": False, "max_position_embeddings": 4096, "rope_theta": 10000,
    "rope_scaling": {"rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
                     "original_max_position_embeddings": 256},
    "n_routed_experts": 16, "n_shared_experts": 1, "num_experts_per_tok": 3, "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": 1.5, "sliding_window": 32,
    "compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 1, 1] + [0] * N_MTP, "compress_rope_theta": 160000,
    "kv_source_layer_ids": [2, 3, 5], "index_source_layer_ids": [2, 3, 5, 7, 9],
    "index_n_heads": 16, "index_head_dim": 32, "index_topk": 16,
    "candidate_source_layer_id": 5, "candidate_topk_blocks": 8, "candidate_block_size": 8,
    "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6,
    "engram_layer_ids": [1, 3], "engram_max_ngram_size": 4, "engram_vocab_size": 64, "engram_n_heads": 4,
    "engram_head_dim": 32, "engram_pad_token_id": 2,
    "num_nextn_predict_layers": N_MTP, "dspark_block_size": 5, "dspark_noise_token_id": 500,
    "dspark_target_layer_ids": [7, 8, 9], "dspark_markov_rank": 32, "dspark_n_routed_experts": 8,
    "dspark_num_experts_per_tok": 2,
}
VISION = {"model_type": "deepseek_v41_vision", "num_hidden_layers": 0, "hidden_size": 32, "num_attention_heads": 2,
          "intermediate_size": 64, "patch_size": 14, "rope_theta": 10000, "downsample_ratio": 3,
          "max_image_tokens": 1024, "min_pixels": 295936, "max_wh_ratio": None}
QUANT = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32],
         "scale_fmt": "ue8m0", "expert_dtype": "fp4"}
IMAGE_TOKEN = 501


def make_tokenizer(vocab_size):
    """A byte-level BPE tokenizer of `vocab_size` >= 512 entries with the special tokens the Engram map needs (pad id must be 2)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    special = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {t: i for i, t in enumerate(special)}
    for ch in alphabet:
        vocab[ch] = len(vocab)
    merges, words = [], ["the", "The", "THE", " the", " The", "and", "And", " and", " a", " A", "é", "É", "e", "cat",
                         " cat", "Cat", " dog", "dog", " run", "ing", "ed", " is", " of", " to", " in", "on", " on",
                         "  ", "\n\n", " \n", "ca", "do", "ru", "er", "Er", " er", "re", "Re", "es", "ES", "st", "St"]
    blt = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for w in words:
        pieces = list(blt.pre_tokenize_str(w)[0][0])
        cur = pieces[0]
        for nxt in pieces[1:]:
            if (cur, nxt) not in merges:
                merges.append((cur, nxt))
            cur += nxt
            vocab.setdefault(cur, len(vocab))
    i = 0
    while len(vocab) < vocab_size:                     # filler words, some colliding after lower-casing
        vocab.setdefault(f"{'Ġ' if i % 3 == 0 else ''}{'W' if i % 2 else 'w'}{i // 2}", len(vocab))
        i += 1
    tok = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tok.pre_tokenizer, tok.decoder = blt, decoders.ByteLevel()
    tok.add_special_tokens([AddedToken(s, special=True) for s in special])
    return tok


class Draw:
    def __init__(self, seed):
        self.g = torch.Generator().manual_seed(seed)
        self.t = {}                                           # name -> (float32 tensor, kind)

    def normal(self, name, shape, std, kind, mean=0.0):
        self.t[name] = (torch.randn(shape, generator=self.g) * std + mean, kind)


def draw_block(d, c, p, layer):
    H, m, hd, nh = c["hidden_size"], c["hc_mult"], c["head_dim"], c["num_attention_heads"]
    mix = m * (2 + m)
    backbone = layer < c["num_hidden_layers"]
    for s in ("attn", "ffn"):
        d.normal(f"{p}hc_{s}_fn", (mix, m * H), (m * H) ** -0.5, "f32")
        d.normal(f"{p}hc_{s}_scale", (3,), 0.1, "f32", 0.7)
        base = torch.cat([torch.full((m,), -1.0), torch.zeros(m), (torch.eye(m) * 4 - 2).flatten()])
        base[layer % m] = 1.5
        d.t[f"{p}hc_{s}_base"] = (base + 0.3 * torch.randn(mix, generator=d.g), "f32")
        d.normal(f"{p}{s}_norm.weight", (H,), 0.1, "bf16", 1.0)
    a = f"{p}attn."
    d.normal(a + "attn_sink", (nh,), 1.0, "f32")
    d.normal(a + "wq_a.weight", (c["q_lora_rank"], H), H ** -0.5, "fp8")
    d.normal(a + "q_norm.weight", (c["q_lora_rank"],), 0.1, "bf16", 1.0)
    d.normal(a + "wq_b.weight", (nh * hd, c["q_lora_rank"]), 1.5 * c["q_lora_rank"] ** -0.5, "fp8")
    d.normal(a + "wkv.weight", (hd, H), H ** -0.5, "fp8")
    d.normal(a + "kv_norm.weight", (hd,), 0.1, "bf16", 1.0)
    g, r = c["o_groups"], c["o_lora_rank"]
    d.normal(a + "wo_a.weight", (g * r, nh * hd // g), 1.5 * (nh * hd // g) ** -0.5, "fp8")
    d.normal(a + "wo_b.weight", (H, g * r), 2.0 * (g * r) ** -0.5, "fp8")
    if backbone and layer in c["kv_source_layer_ids"]:
        d.normal(a + "compressor.wkv.weight", (hd, H), H ** -0.5, "bf16")
        if c["compress_ratios"][layer] > 1:
            d.normal(a + "compressor.wgate.weight", (hd, H), 2.0 * H ** -0.5, "bf16")
        d.normal(a + "compressor.norm.weight", (hd,), 0.1, "bf16", 1.0)
        d.normal(a + "indexer.wk.weight", (c["index_head_dim"], hd), hd ** -0.5, "bf16")
        d.normal(a + "indexer.k_norm.weight", (c["index_head_dim"],), 0.1, "bf16", 1.0)
    if backbone and layer in c["index_source_layer_ids"]:
        d.normal(a + "indexer.wq_b.weight", (c["index_n_heads"] * c["index_head_dim"], c["q_lora_rank"]), c["q_lora_rank"] ** -0.5, "fp8")
        d.normal(a + "indexer.weights_proj.weight", (c["index_n_heads"], H), H ** -0.5, "bf16")
    f, I = f"{p}ffn.", c["moe_intermediate_size"]
    ne = c["n_routed_experts"] if backbone else c["dspark_n_routed_experts"]
    d.normal(f + "gate.weight", (ne, H), 1.5 * H ** -0.5, "bf16")
    d.normal(f + "gate.bias", (ne,), 0.1, "f32")
    d.normal(f + "gate.bias_vl", (ne,), 0.3, "f32")
    for e in list(range(ne)) + ["shared"]:
        q = f + ("shared_experts." if e == "shared" else f"experts.{e}.")
        kind = "fp8" if e == "shared" else "fp4"
        d.normal(q + "w1.weight", (I, H), 1.5 * H ** -0.5, kind)
        d.normal(q + "w3.weight", (I, H), 1.5 * H ** -0.5, kind)
        d.normal(q + "w2.weight", (H, I), 1.5 * I ** -0.5, kind)
    if backbone and layer in c["engram_layer_ids"]:
        q, hc = f"{p}engram.", c["engram_head_dim"]
        cols = (c["engram_max_ngram_size"] - 1) * c["engram_n_heads"]
        rows = c["engram_num_embeddings"][c["engram_layer_ids"].index(layer)]
        d.normal(q + "embed.weight", (rows, hc), 1.0, "rows")
        d.normal(q + "wkv.weight", (H * (m + 1), cols * hc), (cols * hc) ** -0.5, "fp8")
        d.normal(q + "q_weight", (m, H), 0.3, "bf16", 1.0)
        d.normal(q + "k_weight", (m, H), 0.3, "bf16", 1.0)


def draw_model(c, seed=20261129):
    d = Draw(seed)
    H, V, R = c["hidden_size"], c["vocab_size"], c["dspark_markov_rank"]
    d.normal("embed.weight", (V, H), 1.0, "bf16")
    for l in range(c["num_hidden_layers"]):
        draw_block(d, c, f"layers.{l}.", l)
    d.normal("norm.weight", (H,), 0.1, "bf16", 1.0)
    d.normal("head.weight", (V, H), 1.5 * H ** -0.5, "bf16")
    for i in range(c["num_nextn_predict_layers"]):
        draw_block(d, c, f"mtp.{i}.", c["num_hidden_layers"] + i)
    if c["num_nextn_predict_layers"]:
        n_t = len(c["dspark_target_layer_ids"])
        d.normal("mtp.0.main_proj.weight", (H, n_t * H), (n_t * H) ** -0.5, "fp8")
        d.normal("mtp.0.main_norm.weight", (H,), 0.1, "bf16", 1.0)
        p = f"mtp.{c['num_nextn_predict_layers'] - 1}."
        d.normal(p + "norm.weight", (H,), 0.1, "bf16", 1.0)
        d.normal(p + "markov_head.embed.weight", (V, R), 1.0, "bf16")
        d.normal(p + "markov_head.head.weight", (V, R), R ** -0.5, "bf16")
        d.normal(p + "confidence_head.proj.weight", (1, H + R), (H + R) ** -0.5, "bf16")
    for n in ("image_start", "image_end", "image_newline"):
        d.normal(n, (H,), 1.0, "bf16")
    return d.t


@dataclass
class Layout:
    """How a checkpoint directory is written, apart from its numbers."""
    shards: int = 1                   # number of safetensors files
    prefix: str = ""                  # put before every tensor name except `head.weight`
    bf16_hc: bool = False             # store hc_*_fn as BF16 instead of F32
    engram_files: bool = True         # write engram_token_map.json and engram_hash.json (the real checkpoint has neither)
    image_token: int = IMAGE_TOKEN
    extra: dict = field(default_factory=dict)                # further tensors (vision tower), name -> tensor


def encode(tensors, quantized, layout):
    """Drawn float32 tensors -> stored tensors by stored name, sorted."""
    out = dict(layout.extra)
    for name, (t, kind) in tensors.items():
        scale = name.removesuffix("weight") + "scale"
        if kind == "f32" and not (layout.bf16_hc and name.endswith(("hc_attn_fn", "hc_ffn_fn"))):
            out[name] = t
        elif kind in ("f32", "bf16") or not quantized:
            out[name] = t.bfloat16()
        else:
            pack = {"fp8": quant.quant_weight_fp8, "rows": quant.quant_rows_fp8, "fp4": quant.quant_weight_fp4}[kind]
            out[name], s = pack(t)
            out[scale] = s.view(torch.float8_e8m0fnu)
    prefix = layout.prefix
    return {k if k == "head.weight" else prefix + k: v.contiguous() for k, v in sorted(out.items())}


def split_shards(stored, n):
    """Cut the sorted tensors into n runs of about equal bytes; a weight and its scale stay together."""
    total = sum(v.numel() * v.element_size() for v in stored.values())
    shards, seen = [{} for _ in range(n)], 0
    owner = {}
    for k, v in stored.items():
        stem = k.removesuffix(".weight").removesuffix(".scale")
        at = owner.setdefault(stem, min(n - 1, seen * n // total))
        shards[at][k] = v
        seen += v.numel() * v.element_size()
    return shards, total


def write(path, text_cfg, tensors, quantized, tok, tmap, layout=Layout()):
    os.makedirs(path, exist_ok=True)
    shards, total = split_shards(encode(tensors, quantized, layout), layout.shards)
    weight_map = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, os.path.join(path, file), {"format": "pt"})
        weight_map.update({k: file for k in shard})
    json.dump({"metadata": {"total_size": total}, "weight_map": weight_map},
              open(os.path.join(path, "model.safetensors.index.json"), "w"), indent=0)
    cfg = {"architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41", "dtype": "bfloat16",
           "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "image_token_id": layout.image_token}
    if quantized:
        cfg["quantization_config"] = QUANT
    cfg.update(text_config=text_cfg, vision_config=VISION)
    json.dump(cfg, open(os.path.join(path, "config.json"), "w"), indent=1)
    tok.save(os.path.join(path, "tokenizer.json"))
    if layout.engram_files:
        json.dump(tmap, open(os.path.join(path, "engram_token_map.json"), "w"))
        h = engram.Hasher(text_cfg, tmap)
        json.dump({"pad_id": h.pad, "primes": h.primes, "offsets": h.offsets, "multipliers": h.mult},
                  open(os.path.join(path, "engram_hash.json"), "w"))
    return total


def engram_counts(text_cfg, tmap):
    """A copy of text_cfg with the two fields that follow from the tokenizer and the hash primes."""
    c = dict(text_cfg)
    c["engram_compressed_vocab_size"] = max(tmap) + 1
    pr = engram.bucket_primes(c["engram_layer_ids"], c["engram_max_ngram_size"], c["engram_vocab_size"], c["engram_n_heads"])
    c["engram_num_embeddings"] = [sum(sum(p, [])) for p in pr]
    return c


def main(out):
    tok = make_tokenizer(TEXT["vocab_size"])
    tmap = token_map(tok)
    c = engram_counts(TEXT, tmap)
    tensors = draw_model(c)
    for name, q in (("tiny-bf16", False), ("tiny-quant", True)):
        print(name, write(os.path.join(out, name), c, tensors, q, tok, tmap), "bytes of tensors")


if __name__ == "__main__":
    main(sys.argv[1])
