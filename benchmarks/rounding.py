"""What keys and values in 8 bits change in a model, before and after its keys are balanced.

    python benchmarks/rounding.py MODEL --json FILE     (a folder or hub id, not linearized)

All heads keep softmax attention. On shipped text: divergence of the next token's distribution from that with keys as
they are, and how often the likeliest token is the same.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lolcats.conversion import keep_softmax
from lolcats.data.retrieval import haystack_text
from lolcats.modeling.balance import balance_keys
from lolcats.provenance import provenance


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    base = AutoModelForCausalLM.from_pretrained(given.model, dtype=getattr(torch, given.dtype))
    model = keep_softmax(base.to("cuda" if torch.cuda.is_available() else "cpu")).eval()
    text = haystack_text("demo", "test")
    ids_1T = tokenizer(text, return_tensors="pt").input_ids[:, : given.tokens].to(model.device)

    def next_token() -> torch.Tensor:
        return model(ids_1T, use_cache=False).logits[0].float().log_softmax(-1)

    whole_TV, found = next_token(), {}
    for name in ("8 bits", "8 bits, balanced"):
        layers = balance_keys(model) if "balanced" in name else 0
        model.set_attention(cache_bits=8)
        rounded_TV = next_token()
        model.set_attention(cache_bits=None)
        divergence = (whole_TV.exp() * (whole_TV - rounded_TV)).sum(-1).mean().item()
        same = (whole_TV.argmax(-1) == rounded_TV.argmax(-1)).float().mean().item()
        found[name] = {"divergence": divergence, "same_token_percent": 100 * same, "balanced_layers": layers}
        print(name, found[name])
    settings = {"model": Path(given.model).name, "tokens": given.tokens, "dtype": given.dtype}
    given.json.write_text(json.dumps({"settings": settings, "provenance": provenance(), "found": found}, indent=1))


if __name__ == "__main__":
    main()
