"""Reference ("oracle") implementation of the DeepSeek-V4.1-Flash text model and its DSpark draft head.

Own code, float32, CPU, one sequence, no batching. Written for reading, not for speed. See ../spec/model.md.

Two independent evaluation paths exist on purpose and must agree:
  * Model.forward_full(tokens)  - all positions at once, dense masks, no caches;
  * Session.extend(tokens)      - chunked prefill / decode with caches and index gathers.
Session.prefill_replay() adds the decoder-side bounded replay (an approximation) and Session.draft() the DSpark
block draft.

Numerics switches (class Numerics):
  act_fp8   quantize-dequantize the input of every FP8 / FP4 linear to FP8 (32-groups, UE8M0)
  kv        quantize-dequantize SWA KV (FP8/32/UE8M0), compressed KV (FP4/16/E4M3), indexer q,k (FP4/32/UE8M0)
  bf16      round to bfloat16 at the points where the official reference stores bfloat16
  wo_a_fp8  also FP8-quantize the input of attn.wo_a (fast GPU engines do, the official reference does not)
"""
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import quant
from engram import DEAD, Hasher

INF = float("inf")


@dataclass
class Numerics:
    act_fp8: bool = False
    kv: bool = False
    bf16: bool = False
    wo_a_fp8: bool = False


F32 = Numerics()
OFFICIAL = Numerics(act_fp8=True, kv=True, bf16=True)


# ------------------------------------------------------------------------------------------------ small pieces

