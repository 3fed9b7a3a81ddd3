"""Which heads find facts: an untrained model with sets of exact heads and no linear part, against its original.

    python benchmarks/heads.py MODEL --haystack TEXT --json FILE NAME=REPORT|HEADS ...

REPORT: a `lolcats_report.json`, its exact heads; HEADS: as `lolcats linearize --exact`. Facts (percent, every token
of an answer the likeliest) and divergence (nats a token of an answer) in texts with eight facts, all asked for.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean

import torch

from lolcats.config import AttentionConfig, ModelSection
from lolcats.conversion import convert
from lolcats.data.retrieval import FACTS, RetrievalWriter
from lolcats.modeling.attention import SOFTMAX, AttentionCall
from lolcats.modeling.loading import load_base_model
from lolcats.provenance import provenance
from lolcats.training.head import find_head, head_inputs, part_size, weighted_losses


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("sets", nargs="+")
    parser.add_argument("--haystack", default="demo")
    parser.add_argument("--lengths", type=int, nargs="*", default=[8192, 32768])
    parser.add_argument("--texts", type=int, default=16)
    parser.add_argument("--window-size", type=int, default=512)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    base, tokenizer = load_base_model(ModelSection(path=options.model))
    given = {"window": "terraced", "window_size": options.window_size, "sinks": 1, "feature_map": None}
    model = convert(base, AttentionConfig(**given, linear_length_cap=0)).eval()
    layers, device = model.config.linear_layers, model.device
    every = {(layer.index, head) for layer in layers for head in range(layer.num_kv_heads)}
    chosen: dict[str, set[tuple[int, int]]] = {"original": every, "none": set()}
    for name, _, heads in (each.partition("=") for each in options.sets):
        names = json.loads(Path(heads).read_text())["exact_heads"] if heads.endswith(".json") else heads.split(",")
        chosen[name] = {
            (layer, head) for layer, head in every if {f"{layer}", f"{layer}.{head}"} & set(map(str, names))
        }
    head, writer = find_head(model), RetrievalWriter(tokenizer, "train", options.haystack, begin_token=True)
    part, rows = part_size(model.config.text_config.vocab_size), []
    for length in options.lengths:
        found: dict[str, dict[str, list[float]]] = {name: {"facts": [], "divergence": []} for name in chosen}
        for index in range(options.texts):
            sample = writer.write(FACTS, length, 777, index)
            ids_T, answer_T = (torch.tensor(part, device=device).long() for part in (sample.token_ids, sample.answer))
            places_L = (answer_T >= 0).nonzero()[:, 0]
            label_L, tokens = ids_T[places_L], {"input_ids": ids_T[None]}
            weight_L = torch.full_like(label_L, 1 / len(label_L), dtype=torch.float32)
            teacher_LD = head_inputs(model, head, tokens, places_L - 1, SOFTMAX)
            for name, heads in chosen.items():
                gates = {
                    layer.index: torch.tensor(
                        [float((layer.index, kv) in heads) for kv in range(layer.num_kv_heads)], device=device
                    )
                    for layer in layers
                }
                call = SOFTMAX if name == "original" else AttentionCall(gates=gates)
                student_LD = head_inputs(model, head, tokens, places_L - 1, call)
                losses = weighted_losses(student_LD, teacher_LD, label_L, weight_L, head, share=1, part=part)
                right_L = head(student_LD).argmax(-1) == label_L
                answers = (right_L[answer_T[places_L] == number].all() for number in range(int(answer_T.max()) + 1))
                found[name]["facts"] += [100.0 * bool(right) for right in answers]
                found[name]["divergence"].append(float(losses[2]))
        for name, numbers in found.items():
            exact = [] if name == "original" else sorted(chosen[name])
            rows.append(
                {"name": name, "length": length, "exact": exact, **{key: mean(x) for key, x in numbers.items()}}
            )
            print({key: value for key, value in rows[-1].items() if key != "exact"}, flush=True)
        options.json.write_text(json.dumps({"provenance": provenance(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
