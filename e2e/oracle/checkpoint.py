"""Read a DeepSeek-V4.1-Flash style checkpoint directory (config.json + safetensors) into float32 (own code)."""
import json
import os

import torch
from safetensors import safe_open

import quant
from engram import token_map

ENGRAM_TABLE = "engram.embed.weight"


class Checkpoint:
    """`w(name)` is the dequantized float32 tensor; `kind(name)` is 'fp8', 'fp4' or 'plain'."""

    def __init__(self, path):
        self.path = path
        self.config = json.load(open(os.path.join(path, "config.json")))
        index = os.path.join(path, "model.safetensors.index.json")
        if os.path.exists(index):
            files = sorted(set(json.load(open(index))["weight_map"].values()))
        else:
            files = ["model.safetensors"]
        self.raw = {}
        for f in files:
            with safe_open(os.path.join(path, f), "pt") as h:
                for k in h.keys():
                    self.raw[k.removeprefix("model.")] = h.get_tensor(k)
        self._cache = {}
        tm = os.path.join(path, "engram_token_map.json")
        self._token_map = json.load(open(tm)) if os.path.exists(tm) else None

    @property
    def token_map(self):
        """Compressed Engram ids: read when the directory carries them, else computed from tokenizer.json."""
        if self._token_map is None:
            from tokenizers import Tokenizer
            self._token_map = token_map(Tokenizer.from_file(os.path.join(self.path, "tokenizer.json")))
        return self._token_map

    def has(self, name):
        return name in self.raw

    def kind(self, name):
        t = self.raw[name]
        if name.endswith(ENGRAM_TABLE):
            return "plain"
        return {torch.float8_e4m3fn: "fp8", torch.int8: "fp4", torch.uint8: "fp4"}.get(t.dtype, "plain")

    def w(self, name):
        if name not in self._cache:
            t = self.raw[name]
            scale = self.raw.get(name.removesuffix("weight") + "scale")
            if name.endswith(ENGRAM_TABLE) and t.dtype == torch.float8_e4m3fn:
                t = quant.dequant_rows_fp8(t, scale)
            elif t.dtype == torch.float8_e4m3fn:
                t = quant.dequant_weight_fp8(t, scale)
            elif t.dtype in (torch.int8, torch.uint8):
                t = quant.dequant_weight_fp4(t, scale)
            self._cache[name] = t.float()
        return self._cache[name]