def rmsnorm(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rope_freqs(dim, theta, yarn):
    """Inverse frequencies [dim/2]; `yarn` = rope_scaling dict or None."""
    f = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if yarn:
        orig, factor = yarn["original_max_position_embeddings"], yarn["factor"]

        def turn_dim(rotations):
            return dim * math.log(orig / (rotations * 2 * math.pi)) / (2 * math.log(theta))

        lo = max(math.floor(turn_dim(yarn["beta_fast"])), 0)
        hi = min(math.ceil(turn_dim(yarn["beta_slow"])), dim - 1)
        ramp = ((torch.arange(dim // 2, dtype=torch.float32) - lo) / max(hi - lo, 1e-3)).clamp(0, 1)
        f = f / factor * ramp + f * (1 - ramp)
    return f


def rotate(x, pos, freqs, inverse=False):
    """Rotate the LAST 2*len(freqs) channels of x [T,...,D]; adjacent channels (2i, 2i+1) form a pair."""
    rd = 2 * freqs.numel()
    ang = pos.float().unsqueeze(-1) * freqs                    # [T, rd/2]
    cos, sin = torch.cos(ang), torch.sin(ang)
    if inverse:
        sin = -sin
    shape = (x.shape[0],) + (1,) * (x.ndim - 2) + (rd // 2,)
    cos, sin = cos.view(shape), sin.view(shape)
    head, tail = x[..., :-rd], x[..., -rd:]
    a, b = tail[..., 0::2], tail[..., 1::2]
    tail = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    return torch.cat([head, tail], -1)


def sinkhorn_split(mixes, scale, base, m, iters, eps):
    """mixes [T, m*(2+m)] -> pre [T,m], post [T,m], comb [T,m,m] (comb[i,j]: weight of OLD copy i in NEW copy j)."""
    pre = torch.sigmoid(mixes[:, :m] * scale[0] + base[:m]) + eps
    post = 2.0 * torch.sigmoid(mixes[:, m:2 * m] * scale[1] + base[m:2 * m])
    c = (mixes[:, 2 * m:] * scale[2] + base[2 * m:]).view(-1, m, m)
    c = torch.softmax(c, -1) + eps
    c = c / (c.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        c = c / (c.sum(-1, keepdim=True) + eps)
        c = c / (c.sum(-2, keepdim=True) + eps)
    return pre, post, c


def topk_mask(scores, k):
    """True at the k highest entries of each row (ties: lowest index), never at -inf."""
    k = min(k, scores.shape[-1])
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :k]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, True) & (scores > -INF)


def candidate_mask(scores, lens, topk_blocks, block):
    """Level one: keep the `topk_blocks` best blocks per row. scores [T,N] has -inf where not visible; lens [T]."""
    n = scores.shape[-1]
    s = F.pad(scores, (0, -n % block), value=-INF).unflatten(-1, (-1, block)).amax(-1)
    newest = (lens - 1).div(block, rounding_mode="floor")
    s = torch.where(torch.arange(s.shape[-1]) == newest.unsqueeze(-1), torch.tensor(INF), s)   # always keep newest
    return topk_mask(s, topk_blocks).repeat_interleave(block, -1)[..., :n]


def attend(q, kv, mask, sink, scale):
    """q [T,H,D], kv [N,D] (keys == values), mask [T,N], sink [H] -> [T,H,D]. The sink only adds to the denominator."""
    s = torch.einsum("thd,nd->thn", q, kv) * scale
    s = s.masked_fill(~mask.unsqueeze(1), -INF)
    top = torch.maximum(s.amax(-1), sink).unsqueeze(-1)
    p = torch.exp(s - top)
    return torch.einsum("thn,nd->thd", p, kv) / (p.sum(-1, keepdim=True) + torch.exp(sink.unsqueeze(-1) - top))


# ------------------------------------------------------------------------------------------------------- model

class Model:
    def __init__(self, ckpt, numerics=F32):
        self.ck, self.num = ckpt, numerics
        c = self.c = ckpt.config["text_config"]
        self.L, self.m, self.H = c["num_hidden_layers"], c["hc_mult"], c["hidden_size"]
        self.eps, self.heads, self.hd, self.rd = c["rms_norm_eps"], c["num_attention_heads"], c["head_dim"], c["qk_rope_head_dim"]
        self.window = c["sliding_window"]
        self.kv_src, self.ix_src = sorted(c["kv_source_layer_ids"]), sorted(c["index_source_layer_ids"])
        self.cand = c.get("candidate_source_layer_id")
        self.cand = -1 if self.cand is None else self.cand
        # First decoder layer, or None: a network without a ratio-1 layer has no decoder half and no bounded replay.
        self.n_enc = next((i for i, r in enumerate(c["compress_ratios"][:self.L]) if r == 1), None)
        self.f_swa = rope_freqs(self.rd, c["rope_theta"], None)
        self.f_cmp = rope_freqs(self.rd, c["compress_rope_theta"], c.get("rope_scaling"))
        self.hasher = Hasher(c, ckpt.token_map) if c.get("engram_layer_ids") else None
        self.trace = None                                     # set to a dict to record activations

    # -- helpers
    def w(self, name):
        return self.ck.w(name)

    def r(self, x):
        return x.bfloat16().float() if self.num.bf16 else x

    def lin(self, x, name):
        if self.num.act_fp8 and self.ck.kind(name) != "plain":
            x = quant.qdq_fp8(x)
        return self.r(x @ self.w(name).T)

    def norm(self, x, name):
        return self.r(rmsnorm(x, self.w(name), self.eps))

    def rec(self, key, value):
        if self.trace is not None:
            self.trace[key] = value.clone()

    def ratio(self, layer):
        return self.c["compress_ratios"][layer]

    def source(self, layer, ids):
        return max(s for s in ids if s <= layer)

    def freqs(self, layer):
        return self.f_cmp if self.ratio(layer) else self.f_swa

    def embed(self, ids):
        return self.w("embed.weight")[torch.as_tensor(ids)]

    # -- hyper-connections
    def mixes(self, s, p, which):
        """s [T,m,H] -> (pre, post, comb) of sublayer `which` ('attn' or 'ffn') of block prefix p."""
        flat = s.flatten(1)
        x = flat @ self.w(f"{p}hc_{which}_fn").T * torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.eps)
        return sinkhorn_split(x, self.w(f"{p}hc_{which}_scale"), self.w(f"{p}hc_{which}_base"), self.m,
                              self.c["hc_sinkhorn_iters"], self.c["hc_eps"])

    def collapse(self, s, pre):
        return self.r((pre.unsqueeze(-1) * s).sum(1))

    def merge(self, y, s, post, comb):
        return self.r(post.unsqueeze(-1) * y.unsqueeze(1) + torch.einsum("tij,tid->tjd", comb, s))

    # -- attention projections shared by both paths
    def q_latent(self, x, p):
        return self.norm(self.lin(x, f"{p}attn.wq_a.weight"), f"{p}attn.q_norm.weight")

    def queries(self, qr, p, pos, freqs):
        q = self.lin(qr, f"{p}attn.wq_b.weight").view(-1, self.heads, self.hd)
        return self.r(rotate(q, pos, freqs))

    def swa_kv(self, x, p, pos, freqs):
        kv = self.norm(self.lin(x, f"{p}attn.wkv.weight"), f"{p}attn.kv_norm.weight")
        kv = self.r(rotate(kv, pos, freqs))
        return self.r(quant.qdq_fp8(kv)) if self.num.kv else kv

    def compress_inputs(self, x, layer):
        """Per-token inputs of the compressor: (value, gate logits or None), both [T,hd]."""
        p = f"layers.{layer}.attn.compressor."
        if self.ratio(layer) == 1:
            return self.r(x @ self.w(p + "wkv.weight").T), None
        return x @ self.w(p + "wkv.weight").T, x @ self.w(p + "wgate.weight").T      # float32 in every engine

    def compress(self, val, gate, layer):
        """Complete groups only: val [G*ratio,hd] -> normalized latent BEFORE rope [G,hd]."""
        ratio = self.ratio(layer)
        if ratio > 1:
            n = val.shape[0] // ratio
            v, g = val.unflatten(0, (n, ratio)), gate.unflatten(0, (n, ratio))
            val = self.r((v * torch.softmax(g, 1)).sum(1))
        return self.norm(val, f"layers.{layer}.attn.compressor.norm.weight")

    def main_kv(self, latent, layer, group):
        """Latent of group indices `group` -> stored compressed KV (rotated at the group's FIRST token)."""
        kv = self.r(rotate(latent, group * self.ratio(layer), self.f_cmp))
        return self.r(quant.qdq_fp4_e4m3(kv)) if self.num.kv else kv

    def index_k(self, latent, layer, group):
        p = f"layers.{layer}.attn.indexer."
        k = self.norm(self.r(latent @ self.w(p + "wk.weight").T), p + "k_norm.weight")
        k = self.r(rotate(k, group * self.ratio(layer), self.f_cmp))
        return self.r(quant.qdq_fp4_ue8m0(k)) if self.num.kv else k

    def index_scores(self, x, qr, layer, pos, ik, lens):
        """[T,N] scores, -inf where compressed entry n is not yet visible (n >= lens[t])."""
        p, nh, d = f"layers.{layer}.attn.indexer.", self.c["index_n_heads"], self.c["index_head_dim"]
        q = self.lin(qr, p + "wq_b.weight").view(-1, nh, d)
        q = self.r(rotate(q, pos, self.f_cmp))
        if self.num.kv:
            q = self.r(quant.qdq_fp4_ue8m0(q))
        wts = self.r(self.r(x @ self.w(p + "weights_proj.weight").T) * (d ** -0.5 * nh ** -0.5))
        dots = self.r(torch.einsum("thd,nd->thn", q, ik)).relu()
        s = self.r(self.r(dots * wts.unsqueeze(-1)).sum(1))
        return s.masked_fill(torch.arange(ik.shape[0]) >= lens.unsqueeze(-1), -INF)

    def out_proj(self, o, p, pos, freqs):
        o = self.r(rotate(self.r(o), pos, freqs, inverse=True)).flatten(1)          # values carry the key rotation
        g, rank = self.c["o_groups"], self.c["o_lora_rank"]
        if self.num.wo_a_fp8:
            o = quant.qdq_fp8(o)
        wo_a = self.r(self.w(f"{p}attn.wo_a.weight")).view(g, rank, -1)
        o = self.r(torch.einsum("tgd,grd->tgr", o.view(o.shape[0], g, -1), wo_a))
        return self.lin(o.flatten(1), f"{p}attn.wo_b.weight")

    # -- mixture of experts
    def expert(self, x, p, weight=None):
        lim = self.c["swiglu_limit"]
        gate, up = self.lin(x, p + "w1.weight"), self.lin(x, p + "w3.weight")
        if lim > 0:
            gate, up = gate.clamp(max=lim), up.clamp(-lim, lim)
        h = F.silu(gate) * up
        if weight is not None:
            h = h * weight.unsqueeze(-1)
        return self.lin(self.r(h), p + "w2.weight")

    def moe(self, x, p, topk, image=None):
        scores = F.softplus(x @ self.w(f"{p}ffn.gate.weight").T).sqrt()
        bias = self.w(f"{p}ffn.gate.bias").expand_as(scores)
        if image is not None:
            bias = torch.where(image.unsqueeze(-1), self.w(f"{p}ffn.gate.bias_vl"), bias)
        ids = torch.sort(scores + bias, dim=-1, descending=True, stable=True).indices[:, :topk]
        wt = scores.gather(1, ids)
        if self.c["norm_topk_prob"] and topk > 1:
            wt = wt / (wt.sum(-1, keepdim=True) + 1e-20)
        wt = wt * self.c["routed_scaling_factor"]
        self.rec(f"{p}route_ids", ids)
        self.rec(f"{p}route_weights", wt)
        y = torch.zeros_like(x)
        for e in ids.unique().tolist():
            t, slot = (ids == e).nonzero(as_tuple=True)
            y[t] += self.expert(x[t], f"{p}ffn.experts.{e}.", wt[t, slot])
        return self.r(y + self.expert(x, f"{p}ffn.shared_experts."))

    # -- engram
    def engram(self, s, layer, rows, keep):
        """s [T,m,H]; rows [T,cols] table rows; keep [T] bool (False: image token, unchanged)."""
        p = f"layers.{layer}.engram."
        e = self.r(self.w(p + "embed.weight")[rows].flatten(1))
        kv = self.lin(e, p + "wkv.weight")
        key, val = kv[:, :self.m * self.H].view(-1, self.m, self.H), kv[:, self.m * self.H:]
        wq, wk = self.w(p + "q_weight"), self.w(p + "k_weight")
        rs = torch.rsqrt(s.square().mean(-1) + self.eps) * torch.rsqrt(key.square().mean(-1) + self.eps)
        dot = (s * (wq * wk) * key).sum(-1) * rs * self.H ** -0.5
        gate = torch.sigmoid(torch.copysign(dot.abs().clamp_min(1e-6).sqrt(), dot))
        gate = gate * keep.unsqueeze(-1)
        self.rec(f"{p}gate", gate)
        return self.r(s + gate.unsqueeze(-1) * val.unsqueeze(1))

    # -- block skeleton: attention itself is passed in as a function x -> y
    def block(self, s, pre, p, attn_fn, topk, image=None):
        a_pre, a_post, a_comb = self.mixes(s, p, "attn")
        x = self.norm(self.collapse(s, pre), f"{p}attn_norm.weight")          # uses the mix handed over by the caller
        self.rec(f"{p}attn_in", x)
        y = attn_fn(x)
        self.rec(f"{p}attn_out", y)
        s = self.merge(y, s, a_post, a_comb)
        f_pre, f_post, f_comb = self.mixes(s, p, "ffn")
        x = self.norm(self.collapse(s, a_pre), f"{p}ffn_norm.weight")         # uses attention's mix, not its own
        self.rec(f"{p}ffn_in", x)
        y = self.moe(x, p, topk, image)
        self.rec(f"{p}ffn_out", y)
        s = self.merge(y, s, f_post, f_comb)
        self.rec(f"{p}stream_out", s)
        return s, f_pre

    def first_mix(self, t):
        pre = torch.zeros(t, self.m)
        pre[:, 0] = 1.0
        return pre

    def logits(self, s, pre):
        x = self.norm(self.collapse(s, pre), "norm.weight")
        return x @ self.w("head.weight").T

    def input_stream(self, ids, image_rows=None):
        """Embeddings; image_rows = {position: vector} overrides image-span positions."""
        x = self.embed(ids)
        for i, v in (image_rows or {}).items():
            x[i] = v
        return x.unsqueeze(1).repeat(1, self.m, 1)

    # ------------------------------------------------------------------------------------------ path 1: no caches
    def forward_full(self, ids, image=None, image_rows=None, force=None, replay_mask=None):
        """Returns (logits [T,V], draft features [T, n_targets*H]). Dense masks over all positions.

        force: {layer: (stream, pre)} replaces the input of that layer (layer-local tests under quantization, where
        one rounding flip early on makes whole-network comparisons meaningless).
        replay_mask: (keep_from, boundary_swa) emulates bounded replay by masking only: decoder layers see no window
        key before keep_from. Rows >= keep_from must equal Session.prefill_replay()."""
        T = len(ids)
        pos = torch.arange(T)
        s = self.input_stream(ids, image_rows)
        pre = self.first_mix(T)
        hist = self.hasher.compress(ids, image) if self.hasher else None
        img = None if image is None else torch.as_tensor(image, dtype=torch.bool)
        keep = torch.ones(T, dtype=torch.bool) if img is None else ~img
        swa_mask = (pos.view(1, -1) <= pos.view(-1, 1)) & (pos.view(1, -1) > pos.view(-1, 1) - self.window)
        shared, feats = {}, []

        for layer in range(self.L):
            p, ratio = f"layers.{layer}.", self.ratio(layer)
            if force and layer in force:
                s, pre = force[layer]
            self.rec(f"{p}stream_in", s)
            self.rec(f"{p}pre_in", pre)
            if self.hasher and layer in self.hasher.layer_ids:
                rows = torch.tensor([self.hasher.row_ids(layer, hist, t) for t in range(T)])
                self.rec(f"{p}engram.rows", rows)
                s = self.engram(s, layer, rows, keep)
            if layer in self.c.get("dspark_target_layer_ids", ()):
                feats.append(self.r(s.mean(1)))

            def attn(x):
                fr = self.freqs(layer)
                qr = self.q_latent(x, p)
                q = self.queries(qr, p, pos, fr)
                kv, mask = self.swa_kv(x, p, pos, fr), swa_mask
                if replay_mask and layer >= self.n_enc + (replay_mask[1] == "full"):
                    mask = mask & (pos >= replay_mask[0])
                if ratio:
                    lens = (pos + 1) // ratio
                    if layer in self.kv_src:
                        n = T // ratio
                        val, gate = self.compress_inputs(x, layer)
                        lat = self.compress(val[:n * ratio], None if gate is None else gate[:n * ratio], layer)
                        shared["kv"] = self.main_kv(lat, layer, torch.arange(n))
                        shared["ik"] = self.index_k(lat, layer, torch.arange(n))
                        self.rec(f"{p}compressed_kv", shared["kv"])
                        self.rec(f"{p}index_k", shared["ik"])
                    if layer in self.ix_src:
                        sc = self.index_scores(x, qr, layer, pos, shared["ik"], lens)
                        self.rec(f"{p}index_scores", sc)
                        if layer == self.cand:
                            shared["cand"] = candidate_mask(sc, lens, self.c["candidate_topk_blocks"], self.c["candidate_block_size"])
                            self.rec(f"{p}candidates", shared["cand"])
                        elif 0 <= self.cand < layer:
                            sc = sc.masked_fill(~shared["cand"], -INF)
                        shared["sel"] = topk_mask(sc, self.c["index_topk"])
                        self.rec(f"{p}selected", shared["sel"])
                    kv, mask = torch.cat([kv, shared["kv"]]), torch.cat([mask, shared["sel"]], 1)
                o = attend(q, kv, mask, self.w(f"{p}attn.attn_sink"), self.hd ** -0.5)
                self.rec(f"{p}attn_core", o)
                return self.out_proj(o, p, pos, fr)

            s, pre = self.block(s, pre, p, attn, self.c["num_experts_per_tok"], img)
        self.rec("final_pre", pre)
        return self.logits(s, pre), torch.cat(feats, -1) if feats else None


# ------------------------------------------------------------------------------------------------ path 2: caches

class Session:
    """One sequence with caches. Caches are stored per position (dicts / growing lists) for clarity; an engine
    needs only a ring of `window` (+ rollback slack) rows per layer, the compressed rows of the KV sources, and the
    last incomplete group of each ratio-2 source."""

    def __init__(self, model):
        self.M, self.n = model, 0
        L = model.L + model.c.get("num_nextn_predict_layers", 0)
        self.swa = [dict() for _ in range(L)]                 # layer -> {position: row [hd]}
        self.swa_from = [0] * L                               # first position whose SWA row may be read
        self.pend = {s: dict() for s in model.kv_src}         # source -> {position: (value, gate)}
        self.main = {s: [] for s in model.kv_src}             # source -> list of compressed rows
        self.ik = {s: [] for s in model.kv_src}
        self.hist = []                                        # compressed token ids (Engram)
        self.logits = self.feats = None

    # -- cache primitives
    def _store_compressed(self, x, layer, pos):
        M, ratio = self.M, self.M.ratio(layer)
        val, gate = M.compress_inputs(x, layer)
        for i, t in enumerate(pos.tolist()):
            self.pend[layer][t] = (val[i], None if gate is None else gate[i])
            if (t + 1) % ratio == 0:
                g = t // ratio
                rows = [self.pend[layer][u] for u in range(g * ratio, t + 1)]
                lat = M.compress(torch.stack([a for a, _ in rows]), None if gate is None else torch.stack([b for _, b in rows]), layer)
                del self.main[layer][g:], self.ik[layer][g:]
                self.main[layer].append(M.main_kv(lat, layer, torch.tensor([g]))[0])
                self.ik[layer].append(M.index_k(lat, layer, torch.tensor([g]))[0])

    def _swa_rows(self, layer, t):
        lo = max(t - self.M.window + 1, self.swa_from[layer], 0)
        return [self.swa[layer][u] for u in range(lo, t + 1)]

    def _attention(self, x, layer, pos, shared, kv_written):
        M, p, ratio = self.M, f"layers.{layer}.", self.M.ratio(layer)
        fr = M.freqs(layer)
        qr = M.q_latent(x, p)
        q = M.queries(qr, p, pos, fr)
        rows = M.swa_kv(x, p, pos, fr)
        for i, t in enumerate(pos.tolist()):
            self.swa[layer][t] = rows[i]
        if ratio:
            src = M.source(layer, M.kv_src)
            if layer == src and not kv_written:
                self._store_compressed(x, layer, pos)
            if layer in M.ix_src:
                lens = (pos + 1) // ratio
                ik = torch.stack(self.ik[src]) if self.ik[src] else torch.zeros(0, M.c["index_head_dim"])
                if ik.shape[0] == 0:
                    shared["sel"] = torch.zeros(len(pos), 0, dtype=torch.bool)
                    shared["cand"] = shared["sel"] if layer == M.cand else shared.get("cand")
                else:
                    sc = M.index_scores(x, qr, layer, pos, ik, lens)
                    if layer == M.cand:
                        shared["cand"] = candidate_mask(sc, lens, M.c["candidate_topk_blocks"], M.c["candidate_block_size"])
                    elif 0 <= M.cand < layer:
                        sc = sc.masked_fill(~shared["cand"], -INF)
                    shared["sel"] = topk_mask(sc, M.c["index_topk"])
        out = []
        for i, t in enumerate(pos.tolist()):                  # gather-style attention, one query at a time
            keys = self._swa_rows(layer, t)
            if ratio:
                keys = keys + [self.main[src][j] for j in shared["sel"][i].nonzero().flatten().tolist()]
            k = torch.stack(keys)
            out.append(attend(q[i:i + 1], k, torch.ones(1, len(keys), dtype=torch.bool), M.w(f"{p}attn.attn_sink"), M.hd ** -0.5))
        return M.out_proj(torch.cat(out), p, pos, fr)

    def _run(self, ids, image=None, image_rows=None, keep_from=None, boundary_swa="truncated"):
        """Process len(ids) new positions. keep_from: decoder layers run only on positions >= keep_from."""
        M, T = self.M, len(ids)
        pos = torch.arange(self.n, self.n + T)
        s, pre = M.input_stream(ids, image_rows), M.first_mix(T)
        self.hist = self.hist[:self.n] + (M.hasher.compress(ids, image) if M.hasher else [0] * T)
        img = None if image is None else torch.as_tensor(image, dtype=torch.bool)
        keep = torch.ones(T, dtype=torch.bool) if img is None else ~img
        shared, feats = {}, []
        for layer in range(M.L):
            p, kv_written = f"layers.{layer}.", False
            if keep_from is not None and layer == M.n_enc:
                # Boundary: the decoder's KV source still writes main + index KV for EVERY row from its own
                # attention input; then the batch shrinks to the kept rows for the rest of the network.
                x = M.norm(M.collapse(s, pre), f"{p}attn_norm.weight")
                self._store_compressed(x, layer, pos)
                kv_written = True
                if boundary_swa == "full":                    # vLLM: the boundary layer's own SWA KV covers all rows
                    rows = M.swa_kv(x, p, pos, M.freqs(layer))
                    for i, t in enumerate(pos.tolist()):
                        self.swa[layer][t] = rows[i]
                first = max(keep_from - self.n, 0)
                s, pre, pos = s[first:], pre[first:], pos[first:]
                img = None if img is None else img[first:]
                keep = keep[first:]                           # an Engram layer may lie in the decoder half,
                feats = [f[first:] for f in feats]            # a draft target in the encoder half
                shared = {}
                for j in range(layer + (boundary_swa == "full"), M.L):
                    self.swa_from[j] = max(self.swa_from[j], keep_from)
            if M.hasher and layer in M.hasher.layer_ids:
                rows = torch.tensor([M.hasher.row_ids(layer, self.hist, t) for t in pos.tolist()])
                s = M.engram(s, layer, rows, keep)
            if layer in M.c.get("dspark_target_layer_ids", ()):
                feats.append(M.r(s.mean(1)))
            s, pre = M.block(s, pre, p, lambda x: self._attention(x, layer, pos, shared, kv_written), M.c["num_experts_per_tok"], img)
        self.n += T
        self.logits = M.logits(s, pre)
        self.feats = (torch.cat(feats, -1), pos) if feats else None
        if self.feats is not None and M.c.get("num_nextn_predict_layers", 0):
            self._draft_context(*self.feats)
        return self.logits

    def extend(self, ids, image=None, image_rows=None):
        """Exact chunked prefill / decode; returns logits of every new position."""
        return self._run(ids, image, image_rows)

    def prefill_replay(self, ids, keep_tokens, boundary_swa="truncated"):
        """Decoder-side bounded replay of a fresh prompt: layers >= first ratio-1 layer see the last keep_tokens rows."""
        assert self.n == 0 and self.M.n_enc is not None and self.M.n_enc == self.M.kv_src[-1]
        return self._run(ids, keep_from=max(0, len(ids) - keep_tokens), boundary_swa=boundary_swa)

    def truncate(self, n):
        """Forget positions >= n (speculative rollback)."""
        M = self.M
        for d in self.swa:
            for t in [t for t in d if t >= n]:
                del d[t]
        for s in M.kv_src:
            for t in [t for t in self.pend[s] if t >= n]:
                del self.pend[s][t]
            del self.main[s][n // M.ratio(s):], self.ik[s][n // M.ratio(s):]
        self.hist, self.n = self.hist[:n], n

    # -- DSpark draft head
    def _draft_context(self, feats, pos):
        """Write the draft layers' context KV for main-model positions `pos`."""
        M = self.M
        x = M.norm(M.lin(feats, "mtp.0.main_proj.weight"), "mtp.0.main_norm.weight")
        for i in range(M.c["num_nextn_predict_layers"]):
            rows = M.swa_kv(x, f"mtp.{i}.", pos, M.f_swa)
            for j, t in enumerate(pos.tolist()):
                self.swa[M.L + i][t] = rows[j]

    def draft(self, token, greedy=True):
        """Draft dspark_block_size tokens after `token` (the sampled token of position self.n, not yet in the model).

        Returns (draft ids, logits [B,V] including the Markov bias, confidence logits [B])."""
        M, c = self.M, self.M.c
        B, P = c["dspark_block_size"], self.n
        ids = [token] + [c["dspark_noise_token_id"]] * (B - 1)
        pos = torch.arange(P, P + B)
        s, pre = M.input_stream(ids), M.first_mix(B)
        last = c["num_nextn_predict_layers"] - 1
        for i in range(last + 1):
            p, layer = f"mtp.{i}.", M.L + i

            def attn(x):
                q = M.queries(M.q_latent(x, p), p, pos, M.f_swa)
                block = M.swa_kv(x, p, pos, M.f_swa)
                ctx = [self.swa[layer][t] for t in range(max(0, P - M.window), P) if t in self.swa[layer]]
                kv = torch.cat([torch.stack(ctx), block])     # every row sees the context AND the whole block
                o = attend(q, kv, torch.ones(B, kv.shape[0], dtype=torch.bool), M.w(f"{p}attn.attn_sink"), M.hd ** -0.5)
                return M.out_proj(o, p, pos, M.f_swa)

            s, pre = M.block(s, pre, p, attn, c["dspark_num_experts_per_tok"])
        p = f"mtp.{last}."
        h = M.collapse(s, pre)
        logits = M.norm(h, p + "norm.weight") @ M.w("head.weight").T
        out, emb, prev = [], [], token
        for i in range(B):                                    # sequential first-order (Markov) correction
            e = M.w(p + "markov_head.embed.weight")[prev]
            logits[i] += e @ M.w(p + "markov_head.head.weight").T
            emb.append(e)
            prev = int(logits[i].argmax())
            out.append(prev)
        conf = torch.cat([h, torch.stack(emb)], -1) @ M.w(p + "confidence_head.proj.weight").T
        return out, logits, conf.squeeze(-1)
