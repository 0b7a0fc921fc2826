"""Five model shapes unlike the two golden checkpoints and unlike one another (own code).

Nothing in an engine may be special to one configuration. Between them these shapes vary every size the config can
name, and the structure: compression ratios 0, 1, 2 and 4 in unusual orders, several or no candidate sources, Engram
on none, one or three layers (also the first), none to three draft layers, tails of every kind in the BF16 ones. The
quantized ones respect the groups of 32 (FP8 activations, FP8 and FP4 weights, index keys) and 16 (compressed KV).

A Shape says what the model is (`text`), how it is drawn and stored, and which prompts its vectors use.
"""
from dataclasses import dataclass, field

import torch

from make_tiny import Layout


@dataclass
class Shape:
    name: str
    quantized: bool
    seed: int
    text: dict
    layout: Layout
    short: int                        # prompt length of exact_full_trace
    long: int                         # of exact_long
    cuts: list                        # prefill chunks of greedy_decode
    image: tuple                      # (prompt length, span start, span end, offsets of newlines)
    replay: tuple = ()                # (prompt length, ((keep_tokens, boundary_swa), ...)); empty: no decoder half
    local: int = 0                    # prompt length of layer_local_quantized
    streams: tuple = ()               # layers whose stream_out the image case keeps
    full: bool = False                # record all activations and caches


# What no shape varies: the parts of the config that select the architecture rather than size it.
FIXED = {
    "model_type": "deepseek_v41_text", "num_key_value_heads": 1, "hidden_act": "silu", "attention_bias": False,
    "attention_dropout": 0.0, "tie_word_embeddings": False, "n_shared_experts": 1, "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
}


def yarn(factor, beta_fast, beta_slow, original):
    return {"rope_type": "yarn", "factor": factor, "beta_fast": beta_fast, "beta_slow": beta_slow,
            "original_max_position_embeddings": original}


def layout(image_token, **how):
    return Layout(engram_files=False, image_token=image_token, **how)


# BF16, no size a multiple of 32 (head_dim of 16 only): tails everywhere. Engram on three layers, the first one and one
# in the decoder half among them; one expert per token; no clamp; no candidate stage; hc_*_fn stored as BF16.
TAILS = Shape(
    name="tails-bf16", quantized=False, seed=31, text={
        **FIXED, "vocab_size": 577, "hidden_size": 72, "moe_intermediate_size": 28, "num_hidden_layers": 7,
        "num_attention_heads": 3, "head_dim": 48, "qk_rope_head_dim": 12, "q_lora_rank": 24, "o_lora_rank": 20, "o_groups": 3,
        "swiglu_limit": 0.0, "rms_norm_eps": 1e-6, "max_position_embeddings": 512, "rope_theta": 5000,
        "rope_scaling": yarn(4, 16, 2, 128), "compress_rope_theta": 40000,
        "n_routed_experts": 5, "num_experts_per_tok": 1, "norm_topk_prob": True, "routed_scaling_factor": 0.4,
        "sliding_window": 17, "compress_ratios": [0, 2, 2, 1, 1, 1, 1, 0],
        "kv_source_layer_ids": [1, 3], "index_source_layer_ids": [1, 3, 5], "index_n_heads": 11, "index_head_dim": 20, "index_topk": 9,
        "candidate_source_layer_id": None, "candidate_topk_blocks": 8, "candidate_block_size": 8,
        "hc_mult": 3, "hc_sinkhorn_iters": 5, "hc_eps": 1e-5,
        "engram_layer_ids": [0, 2, 5], "engram_max_ngram_size": 3, "engram_vocab_size": 50, "engram_n_heads": 3, "engram_head_dim": 12,
        "engram_pad_token_id": 2,
        "num_nextn_predict_layers": 1, "dspark_block_size": 2, "dspark_noise_token_id": 570, "dspark_target_layer_ids": [0, 6],
        "dspark_markov_rank": 20, "dspark_n_routed_experts": 3, "dspark_num_experts_per_tok": 2},
    layout=layout(571, bf16_hc=True), short=20, long=90, cuts=[7, 1, 1, 40], image=(40, 0, 9, (3,)), streams=(0, 3, 6),
    replay=(70, ((17, "truncated"), (5, "full"), (1, "truncated"))), full=True)

