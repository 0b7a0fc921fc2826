"""Digests that tie fixtures to the scripts that made them (own code, standard library only).

  python digests.py check DIR       compare DIR with DIR/DIGESTS.json and the sources beside this file with it
  python digests.py write-golden DIR   write DIGESTS.json of the golden directory

DIGESTS.json:
  {"format": 1,
   "files":   {"<path below DIR, / as separator>": "<sha256, lower-case hex>", ...},   every file except DIGESTS.json and README.md
   "sources": {"<file name in the oracle folder>": "<sha256>", ...}}                   every script that shaped the files
Keys are sorted; the file ends with a newline.
"""
import hashlib
import json
import os
import sys

NAME = "DIGESTS.json"
HERE = os.path.dirname(os.path.abspath(__file__))
# What shaped both directories, and what shaped only one of them.
SOURCES = ("checkpoint.py", "engram.py", "make_golden.py", "make_tiny.py", "oracle.py", "quant.py", "spec_decode.py")
GOLDEN_SOURCES = SOURCES + ("make_continuations.py",)
SHAPE_SOURCES = SOURCES + ("make_shapes.py", "shapes.py")


def sha256(path):
    with open(path, "rb") as f:
        return hashlib.sha256(f.read()).hexdigest()


def files_below(root):
    found = []
    for folder, _, names in os.walk(root):
        found += [os.path.relpath(os.path.join(folder, n), root).replace(os.sep, "/") for n in names]
    return sorted(f for f in found if f not in (NAME, "README.md"))


def digests(root, sources):
    return {"format": 1, "files": {f: sha256(os.path.join(root, f)) for f in files_below(root)},
            "sources": {s: sha256(os.path.join(HERE, s)) for s in sorted(sources)}}


def write(root, sources):
    with open(os.path.join(root, NAME), "w") as f:
        f.write(json.dumps(digests(root, sources), indent=1, sort_keys=True) + "\n")


def check(root):
    """Differences between DIGESTS.json and what lies on the disk, one line each; empty when all is well."""
    with open(os.path.join(root, NAME)) as f:
        want = json.load(f)
    have = digests(root, [s for s in want["sources"] if os.path.exists(os.path.join(HERE, s))])
    bad = []
    for part in ("files", "sources"):
        for name in sorted(want[part].keys() | have[part].keys()):
            if name not in have[part]:
                bad.append(f"{part}: {name} is missing")
            elif name not in want[part]:
                bad.append(f"{part}: {name} is not listed")
            elif have[part][name] != want[part][name]:
                bad.append(f"{part}: {name} has changed")
    return bad


def report(root):
    bad = check(root)
    print("\n".join(bad) or f"{root}: all digests agree")
    return 1 if bad else 0


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("check", "write-golden"):
        sys.exit(__doc__)
    sys.exit(report(sys.argv[2]) if sys.argv[1] == "check" else write(sys.argv[2], GOLDEN_SOURCES))
