"""Greedy tokens of decoding with a cache, against the forward pass without one over the same tokens.

    python benchmarks/agree.py MODEL --text FILE --json FILE      (a softmax model, converted here, untrained)

Prompts of other lengths, left-padded by `generate()`, and together in the engine, with `--vllm` also in its server; the
default recipe with windows of 128, 256 and 512, in float32 and in bfloat16 with 8 bits, exact heads in three layers
(vLLM keeps these in the model's type). A gap is that of a logit to the largest.
"""

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from ability import Served
from served import PORT, server
from transformers import AutoModelForCausalLM, AutoTokenizer

from lolcats.config import LinearizeConfig
from lolcats.conversion import convert
from lolcats.generation.engine import Engine
from lolcats.generation.sampling import SamplingParams
from lolcats.provenance import provenance
from lolcats.recipes import load_recipe


@torch.no_grad()
def measure(model: Any, tokenizer: Any, prompts: list[list[int]], new: int, vllm: bool) -> list[dict[str, Any]]:
    batch = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt").to(model.device)
    made = {
        "generate": model.generate(**batch, max_new_tokens=new, min_new_tokens=new, do_sample=False)[:, -new:].tolist()
    }
    engine = Engine(model, tokenizer, max_slots=len(prompts), max_length=max(map(len, prompts)) + new)
    settings = SamplingParams(max_new_tokens=new, temperature=0.0, ignore_eos=True)
    made["engine"] = [request.token_ids for request in engine.generate(prompts, settings)]
    engine.shutdown()
    if vllm:
        made["vllm"] = by_vllm(model, tokenizer, prompts, new)
    rows = []
    for way, answers in made.items():
        gaps = []
        for prompt, answer in zip(prompts, answers, strict=True):
            ids_1T = torch.tensor([prompt + answer], device=model.device)
            logits_KV = model(input_ids=ids_1T, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
            gaps.append(logits_KV.max(1).values - logits_KV.gather(1, ids_1T[0, len(prompt) :, None])[:, 0])
        gap_N = torch.cat(gaps)
        rows.append({"way": way, "equal": int((gap_N == 0).sum()), "of": len(gap_N), "largest_gap": float(gap_N.max())})
    return rows


def by_vllm(model: Any, tokenizer: Any, prompts: list[list[int]], new: int) -> list[list[int]]:
    """Tokens of all prompts at once, from a server of the model."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        kept = ["--dtype", str(model.dtype).removeprefix("torch."), "--gpu-memory-utilization", "0.1"]
        with server(folder, kept, Path(folder, "log")):
            served = Served(f"http://127.0.0.1:{PORT}", tokenizer, len(prompts))
            return [each.token_ids for each in served(prompts, new, ignore_eos=True, return_token_ids=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--lengths", type=int, nargs="*", default=[300, 700])
    parser.add_argument("--new-tokens", type=int, default=60)
    parser.add_argument("--exact", nargs="*", default=["2.0", "8.1", "14"], help="exact heads")
    parser.add_argument("--vllm", action="store_true")
    given = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    ids = tokenizer(given.text.read_text(encoding="utf-8")[:40000], add_special_tokens=False)["input_ids"]
    prompts = [ids[i * 2000 : i * 2000 + length] for i, length in enumerate(given.lengths)]
    recipe = LinearizeConfig.from_dict(load_recipe("lolcats-hybrid")).attention
    rows = []
    for dtype, bits in ((torch.float32, None), (torch.bfloat16, recipe.cache_bits)):
        for window in (128, 256, 512):
            base = AutoModelForCausalLM.from_pretrained(given.model, dtype=dtype, device_map="auto").eval()
            sizes = {"window_size": window, "cache_bits": bits, "exact": tuple(given.exact), "linear_length_cap": 8192}
            model = convert(base, replace(recipe, **sizes)).eval()
            for row in measure(model, tokenizer, prompts, given.new_tokens, given.vllm):
                rows.append({"dtype": str(dtype), "window": window, "cache_bits": bits} | row)
                print(rows[-1], flush=True)
            settings = {name: str(value) for name, value in vars(given).items()}
            given.json.write_text(
                json.dumps({"rows": rows, "settings": settings, "provenance": provenance()}, indent=1)
            )


if __name__ == "__main__":
    main()
