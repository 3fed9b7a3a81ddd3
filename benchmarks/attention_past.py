"""Softmax attention of a prompt's later piece: FlashAttention-2's causal mask aligned at the end, and two calls joined.

python benchmarks/attention_past.py --json benchmarks/results/attention_past_h200.json

The second is what `lolcats.modeling.softmax` does. Heads: those of a Llama-3-8B layer with one to three exact KV heads.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch
from bench_tools import measure, saver
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from lolcats.modeling.softmax import softmax_attention
from lolcats.provenance import provenance

SHAPES = ((8192, 16384), (8192, 65536), (2048, 16384))  # queries, keys


@torch.no_grad()
def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=Path)
    save, device, rows = saver(made.parse_args().json), torch.device("cuda"), []
    for kv_heads in (1, 2, 3):
        for tokens, keys in SHAPES:
            q = torch.randn(1, 4 * kv_heads, tokens, 128, device=device, dtype=torch.bfloat16)
            k, v = torch.randn(2, 1, kv_heads, keys, 128, device=device, dtype=torch.bfloat16)
            mask = causal_lower_right(tokens, keys)
            calls = {
                "flash_ms": partial(scaled_dot_product_attention, q, k, v, attn_mask=mask, enable_gqa=True),
                "joined_ms": partial(softmax_attention, q, k, v),
            }
            difference = (calls["joined_ms"]() - calls["flash_ms"]()).abs().max().item()
            times = {name: measure([call], device, budget_s=0.3, capture=False) for name, call in calls.items()}
            row = {"kv_heads": kv_heads, "tokens": tokens, "keys": keys, "difference": difference}
            rows.append(row | {name: time["median_ms"] for name, time in times.items()})
            print(rows[-1], flush=True)
            save({"rows": rows, "provenance": provenance()})


if __name__ == "__main__":
    main()
