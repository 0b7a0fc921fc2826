"""Write checkpoints and vectors of five other model shapes (own code; the shapes are in shapes.py).

  python make_shapes.py OUT_DIR             OUT_DIR/<shape>/..., OUT_DIR/vectors/manifest.json + *.safetensors, OUT_DIR/DIGESTS.json
  python make_shapes.py --check OUT_DIR     digests of OUT_DIR and of the scripts agree with DIGESTS.json (needs no torch)
  python make_shapes.py --rebuild OUT_DIR   build again elsewhere: checkpoints equal byte for byte, vectors within tolerance

The manifest is laid out like ../golden/vectors/manifest.json. Random weights and sums depend on the torch version and on
the CPU's vector unit; the two variables below, set before torch is loaded, take the vector unit out.
"""
import os
import shutil
import sys
import tempfile

import digests

os.environ["MKL_CBWR"] = "COMPATIBLE"                         # one order of additions in matrix products
os.environ["ATEN_CPU_CAPABILITY"] = "default"                 # one code path in all other operations


def build(out):
    import make_golden
    from checkpoint import Checkpoint
    from oracle import F32, Model
    from shapes import SHAPES

    V = make_golden.Vectors(os.path.join(out, "vectors"))
    for k, s in enumerate(SHAPES):
        path = os.path.join(out, s.name)
        check_shape(s)
        print(s.name, write_checkpoint(s, path), "bytes of tensors", flush=True)
        X = make_golden.Subject(V, Model(Checkpoint(path), F32), s.name, s.name.replace("-", "_"), s.full, strict=True)
        seed = 10000 * (k + 1)
        make_golden.short_case(X, s.short, seed)
        make_golden.long_case(X, s.long, seed + 1000, last=("stream_out", "index_scores"))
        ids, gen = make_golden.decode_case(X, sum(s.cuts), seed + 2000, s.cuts, n_steps=10, n_drafts=4)
        if s.text["num_nextn_predict_layers"]:
            make_golden.speculative_case(X, ids, gen)
        if s.replay:
            n, variants = s.replay
            make_golden.replay_case(X, n, seed + 3000, [(f"replay_{m[:5]}{keep}", keep, m) for keep, m in variants])
        n, a, b, newlines = s.image
        make_golden.image_case(X, n, a, b, newlines, seed + 4000, s.streams)
        if s.local:
            make_golden.layer_local_case(V, path, s.name, X.tag, s.local, seed + 5000)
    V.close()


def write_checkpoint(s, path):
    import make_tiny

    tok = make_tiny.make_tokenizer(s.text["vocab_size"])
    tmap = make_tiny.token_map(tok)
    c = make_tiny.engram_counts(s.text, tmap)
    return make_tiny.write(path, c, make_tiny.draw_model(c, s.seed), s.quantized, tok, tmap, s.layout)


def check_shape(s):
    """The rules a config must keep to mean something; a shape that breaks one is a mistake in shapes.py."""
    c, L = s.text, s.text["num_hidden_layers"]
    ratios, kv, ix, cand = c["compress_ratios"], c["kv_source_layer_ids"], c["index_source_layer_ids"], c["candidate_source_layer_id"]
    assert len(ratios) == L + c["num_nextn_predict_layers"] and not any(ratios[L:])
    assert all(128 % r == 0 for r in ratios if r) and set(kv) <= set(ix)
    for layer in range(L):                                    # a layer reads entries of its own ratio, chosen for the same keys
        if ratios[layer]:
            source = max(x for x in kv if x <= layer)
            assert ratios[source] == ratios[layer] and max(x for x in ix if x <= layer) >= source
    assert cand is None or (cand in ix and cand >= kv[-1])    # candidates are blocks of the last source's entries
    assert c["num_attention_heads"] % c["o_groups"] == 0
    assert c["qk_rope_head_dim"] % 2 == 0 and c["qk_rope_head_dim"] <= min(c["head_dim"], c["index_head_dim"])
    assert c["num_experts_per_tok"] <= c["n_routed_experts"] and c["dspark_num_experts_per_tok"] <= c["dspark_n_routed_experts"]
    assert len({s.layout.image_token, c["dspark_noise_token_id"]}) == 2 and s.layout.image_token < c["vocab_size"]
    if s.quantized:
        rows = (c["engram_max_ngram_size"] - 1) * c["engram_n_heads"] * c["engram_head_dim"]
        for width in ("hidden_size", "moe_intermediate_size", "q_lora_rank", "o_lora_rank", "head_dim", "index_head_dim", "engram_head_dim"):
            assert c[width] % 32 == 0, (s.name, width)
        assert rows % 32 == 0


def same_vectors(a, b):
    """Largest float difference of two vector files; integer tensors must be equal."""
    from safetensors.torch import load_file

    x, y = load_file(a), load_file(b)
    assert x.keys() == y.keys(), a
    worst = 0.0
    for k in x:
        if x[k].is_floating_point():
            worst = max(worst, (x[k] - y[k]).nan_to_num(0.0).abs().max().item() if x[k].numel() else 0.0)
        else:
            assert x[k].equal(y[k]), (a, k)
    return worst


def rebuild(out):
    tmp = tempfile.mkdtemp()
    try:
        build(tmp)
        assert digests.files_below(tmp) == digests.files_below(out), "different set of files"
        for f in digests.files_below(tmp):
            a, b = os.path.join(out, f), os.path.join(tmp, f)
            if digests.sha256(a) == digests.sha256(b):
                continue
            assert f.startswith("vectors/"), f"{f} differs"
            if f.endswith(".safetensors"):
                worst = same_vectors(a, b)
                print(f"{f}: largest difference {worst:.1e}")
                assert worst < 2e-4 or f.endswith("qdq_layers.safetensors"), f
    finally:
        shutil.rmtree(tmp)
    print(f"{out}: rebuilt alike")


def main(args):
    if len(args) == 2 and args[0] == "--check":
        return digests.report(args[1])
    if len(args) == 2 and args[0] == "--rebuild":
        return rebuild(args[1])
    if len(args) != 1 or args[0].startswith("-"):
        return __doc__
    if os.path.isdir(args[0]):                                # nothing stale may survive beside the new files
        for name in os.listdir(args[0]):
            if name != "README.md":
                path = os.path.join(args[0], name)
                shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)
    build(args[0])
    digests.write(args[0], digests.SHAPE_SOURCES)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
