"""Self-consistency of the oracle (own code):  python selfcheck.py GOLDEN_DIR

Checks full forward == chunked/step decode, bounded replay == masked full forward on the kept rows, speculative ==
plain greedy, and that stored golden logits are reproduced. Works on any directory laid out like the golden one.
"""
import json
import os
import sys

import torch
from safetensors.torch import load_file

from checkpoint import Checkpoint
from oracle import F32, Model, Session

torch.set_num_threads(1)
torch.set_grad_enabled(False)


def diff(a, b):
    return (a - b).abs().max().item()


root = sys.argv[1]
man = json.load(open(os.path.join(root, "vectors", "manifest.json")))
for v in dict.fromkeys(e["checkpoint"] for e in man if "checkpoint" in e):
    M = Model(Checkpoint(os.path.join(root, v)), F32)
    for e in man:
        if e.get("checkpoint") != v or e.get("numerics") != "f32":
            continue
        ids = e["tokens"]
        if e["kind"] == "exact_long":
            t = load_file(os.path.join(root, "vectors", e["file"]))
            full, _ = M.forward_full(ids)
            S = Session(M)
            cuts = [0, 50, 97, max(97, len(ids) - 5), *range(max(97, len(ids) - 5) + 1, len(ids) + 1)]
            inc = torch.cat([S.extend(ids[a:b]) for a, b in zip(cuts, cuts[1:]) if a < len(ids) and a < b])
            print(v, "full vs golden %.1e" % diff(full[-8:], t["logits_last8"]), "| chunked vs full %.1e" % diff(inc, full))
        if e["kind"] == "bounded_replay":
            K, mode = e["keep_tokens"], e["boundary_swa"]
            S = Session(M)
            got = S.prefill_replay(ids, K, mode)
            masked, _ = M.forward_full(ids, replay_mask=(len(ids) - K, mode))
            exact, _ = M.forward_full(ids)
            print(v, f"replay {mode} K={K}: compact vs masked %.1e" % diff(got, masked[-K:]), "| distance of last row to exact %.2f" % diff(got[-1], exact[-1]))
            S2, S3 = Session(M), Session(M)
            short = ids[:K]
            print(v, "   prompt of exactly K tokens, replay vs exact %.1e" % diff(S2.prefill_replay(short, K, mode), S3.extend(short)))
