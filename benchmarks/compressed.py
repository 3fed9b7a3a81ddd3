"""Recall of a softmax model whose cache keeps a share of its tokens, chosen by SnapKV, Expected Attention or KVzip.

    python benchmarks/compressed.py MODEL --json FILE        (kvpress 0.5.5, transformers 5.17)

The cache is compressed once, when the text and its first question are read; what follows is teacher-forced, as in
`lolcats eval --tasks recall`. `lolcats-hybrid` takes 0.19 of the softmax cache at 8192 tokens.
"""

from __future__ import annotations

import argparse
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from bench_tools import describe
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from lolcats.data.retrieval import RetrievalWriter
from lolcats.provenance import provenance

PRESSES = {"SnapKV": "SnapKVPress", "Expected Attention": "ExpectedAttentionPress", "KVzip": "KVzipPress"}


def follow_transformers(press: type) -> None:
    """transformers 5.17 passes no positions."""
    plain = press.forward_hook

    def forward_hook(self: Any, module: Any, given: Any, kwargs: dict[str, Any], output: Any) -> Any:
        last = torch.tensor([kwargs["past_key_values"].layers[module.layer_idx].keys.shape[2] - 1])
        return plain(self, module, given, kwargs | {"cache_position": last}, output)

    press.forward_hook = forward_hook


@torch.no_grad()
def given_answers(model: Any, press: Any, sample: Any) -> list[bool]:
    """Which of a text's answers the model gives."""
    ids_1T = torch.from_numpy(sample.token_ids).long()[None].to(model.device)
    first = int((sample.answer >= 0).argmax())
    cache = {"past_key_values": DynamicCache()}
    with press(model):
        model.model(input_ids=ids_1T[:, : first - 1], **cache)
    positions = torch.arange(first - 1, ids_1T.shape[1] - 1, device=model.device)[None]
    logits = model(input_ids=ids_1T[:, first - 1 : -1], position_ids=positions, **cache).logits
    right = (logits.argmax(-1) == ids_1T[:, first:])[0].cpu().numpy()
    return [bool(right[sample.answer[first:] == number].all()) for number in range(sample.answer.max() + 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--lengths", nargs="+", type=int, default=[8192])
    parser.add_argument("--shares", nargs="+", type=float, default=[0.19, 0.38], help="of the tokens; 0.38 in 8 bits")
    parser.add_argument("--samples", type=int, default=30)
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    import kvpress  # which no test needs

    for press in (kvpress.BasePress, kvpress.KVzipPress):
        follow_transformers(press)
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype="auto", device_map="auto").eval()
    write = RetrievalWriter(tokenizer, "test", "demo", begin_token=True).write
    report: dict[str, Any] = {"provenance": provenance(), "kvpress": version("kvpress"), "model": given.model}
    plan = [(name, share, length) for length in given.lengths for name in PRESSES for share in given.shares]
    for kind in ("needle", "needles"):
        for name, share, length in plan:
            row: dict[str, Any] = {"press": name, "share": share, "kind": kind, "length": length}
            try:
                press = getattr(kvpress, PRESSES[name])(compression_ratio=1 - share)
                found = [given_answers(model, press, write(kind, length, 0, n)) for n in range(given.samples)]
                row["accuracy"] = sum(sum(answers) / len(answers) for answers in found) / len(found)
                row |= {"samples": given.samples, "first": sum(answers[0] for answers in found) / len(found)}
            except Exception as error:  # the other rows are still worth something
                row["error"] = describe(error)
            report.setdefault("rows", []).append(row)
            print(*row.values(), flush=True)
            given.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