# Quantized; every layer compressed from the first on, ratios 2, 4 and 0, so no decoder half; plain RoPE (no
# rope_scaling), all channels of head and index key rotated; no Engram; candidate blocks of 3; three draft layers.
WIDE = Shape(
    name="ratio4-quant", quantized=True, seed=32, text={
        **FIXED, "vocab_size": 544, "hidden_size": 160, "moe_intermediate_size": 64, "num_hidden_layers": 5,
        "num_attention_heads": 4, "head_dim": 32, "qk_rope_head_dim": 32, "q_lora_rank": 64, "o_lora_rank": 32, "o_groups": 1,
        "swiglu_limit": 1.5, "rms_norm_eps": 1e-5, "max_position_embeddings": 1024, "rope_theta": 10000, "compress_rope_theta": 20000,
        "n_routed_experts": 5, "num_experts_per_tok": 2, "norm_topk_prob": False, "routed_scaling_factor": 1.0,
        "sliding_window": 8, "compress_ratios": [2, 2, 4, 4, 0, 0, 0, 0],
        "kv_source_layer_ids": [0, 2], "index_source_layer_ids": [0, 2, 3], "index_n_heads": 12, "index_head_dim": 32, "index_topk": 6,
        "candidate_source_layer_id": 2, "candidate_topk_blocks": 4, "candidate_block_size": 3,
        "hc_mult": 2, "hc_sinkhorn_iters": 1, "hc_eps": 1e-6,
        "engram_layer_ids": [], "engram_max_ngram_size": 4, "engram_vocab_size": 64, "engram_n_heads": 4, "engram_head_dim": 32,
        "engram_pad_token_id": 2,
        "num_nextn_predict_layers": 3, "dspark_block_size": 7, "dspark_noise_token_id": 530, "dspark_target_layer_ids": [0, 2, 4],
        "dspark_markov_rank": 32, "dspark_n_routed_experts": 3, "dspark_num_experts_per_tok": 2},
    layout=layout(543), short=15, long=130, cuts=[3, 30, 1, 24], image=(37, 28, 37, (4,)), local=44)

# Quantized, deep, over three shards; window-only layers in the middle of both halves; the candidate source is an index
# source that owns no keys; 5-grams; two draft layers fed from both halves.
DEEP = Shape(
    name="deep-quant", quantized=True, seed=33, text={
        **FIXED, "vocab_size": 601, "hidden_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 11,
        "num_attention_heads": 6, "head_dim": 64, "qk_rope_head_dim": 24, "q_lora_rank": 32, "o_lora_rank": 32, "o_groups": 3,
        "swiglu_limit": 3.0, "rms_norm_eps": 1e-20, "max_position_embeddings": 2048, "rope_theta": 500000,
        "rope_scaling": yarn(40, 32, 1, 64), "compress_rope_theta": 80000,
        "n_routed_experts": 7, "num_experts_per_tok": 4, "norm_topk_prob": True, "routed_scaling_factor": 0.9,
        "sliding_window": 48, "compress_ratios": [0, 0, 0, 2, 2, 0, 1, 1, 0, 1, 1, 0, 0],
        "kv_source_layer_ids": [3, 6], "index_source_layer_ids": [3, 6, 7, 10], "index_n_heads": 12, "index_head_dim": 64, "index_topk": 12,
        "candidate_source_layer_id": 7, "candidate_topk_blocks": 5, "candidate_block_size": 4,
        "hc_mult": 4, "hc_sinkhorn_iters": 12, "hc_eps": 1e-4,
        "engram_layer_ids": [4], "engram_max_ngram_size": 5, "engram_vocab_size": 97, "engram_n_heads": 2, "engram_head_dim": 32,
        "engram_pad_token_id": 7,
        "num_nextn_predict_layers": 2, "dspark_block_size": 4, "dspark_noise_token_id": 590, "dspark_target_layer_ids": [3, 8, 10],
        "dspark_markov_rank": 48, "dspark_n_routed_experts": 5, "dspark_num_experts_per_tok": 1},
    layout=layout(595, shards=3, bf16_hc=True), short=14, long=140, cuts=[64, 1, 2], image=(33, 11, 14, ()),
    replay=(100, ((54, "truncated"), (20, "full"))), local=34)

