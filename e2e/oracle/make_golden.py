"""Write golden vectors (own code):  python make_golden.py GOLDEN_DIR   (GOLDEN_DIR holds tiny-bf16 and tiny-quant)

Prompts are screened so that no top-k decision (router, index top-k, candidate blocks) hangs on a gap below GAP;
otherwise an engine with a different summation order could legitimately take the other branch.

One function per kind of case; make_shapes.py calls the same functions for checkpoints of other shapes.
"""
import json
import os
import sys
from dataclasses import dataclass

import torch
from safetensors.torch import save_file

import engram as eg
import quant
from checkpoint import Checkpoint
from oracle import F32, Model, Numerics, Session, candidate_mask, rope_freqs, rotate
from spec_decode import best_total, greedy_verify, plan_lengths

torch.set_num_threads(1)
torch.set_grad_enabled(False)
GAP = 5e-5                   # every top-k decision of a recorded run is clearer than this
MARGIN = 2e-3                # strict cases: distance of the two best logits wherever a token is chosen
QDQ = Numerics(act_fp8=True, kv=True)


def prompt(seed, n, high):
    """n random ids in [3, high): no special tokens; `high` is the draft noise id, with the image id above it."""
    return torch.randint(3, high, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def boundary_gap(scores, k):
    """Smallest (k-th minus k+1-th) gap over rows; scores [T,N] with -inf for unusable entries."""
    if scores.shape[-1] <= k:
        return float("inf")
    s = scores.sort(-1, descending=True).values
    d = s[:, k - 1] - s[:, k]
    d = d[torch.isfinite(d)]
    return d.min().item() if d.numel() else float("inf")


def gaps(M, ids, image=None, image_rows=None):
    """Minimum top-k margins of one exact forward pass: (router, index, candidate)."""
    c, t = M.c, M.trace
    route = index = cand = float("inf")
    for l in range(M.L):
        p = f"layers.{l}."
        x = t[p + "ffn_in"]
        s = torch.nn.functional.softplus(x @ M.w(p + "ffn.gate.weight").T).sqrt()
        b = M.w(p + "ffn.gate.bias").expand_as(s)
        if image is not None:
            b = torch.where(torch.tensor(image).unsqueeze(-1), M.w(p + "ffn.gate.bias_vl"), b)
        route = min(route, boundary_gap(s + b, c["num_experts_per_tok"]))
        if l in M.ix_src:
            sc = t[p + "index_scores"]
            if l == M.cand:
                n = sc.shape[-1]
                blk = torch.nn.functional.pad(sc, (0, -n % c["candidate_block_size"]), value=-float("inf")).unflatten(-1, (-1, c["candidate_block_size"])).amax(-1)
                lens = torch.arange(len(ids)) + 1
                newest = (lens - 1) // c["candidate_block_size"]
                blk = torch.where(torch.arange(blk.shape[-1]) == newest.unsqueeze(-1), torch.tensor(1e9), blk)
                cand = min(cand, boundary_gap(blk, c["candidate_topk_blocks"]))
            elif 0 <= M.cand < l:
                sc = sc.masked_fill(~t[f"layers.{M.cand}.candidates"], -float("inf"))
            index = min(index, boundary_gap(sc, c["index_topk"]))
    return route, index, cand


def exact(M, ids, image=None, image_rows=None, replay_mask=None):
    M.trace = {}
    logits, feats = M.forward_full(ids, image, image_rows, replay_mask=replay_mask)
    t, M.trace = dict(M.trace), None
    return logits, feats, t


def trace_gaps(M, trace, ids, image=None):
    M.trace = trace
    g = gaps(M, ids, image)
    M.trace = None
    return g


def argmax_margin(logits):
    """Smallest distance of the two best logits over rows [T,V]."""
    top = logits.topk(2).values
    return (top[..., 0] - top[..., 1]).min().item()


def screened(M, n, seed, image=None, image_rows=None, margin=0.0):
    """First prompt from `seed` on whose decisions are all clear: (seed, ids, logits, features, trace, gaps)."""
    while True:
        ids = prompt(seed, n, M.c["dspark_noise_token_id"])
        if image is not None:
            ids = [M.ck.config["image_token_id"] if image[i] else t for i, t in enumerate(ids)]
        logits, feats, t = exact(M, ids, image, image_rows)
        g = trace_gaps(M, t, ids, image)
        if min(g) > GAP and argmax_margin(logits) >= margin:
            return seed, ids, logits, feats, t, g
        seed += 1


def tidy(t):
    out = {}
    for k, v in t.items():
        if v.dtype == torch.bool:
            v = v.to(torch.uint8)
        elif v.dtype == torch.int64:
            v = v.to(torch.int32)
        out[k] = v.contiguous()
    return out


class Vectors:
    """Writes DIR/*.safetensors and collects the manifest entries."""

    def __init__(self, out):
        self.out, self.man = out, []
        os.makedirs(out, exist_ok=True)

    def emit(self, name, tensors, **info):
        save_file(tidy(tensors), os.path.join(self.out, name + ".safetensors"))
        self.man.append({"file": name + ".safetensors", **info})
        print(name, os.path.getsize(os.path.join(self.out, name + ".safetensors")), info.get("gaps", ""), flush=True)

    def close(self):
        json.dump(self.man, open(os.path.join(self.out, "manifest.json"), "w"), indent=1)


@dataclass
class Subject:
    """What the case functions need to know: the model, the names, and how much to record and to screen.

    full: record everything in the traces. strict: also screen what the first goldens did not (argmax margins, decode
    and replay steps, draft routers)."""
    V: Vectors
    M: Model
    ckpt: str
    tag: str
    full: bool
    strict: bool = False

    @property
    def margin(self):
        return MARGIN if self.strict else 0.0

    def emit(self, name, kind, tensors, **info):
        self.V.emit(f"{self.tag}_{name}", tensors, kind=kind, checkpoint=self.ckpt, numerics="f32", **info)


def with_features(tensors, feats, key="draft_features"):
    """Draft features exist only where the config names target layers."""
    return tensors if feats is None else {**tensors, key: feats}


def short_case(X, n, seed):
    """Short prompt, everything recorded."""
    seed, ids, lg, ft, t, g = screened(X.M, n, seed, margin=X.margin)
    slim = {k: x for k, x in t.items() if not k.endswith(("stream_in", "attn_core")) and (X.full or k.endswith(("stream_out", "route_ids", "route_weights", "engram.rows")))}
    X.emit("short", "exact_full_trace", with_features({**slim, "logits": lg}, ft), tokens=ids, gaps=g)


def long_case(X, n, seed, last=("stream_out", "index_scores", "attn_out", "ffn_out")):
    """Long prompt: the indexer and the candidate stage really drop entries."""
    seed, ids, lg, ft, t, g = screened(X.M, n, seed, margin=X.margin)
    keep = {k: x for k, x in t.items() if k.endswith(("route_ids", "selected", "candidates", "engram.rows"))}
    keep.update({k + "_last8": x[-8:] for k, x in t.items() if k.endswith(last)})
    if X.full:
        keep.update({k: x for k, x in t.items() if k.endswith(("compressed_kv", "index_k"))})
    feats = None if ft is None else ft[-8:]
    X.emit("long", "exact_long", with_features({**keep, "logits_last8": lg[-8:], "argmax": lg.argmax(-1)}, feats, "draft_features_last8"),
           tokens=ids, gaps=g)


def ordinary(M, ids):
    """No special token among generated ids: neither bos, eos, pad nor the image token."""
    return min(ids) > 2 and M.ck.config["image_token_id"] not in ids


def drafts_clear(M, ids):
    """Routers of the draft layers, in the block that M.trace recorded, decide by more than GAP."""
    worst = float("inf")
    for i in range(M.c["num_nextn_predict_layers"]):
        p = f"mtp.{i}."
        s = torch.nn.functional.softplus(M.trace[p + "ffn_in"] @ M.w(p + "ffn.gate.weight").T).sqrt()
        worst = min(worst, boundary_gap(s + M.w(p + "ffn.gate.bias"), M.c["dspark_num_experts_per_tok"]))
    return worst > GAP and ordinary(M, ids)


def greedy_run(X, ids, cuts, n_steps, n_drafts):
    """Prefill in chunks, then greedy decode with a draft block before the first steps.

    Returns (generated ids, tensors, smallest argmax margin of the decode steps, every decision was clear)."""
    M, S, at, clear = X.M, Session(X.M), 0, True
    for n in cuts:
        S.extend(ids[at:at + n])
        at += n
    assert at == len(ids)
    gen, steps, margins = [int(S.logits[-1].argmax())], {}, []
    for k in range(n_steps):
        if k < n_drafts and M.c["num_nextn_predict_layers"]:
            M.trace = {}
            d, dl, cf = S.draft(gen[-1])
            clear &= drafts_clear(M, d) and argmax_margin(dl) >= MARGIN
            M.trace = None
            steps[f"draft{k}_ids"], steps[f"draft{k}_logits"], steps[f"draft{k}_confidence"] = torch.tensor(d), dl, cf
        S.extend([gen[-1]])
        steps[f"step{k}_logits"] = S.logits[-1]
        margins.append(argmax_margin(S.logits[-1]))
        gen.append(int(S.logits[-1].argmax()))
    clear &= min(margins) >= MARGIN and ordinary(M, gen)
    return gen, steps, min(margins), clear


def decode_case(X, n, seed, cuts, n_steps=16, n_drafts=6):
    """Greedy decode after a chunked prefill; returns (prompt, generated) for the speculative case."""
    while True:
        seed, ids, lg, ft, t, g = screened(X.M, n, seed, margin=X.margin)
        gen, steps, margin, clear = greedy_run(X, ids, cuts, n_steps, n_drafts)
        if X.strict and clear:
            whole = ids + gen[:-1]
            clear = min(trace_gaps(X.M, exact(X.M, whole)[2], whole)) > GAP
        if clear or not X.strict:
            break
        seed += 1
    X.emit("decode", "greedy_decode", {**steps, "prefill_last_logits": lg[-1]}, tokens=ids, chunks=cuts, generated=gen,
           min_margin=margin, gaps=g)
    return ids, gen


def speculative_case(X, ids, gen):
    """Speculative greedy decoding must emit exactly the plain greedy tokens."""
    S = Session(X.M)
    S.extend(ids)
    cur, emitted, trace, n = int(S.logits[-1].argmax()), [], [], len(gen) - 1
    while len(emitted) < n:
        base = S.n
        d, _, _ = S.draft(cur)
        rows = S.extend([cur] + d)
        toks = greedy_verify(d, rows.argmax(-1).tolist())
        S.truncate(base + len(toks))
        trace.append({"position": base, "token": cur, "drafts": d, "emitted": toks})
        emitted += toks
        cur = toks[-1]
    assert emitted[:n - 1] == gen[1:n], (emitted, gen)
    X.V.man.append({"kind": "speculative_greedy", "checkpoint": X.ckpt, "numerics": "f32", "tokens": ids, "steps": trace, "emitted": emitted})


def replay_run(X, ids, keep_tokens, mode, n_steps=6):
    """Replayed prefill, then greedy steps: (logits of the kept rows, generated ids, step tensors, clear)."""
    S = Session(X.M)
    S.prefill_replay(ids, keep_tokens, mode)
    first, tail = S.logits.clone(), {}
    gen, margins = [int(first[-1].argmax())], [argmax_margin(first[-1])]
    for k in range(n_steps):
        S.extend([gen[-1]])
        tail[f"step{k}_logits"] = S.logits[-1]
        margins.append(argmax_margin(S.logits[-1]))
        gen.append(int(S.logits[-1].argmax()))
    clear = True
    if X.strict:                                              # the masked full pass takes the same decisions
        whole = ids + gen[:-1]
        t = exact(X.M, whole, replay_mask=(max(0, len(ids) - keep_tokens), mode))[2]
        clear = min(trace_gaps(X.M, t, whole)) > GAP and min(margins) >= MARGIN and ordinary(X.M, gen)
    return first, gen, tail, clear


def replay_case(X, n, seed, variants):
    """Bounded replay of the decoder half; variants = (name, keep_tokens, boundary_swa), all on one prompt."""
    while True:
        seed, ids, lg, ft, t, g = screened(X.M, n, seed, margin=X.margin)
        runs = [replay_run(X, ids, keep, mode) for _, keep, mode in variants]
        if all(r[3] for r in runs):
            break
        seed += 1
    for (name, keep, mode), (first, gen, tail, _) in zip(variants, runs):
        X.emit(name, "bounded_replay", {"logits_kept_rows": first[-8:], "exact_logits_last": lg[-1], **tail}, tokens=ids,
               keep_tokens=keep, boundary_swa=mode, generated=gen, max_diff_to_exact=(first[-1] - lg[-1]).abs().max().item(), gaps=g)


def image_case(X, n, a, b, newlines, seed, streams):
    """Image span [a, b): gate bias_vl, Engram dead tokens, embeddings supplied from outside.

    newlines: offsets of image_newline rows; streams: layers whose stream_out is kept."""
    M = X.M
    image = [a <= i < b for i in range(n)]
    emb = torch.randn(b - a, M.H, generator=torch.Generator().manual_seed(7))
    rows = {a + i: emb[i] for i in range(b - a)}
    rows[a], rows[b - 1] = M.w("image_start").clone(), M.w("image_end").clone()
    for i in newlines:
        rows[a + i] = M.w("image_newline").clone()
    seed, ids, lg, ft, t, g = screened(M, n, seed, image, rows, X.margin)
    keep = {k: x for k, x in t.items() if k.endswith(("route_ids", "engram.rows", "engram.gate", "stream_out"))
            and ("stream" not in k or int(k.split(".")[1]) in streams)}
    X.emit("image", "image_span", {"image_mask": torch.tensor(image), "span_embeddings": torch.stack([rows[i] for i in range(a, b)]), "logits": lg, **keep},
           tokens=ids, span=[a, b], gaps=g)


def layer_local_case(V, path, ckpt, tag, n, seed):
    """Quantized numerics, layer by layer: input of every layer is given, output is checked."""
    M = Model(Checkpoint(path), QDQ)
    ids = prompt(seed, n, M.c["dspark_noise_token_id"])
    lg, ft, t = exact(M, ids)
    loc = {"stream_0": t["layers.0.stream_in"], "logits": lg}
    for l in range(M.L):
        p = f"layers.{l}."
        for k in ("stream_out", "pre_in", "route_ids", "compressed_kv", "index_k", "selected", "candidates"):
            if p + k in t:
                loc[p + k] = t[p + k]
    loc["final_pre"] = t["final_pre"]
    V.emit(f"{tag}_qdq_layers", loc, kind="layer_local_quantized", checkpoint=ckpt, numerics="act_fp8+kv", tokens=ids)


def main(root):
    V = Vectors(os.path.join(root, "vectors"))
    for v in ("tiny-bf16", "tiny-quant"):
        tag = v.split("-")[1]
        X = Subject(V, Model(Checkpoint(os.path.join(root, v)), F32), v, tag, tag == "bf16")
        short_case(X, 24, 100)
        long_case(X, 160, 200)
        speculative_case(X, *decode_case(X, 77, 300, [31, 1, 45]))
        replay_case(X, 120, 400, (("replay_trunc40", 40, "truncated"), ("replay_full32", 32, "full")))
        image_case(X, 48, 14, 30, (5, 9), 500, (1, 3, 5, 9) if X.full else ())
    layer_local_case(V, os.path.join(root, "tiny-quant"), "tiny-quant", "quant", 76, 600)
    constants(V)
    V.close()


def constants(V):
    """Cases that need no checkpoint: number formats, verification lengths, Engram and rope of the real config."""
    out = V.out
    g = torch.Generator().manual_seed(9)
    x = torch.randn(16, 128, generator=g) * torch.exp(3 * torch.randn(16, 1, generator=g))
    x[0] = 0.0
    x[1, :8] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    w = torch.randn(64, 96, generator=g)
    w8, s8 = quant.quant_weight_fp8(w)
    w4, s4 = quant.quant_weight_fp4(w)
    V.emit("number_formats", {"x": x, "fp8_32_ue8m0": quant.qdq_fp8(x), "fp4_32_ue8m0": quant.qdq_fp4_ue8m0(x), "fp4_16_e4m3": quant.qdq_fp4_e4m3(x),
                              "w": w, "w_fp8": w8.view(torch.uint8), "w_fp8_scale": s8, "w_fp8_dequant": quant.dequant_weight_fp8(w8, s8),
                            "w_fp4": w4.view(torch.uint8), "w_fp4_scale": s4, "w_fp4_dequant": quant.dequant_weight_fp4(w4, s4)}, kind="number_formats")

    # scheduling of verification lengths
    cases = []
    for seed in range(12):
        r = torch.Generator().manual_seed(1000 + seed)
        n = 1 + seed % 5
        conf = [[round(v, 3) for v in row] for row in torch.rand(n, 5, generator=r).tolist()]
        surv = sorted((float(torch.tensor(row[:j + 1], dtype=torch.float64).prod()) for row in conf for j in range(5)), reverse=True)
        base, slope = 4.0 + seed, 0.02 * (1 + seed)
        k = best_total(surv, n, lambda rows: base + slope * rows)
        cases.append({"confidence": conf, "step_ms": {"base": base, "per_row": slope}, "drafts_to_verify": k, "rows_per_sequence": plan_lengths(conf, n + k)})
    json.dump(cases, open(os.path.join(out, "spec_decode.json"), "w"), indent=0)

    # constants of the REAL config
    real = {"engram_layer_ids": [1, 14], "engram_max_ngram_size": 4, "engram_vocab_size": 16000000, "engram_n_heads": 8,
            "engram_compressed_vocab_size": 99092, "engram_pad_token_id": 2, "engram_num_embeddings": [384006168, 384016682]}
    H = eg.Hasher(real, list(range(99092)))
    hist = torch.randint(0, 99092, (12,), generator=g).tolist()
    hist[4] = eg.DEAD
    json.dump({"config": real, "primes": H.primes, "multipliers": H.mult, "offsets": H.offsets,
               "example": {"note": "identity token map, pad id 2, -1 = image token", "compressed_ids": hist,
                           "rows": {str(l): [H.row_ids(l, hist, t) for t in range(12)] for l in (1, 14)}}},
              open(os.path.join(out, "engram_real.json"), "w"))
    yarn = {"original_max_position_embeddings": 65536, "factor": 16, "beta_fast": 32, "beta_slow": 1}
    fs, fc = rope_freqs(64, 10000, None), rope_freqs(64, 160000, yarn)
    v = torch.randn(6, 2, 96, generator=g)
    pos = torch.tensor([0, 1, 127, 4096, 65535, 1048575])
    V.emit("rope_real", {"freqs_swa": fs, "freqs_compressed": fc, "x": v, "positions": pos, "rotated_swa": rotate(v, pos, fs),
                       "rotated_compressed": rotate(v, pos, fc), "rotated_compressed_inverse": rotate(v, pos, fc, inverse=True)}, kind="rope")


if __name__ == "__main__":
    main(sys.argv[1])
