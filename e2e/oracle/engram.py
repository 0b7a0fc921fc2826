"""Engram n-gram hashing for DeepSeek-V4.1-Flash (own code).

Everything here is integer arithmetic and must be reproduced bit for bit.
"""
import numpy as np

DEAD = -1   # a position (image token) that never takes part in an n-gram


def is_prime(n):
    if n < 2:
        return False
    small = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)
    for p in small:
        if n % p == 0:
            return n == p
    d, s = n - 1, 0
    while d % 2 == 0:
        d, s = d // 2, s + 1
    for a in small:                      # deterministic Miller-Rabin below 3.3e24
        x = pow(a, d, n)
        if x in (1, n - 1):
            continue
        for _ in range(s - 1):
            x = x * x % n
            if x == n - 1:
                break
        else:
            return False
    return True


def bucket_primes(layer_ids, max_ngram, vocab_size, n_heads):
    """[layer][ngram-2][head]: increasing primes >= vocab_size, never used twice over ALL layers.

    For every (layer, n) the search restarts at vocab_size; primes already taken are skipped.
    """
    used, out = set(), []
    for _ in layer_ids:
        per_layer = []
        for _ in range(max_ngram - 1):
            row, cur = [], vocab_size - 1
            for _ in range(n_heads):
                cur += 1
                while cur in used or not is_prime(cur):
                    cur += 1
                used.add(cur)
                row.append(cur)
            per_layer.append(row)
        out.append(per_layer)
    return out


def multipliers(layer_ids, max_ngram, compressed_vocab):
    """[layer][lag] odd int64 multipliers from numpy's default_rng(10007 * layer_id)."""
    bound = max(1, ((2**63 - 1) // compressed_vocab) // 2)
    rows = []
    for lid in layer_ids:
        rng = np.random.default_rng(10007 * lid)
        rows.append((rng.integers(0, bound, size=(max_ngram,), dtype=np.int64) * 2 + 1).tolist())
    return rows


def token_map(tok):
    """Compressed Engram vocabulary: tokens whose normalized text agrees share one id (first come, first numbered)."""
    from tokenizers import Regex, normalizers as nz
    mark = "\ue000"
    norm = nz.Sequence([nz.NFKC(), nz.NFD(), nz.StripAccents(), nz.Lowercase(), nz.Replace(Regex(r"[ \t\r\n]+"), " "),
                        nz.Replace(Regex(r"^ $"), mark), nz.Strip(), nz.Replace(mark, " ")])
    ids, out = {}, []
    for t in range(tok.get_vocab_size()):
        text = tok.decode([t], skip_special_tokens=False)
        key = tok.id_to_token(t) if "\ufffd" in text else (norm.normalize_str(text) or text)
        out.append(ids.setdefault(key, len(ids)))
    return out


class Hasher:
    def __init__(self, text_cfg, token_map):
        c = text_cfg
        self.layer_ids = list(c["engram_layer_ids"])
        self.n = c["engram_max_ngram_size"]
        self.primes = bucket_primes(self.layer_ids, self.n, c["engram_vocab_size"], c["engram_n_heads"])
        self.mult = multipliers(self.layer_ids, self.n, c["engram_compressed_vocab_size"])
        self.token_map = token_map
        assert max(token_map) + 1 == c["engram_compressed_vocab_size"]
        self.pad = token_map[c["engram_pad_token_id"]]
        rows = [sum(p, []) for p in self.primes]             # flattened [n-gram][head] per layer
        assert [sum(r) for r in rows] == list(c["engram_num_embeddings"])
        self.offsets = [np.cumsum([0] + r[:-1]).tolist() for r in rows]

    def compress(self, ids, image_mask=None):
        """Token ids -> compressed ids; image positions become DEAD."""
        return [DEAD if image_mask is not None and image_mask[i] else self.token_map[t] for i, t in enumerate(ids)]

    def row_ids(self, layer_id, history, pos):
        """Table rows of position `pos`; `history` = compressed ids of positions 0..pos (at least)."""
        li = self.layer_ids.index(layer_id)
        toks, blocked = [], False
        for lag in range(self.n):
            blocked = blocked or pos - lag < 0 or history[pos - lag] == DEAD
            toks.append(self.pad if blocked else history[pos - lag])
        out, col, h = [], 0, toks[0] * self.mult[li][0]            # fits in int64 by construction
        for k in range(1, self.n):
            h ^= toks[k] * self.mult[li][k]
            for p in self.primes[li][k - 1]:
                out.append(h % p + self.offsets[li][col])
                col += 1
        return out