# BF16, odd sizes; ratio 1 throughout with two KV sources, the second being the candidate source; all experts used;
# bigrams with primes from 2 on; names prefixed with `model.`; the draft block reads one target layer.
PAIRED = Shape(
    name="odd-bf16", quantized=False, seed=34, text={
        **FIXED, "vocab_size": 523, "hidden_size": 50, "moe_intermediate_size": 21, "num_hidden_layers": 6,
        "num_attention_heads": 5, "head_dim": 32, "qk_rope_head_dim": 10, "q_lora_rank": 19, "o_lora_rank": 13, "o_groups": 5,
        "swiglu_limit": 0.5, "rms_norm_eps": 1e-8, "max_position_embeddings": 300, "rope_theta": 10000,
        "rope_scaling": yarn(8, 8, 1, 96), "compress_rope_theta": 10000,
        "n_routed_experts": 6, "num_experts_per_tok": 6, "norm_topk_prob": True, "routed_scaling_factor": 0.75,
        "sliding_window": 24, "compress_ratios": [1, 1, 1, 1, 1, 1, 0, 0],
        "kv_source_layer_ids": [0, 3], "index_source_layer_ids": [0, 2, 3, 4, 5], "index_n_heads": 10, "index_head_dim": 22, "index_topk": 14,
        "candidate_source_layer_id": 3, "candidate_topk_blocks": 3, "candidate_block_size": 16,
        "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6,
        "engram_layer_ids": [1, 4], "engram_max_ngram_size": 2, "engram_vocab_size": 2, "engram_n_heads": 7, "engram_head_dim": 9,
        "engram_pad_token_id": 2,
        "num_nextn_predict_layers": 2, "dspark_block_size": 3, "dspark_noise_token_id": 515, "dspark_target_layer_ids": [5],
        "dspark_markov_rank": 7, "dspark_n_routed_experts": 3, "dspark_num_experts_per_tok": 3},
    layout=layout(516, prefix="model."), short=20, long=110, cuts=[1, 1, 50], image=(36, 8, 27, (4, 9, 14)), streams=(1, 4))

# Quantized, the smallest sizes the formats allow; many experts; candidate blocks of one entry; no draft layers; a few
# vision and aligner tensors that a text engine skips.
PLAIN = Shape(
    name="nodraft-quant", quantized=True, seed=35, text={
        **FIXED, "vocab_size": 768, "hidden_size": 32, "moe_intermediate_size": 32, "num_hidden_layers": 4,
        "num_attention_heads": 8, "head_dim": 32, "qk_rope_head_dim": 8, "q_lora_rank": 96, "o_lora_rank": 64, "o_groups": 2,
        "swiglu_limit": 10.0, "rms_norm_eps": 1e-12, "max_position_embeddings": 4096, "rope_theta": 1000000,
        "rope_scaling": yarn(2, 64, 4, 512), "compress_rope_theta": 160000,
        "n_routed_experts": 33, "num_experts_per_tok": 7, "norm_topk_prob": True, "routed_scaling_factor": 1.25,
        "sliding_window": 33, "compress_ratios": [0, 2, 1, 1],
        "kv_source_layer_ids": [1, 2], "index_source_layer_ids": [1, 2, 3], "index_n_heads": 13, "index_head_dim": 32, "index_topk": 5,
        "candidate_source_layer_id": 2, "candidate_topk_blocks": 11, "candidate_block_size": 1,
        "hc_mult": 3, "hc_sinkhorn_iters": 3, "hc_eps": 1e-3,
        "engram_layer_ids": [3], "engram_max_ngram_size": 4, "engram_vocab_size": 200, "engram_n_heads": 1, "engram_head_dim": 64,
        "engram_pad_token_id": 2,
        "num_nextn_predict_layers": 0, "dspark_block_size": 5, "dspark_noise_token_id": 760, "dspark_target_layer_ids": [],
        "dspark_markov_rank": 32, "dspark_n_routed_experts": 8, "dspark_num_experts_per_tok": 2},
    layout=layout(767, extra={
        "vision.patch_embed.proj.bias": torch.linspace(-1, 1, 32).bfloat16(), "vision.norm.weight": torch.ones(32).bfloat16(),
        "aligner.w2.bias": torch.linspace(0, 1, 32).bfloat16()}),
    short=16, long=120, cuts=[40, 2, 19], image=(30, 5, 12, (3,)), replay=(80, ((35, "truncated"), (33, "full"))), local=64)

SHAPES = (TAILS, WIDE, DEEP, PAIRED, PLAIN)
