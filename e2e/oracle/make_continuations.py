"""Greedy continuations of long prompts (own code), for tests of the prefix cache and of whole servers.

  python make_continuations.py GOLDEN_DIR           draw prompts, write GOLDEN_DIR/continuations.json (minutes)
  python make_continuations.py --rebuild GOLDEN_DIR   run the recorded prompts again and compare the ids

Near ties would let two correct engines go on differently, so there are none: every top-k decision of every row is clear by
GAP and every chosen token leads by MARGIN. No prompt drawn at one go is that clear. A row does not see the rows after it,
so ids are drawn again from the first unclear row on until the prompt is clear, then its last ids until the continuation is.

continuations.json:
  {"checkpoint", "numerics",
   "cases": [{"name", "seed", "prompt": [ids], "continuation": [ids], "min_margin", "min_gap", "path_difference"}]}
No id is special, so nothing ends a continuation early. `fork` shares its first SHARED ids with `repeat`.
"""
import json
import os
import sys

import torch

from checkpoint import Checkpoint
from make_golden import GAP, argmax_margin, exact, ordinary, trace_gaps
from oracle import F32, Model, Session

NAME = "continuations.json"
CHECKPOINT = "tiny-bf16"
STEPS = 64
SHARED = 640                 # five blocks of 128
MARGIN = 5e-3                # logits of two correct engines differ by 1e-4
PIECE = 173                  # rows of one step of the cached path; no divisor of a block or a window
TAIL = 32                    # last ids of a prompt: drawn again for another continuation


def draw(M, generator, count):
    return torch.randint(3, M.c["dspark_noise_token_id"], (count,), generator=generator).tolist()


def first_unclear(M, ids):
    """The first row with a decision that is not clear; the number of rows if there is none."""
    trace = exact(M, ids)[2]
    low, high = 0, len(ids) + 1                               # clear through row `low`, not through row `high`
    while high - low > 1:
        rows = (low + high) // 2
        ok = min(trace_gaps(M, {k: v[:rows] for k, v in trace.items()}, ids[:rows])) > GAP
        low, high = (rows, high) if ok else (low, rows)
    return low


def clear_prompt(M, generator, head, count):
    """`head` and then drawn ids, `count` together, every row clear."""
    ids = head + draw(M, generator, count - len(head))
    while (at := first_unclear(M, ids)) < count:
        assert at >= len(head), "the given ids are unclear"
        ids[at:] = draw(M, generator, count - at)
    return ids


def prefilled(M, ids):
    S = Session(M)
    for at in range(0, len(ids), PIECE):
        S.extend(ids[at:at + PIECE])
    return S


def greedy(M, S, steps, margin):
    """Greedy run of the cached path: (ids chosen, logits they were chosen from), or None at the first doubtful token."""
    gen, rows = [], []
    while True:
        row = S.logits[-1]
        gen.append(int(row.argmax()))
        rows.append(row)
        if argmax_margin(row) < margin or not ordinary(M, gen):
            return None
        if len(gen) == steps:
            return gen, torch.stack(rows)
        S.extend(gen[-1:])


def judged(M, ids, gen, rows):
    """What the dense path says to a run of the cached one: (margin, gap, difference of the logits), None if unclear."""
    whole = ids + gen[:-1]
    logits, _, trace = exact(M, whole)
    logits = logits[len(ids) - 1:]
    margin, gap = min(argmax_margin(rows), argmax_margin(logits)), min(trace_gaps(M, trace, whole))
    if logits.argmax(-1).tolist() != gen or margin < MARGIN or gap <= GAP:
        return None
    return margin, gap, (rows - logits).abs().max().item()


def case(M, name, count, seed, head=()):
    """A prompt of `count` ids that begins with `head` and whose continuation is beyond doubt."""
    generator = torch.Generator().manual_seed(seed)
    ids = clear_prompt(M, generator, list(head), count - TAIL)
    print(f"{name}: {len(ids)} clear rows", flush=True)
    S, tries = prefilled(M, ids), 0
    while True:
        tries += 1
        S.truncate(len(ids))
        tail = draw(M, generator, TAIL)
        S.extend(tail)
        run = greedy(M, S, STEPS, MARGIN)
        verdict = run and judged(M, ids + tail, *run)
        if verdict:
            margin, gap, difference = verdict
            print(f"{name}: try {tries}, margin {margin:.4f}, gap {gap:.1e}, paths differ by {difference:.1e}, "
                  f"{len(set(run[0]))} different ids", flush=True)
            return {"name": name, "seed": seed, "prompt": ids + tail, "continuation": run[0], "min_margin": margin, "min_gap": gap,
                    "path_difference": difference}


def write(root, cases):
    """One case a line: a prompt of a thousand ids is nothing to read line by line."""
    lines = ",\n".join("  " + json.dumps(c) for c in cases)
    with open(os.path.join(root, NAME), "w") as f:
        f.write(f'{{\n "checkpoint": "{CHECKPOINT}",\n "numerics": "f32",\n "cases": [\n{lines}\n ]\n}}\n')


def rebuild(root, M):
    with open(os.path.join(root, NAME)) as f:
        cases = json.load(f)["cases"]
    for c in cases:
        gen, rows = greedy(M, prefilled(M, c["prompt"]), len(c["continuation"]), 0.0)
        assert gen == c["continuation"], (c["name"], gen)
        verdict = judged(M, c["prompt"], gen, rows)
        assert verdict, f"{c['name']} is not clear"
        print(f"{c['name']}: the same {len(gen)} ids, margin %.4f, gap %.1e, paths differ by %.1e" % verdict, flush=True)


def main(args):
    again = args[:1] == ["--rebuild"]
    rest = args[1:] if again else args
    if len(rest) != 1 or rest[0].startswith("-"):
        return __doc__
    M = Model(Checkpoint(os.path.join(rest[0], CHECKPOINT)), F32)
    if again:
        return rebuild(rest[0], M)
    repeat = case(M, "repeat", 700, 7000)
    fork = case(M, "fork", 700, 8000, head=repeat["prompt"][:SHARED])
    write(rest[0], [repeat, fork, case(M, "long", 1300, 9000)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
