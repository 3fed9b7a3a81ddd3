"""Inside linearized models, beside their original: where attention errs, how far LoRA went, what they write.

    python benchmarks/inside.py NAME=FOLDER... --original MODEL --data FILE --json FILE

FOLDER is what `lolcats linearize` wrote, run/ with it; FILE has Alpaca's rows, the first 200 held out. Errors are those
of attention outputs on the original's hidden states, against its softmax attention, by layer and head: before LoRA,
after it, and after a LoRA that is trained on these errors alone ("LoRA on errors"). Not for native sliding windows.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor

from lolcats.config import DataSection, LinearizeConfig
from lolcats.conversion import convert
from lolcats.data import build_evaluation_dataset
from lolcats.data.templates import ALPACA_PROMPT
from lolcats.evaluation.load import load_model
from lolcats.modeling.attention import SOFTMAX, AttentionCall, Observed
from lolcats.ops import attention_weights
from lolcats.provenance import provenance
from lolcats.report import REPORT_FILE, read_optional, without_paths
from lolcats.training.checkpoint import list_checkpoints, read_checkpoint
from lolcats.training.lora import add_lora

PROMPTS = (
    "Explain why leaves change colour in autumn.",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "Give three tips for learning to play the piano.",
    "What is the difference between a lake and a sea?",
)
HELD_OUT, ROWS, BINS = 200, 7200, 64  # rows that runs leave out, and up to those that LoRA on errors reads


def best(folder: Path, stage: str) -> dict[str, Tensor]:
    """What a finished stage of a run trained; nothing if there was none."""
    saved = list_checkpoints(folder / "run" / stage)
    return read_checkpoint(saved[-1])[0]["best"] if saved else {}


def outputs(wrapped: Any, input_ids: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Layer by layer, on the original's hidden states: its softmax output [B, T, H, D], and the model's own."""
    model = wrapped.get_base_model()
    called: dict[str, Any] = {}
    layers = [(layer, model.model.get_submodule(layer.module)) for layer in model.config.linear_layers]
    hooks = []
    for layer, module in layers:
        see: Any = lambda _, *given, path=layer.module: called.__setitem__(path, given)  # noqa: E731
        project: Any = lambda _, given, path=layer.module: called.__setitem__(f"{path} output", given[0])  # noqa: E731
        hooks.append(module.register_forward_pre_hook(see, with_kwargs=True))
        hooks.append(module.o_proj.register_forward_pre_hook(project))
    try:
        with torch.no_grad(), wrapped.disable_adapter():
            model.get_decoder()(input_ids=input_ids, use_cache=False, attention_call=SOFTMAX)
        for layer, module in layers:
            (args, kwargs), target = called[layer.module], called[f"{layer.module} output"]
            module(*args, **kwargs | {"attention_call": replace(kwargs["attention_call"], mode="hybrid")})
            both = (target, called[f"{layer.module} output"])
            yield layer.index, *(y.unflatten(-1, (layer.num_heads, -1)).float() for y in both)
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def errors(wrapped: Any, ids_NT: Tensor) -> list[list[float]]:
    """Mean squared error by layer and head."""
    found: dict[int, Any] = {}
    for ids_T in ids_NT:
        for index, target, own in outputs(wrapped, ids_T[None]):
            found[index] = found.get(index, 0) + (own - target).square().mean((0, 1, 3)) / len(ids_NT)
    return [found[index].tolist() for index in sorted(found)]


def train_on_errors(wrapped: Any, ids_NT: Tensor, updates: int, lr: float) -> None:
    """LoRA learns the original's attention outputs, as feature maps do in stage 1."""
    optimizer = torch.optim.AdamW((p for p in wrapped.parameters() if p.requires_grad), lr=lr, weight_decay=0.0)
    for update in range(updates):
        for _, target, own in outputs(wrapped, ids_NT[(torch.arange(8) + 8 * update) % len(ids_NT)]):
            (1000 * (own - target).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def weights(model: Any, ids_NT: Tensor) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of softmax, mean entropy (nats) and mean square of outputs by layer and head; and maps of the first sequence."""
    layers = sorted(dict(model.linear_layers()))
    found: dict[str, dict[int, Any]] = {"entropy": {}, "square": {}}
    maps: tuple[dict[str, Any], dict[str, Any]] = {}, {}

    def observe(seen: Observed) -> None:
        module, layer_idx, q, k, _, y_softmax, scoring, _ = seen
        params = module.params(scoring)
        hybrid, softmax = attention_weights(q, k, module.config, params)(0, q.shape[2])
        values = torch.special.entr(softmax).sum(-1).mean((0, 2)), y_softmax.float().square().mean((0, 2, 3))
        for name, value_H in zip(found, values, strict=True):
            found[name][layer_idx] = found[name].get(layer_idx, 0) + value_H / len(ids_NT)
        for kept, weight_HTT in zip(maps, (softmax[0], hybrid[0]), strict=True):
            for head in range(2 if layer_idx in (layers[0], layers[len(layers) // 2], layers[-1]) else 0):
                bins = weight_HTT[head].unflatten(0, (BINS, -1)).mean(1).unflatten(-1, (BINS, -1)).sum(-1)
                kept.setdefault(f"{layer_idx}.{head}", (1e4 * bins).round().int().tolist())  # 1 / 10000 a bin of keys

    for ids_T in ids_NT:
        call = AttentionCall(mode="softmax", observe=observe)
        model.get_decoder()(input_ids=ids_T[None], use_cache=False, attention_call=call)
    means = {name: [value[index].tolist() for index in layers] for name, value in found.items()}
    return means | {"layers": layers, "map": maps[0]}, maps[1]


def adapters(wrapped: Any) -> list[tuple[str, Any, Tensor, Tensor]]:
    """Projection, layer, A and B of each."""
    layers = [(path[-6:-5], layer) for path, layer in wrapped.named_modules() if isinstance(layer, LoraLayer)]
    ends = ("lora_A", "lora_B")
    return [(p, x, *(getattr(x, end)["default"].weight.detach().float().clone() for end in ends)) for p, x in layers]


def inside(folder: Path, original: str, ids_NT: Tensor, trained: Tensor, updates: int) -> tuple[Any, dict[str, Any]]:
    """What only a run's original does, and the run."""
    config, report = (
        LinearizeConfig.from_yaml(folder / "run" / "config.yaml"),
        read_optional(folder / REPORT_FILE) or {},
    )
    model: Any = convert(load_model(original, dtype=config.model.dtype)[0], config.attention).requires_grad_(False)
    ids_NT, trained, modules = ids_NT.to(model.device), trained.to(model.device), dict(model.linear_layers())
    stage_1, stage_2, hybrid = best(folder, "transfer"), best(folder, "adjust"), not config.adjust.softmax_control
    for name, tensor in stage_1.items():
        _, index, parameter = name.split(".", 2)
        modules[int(index)].get_parameter(parameter).copy_(tensor)
    softmax, maps = weights(model, ids_NT)
    torch.manual_seed(config.seed)  # as the run did before it made its adapters
    wrapped = add_lora(model, config.adjust)
    start = adapters(wrapped)
    found: dict[str, Any] = {"perplexity": report["perplexity"], "mse": {}, "travel": {}}
    if hybrid:
        found |= {"map": maps, "mse": {"before LoRA": errors(wrapped, ids_NT)}}
    if hybrid and stage_1 and updates:
        train_on_errors(wrapped, trained, updates, config.adjust.lr)
        found["mse"]["LoRA on errors"] = errors(wrapped, ids_NT)
    for name, tensor in stage_2.items():
        wrapped.get_parameter(name).data.copy_(tensor)
    if hybrid:
        found["mse"]["LoRA"] = errors(wrapped, ids_NT)
    for (projection, layer, A, B), (_, _, A0, _) in zip(adapters(wrapped), start, strict=True):
        W = layer.get_base_layer().weight.float()
        norms = {"a0": A0, "a": A - A0, "b": B, "change": layer.scaling["default"] * B @ A / W.norm()}
        for name, tensor in norms.items():  # by layer, Frobenius
            found["travel"].setdefault(projection, {}).setdefault(name, []).append(tensor.norm().item())
    return softmax, found


@torch.no_grad()
def written(folder: str, tokens: int) -> list[str]:
    """Greedy answers to the prompts, in Alpaca's form."""
    model, tokenizer = load_model(folder)
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.pad_token or tokenizer.eos_token
    texts = [ALPACA_PROMPT.format(instruction=prompt) for prompt in PROMPTS]
    inputs = tokenizer(texts, return_tensors="pt", padding=True).to(model.device)
    settings = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
    answers = model.generate(**inputs, **settings)[:, inputs["input_ids"].shape[1] :]
    return list(tokenizer.batch_decode(answers, skip_special_tokens=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="NAME=FOLDER")
    for name in ("original", "data", "json"):
        parser.add_argument(f"--{name}", required=True)
    for name, default in (("sequences", 8), ("length", 1024), ("updates", 97), ("tokens", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    tokenizer = load_model(given.original)[1]

    def data(rows: int, sequences: int | None = None) -> Any:
        settings: Any = {"sequence_length": given.length, "validation_sequences": sequences}
        settings["sources"] = [{"path": given.data, "max_rows": rows}]
        return build_evaluation_dataset(DataSection.model_validate(settings), tokenizer)

    dataset = data(HELD_OUT, given.sequences)
    ids_NT = torch.from_numpy(dataset.input_ids).long()
    trained = torch.from_numpy(data(ROWS).input_ids[len(data(HELD_OUT)) :]).long()
    values: dict[str, Any] = {"prompts": PROMPTS, "updates": given.updates, "data": dataset.info, "runs": {}}
    for name, folder in (run.split("=", 1) for run in given.runs):
        values["original"], found = inside(Path(folder), given.original, ids_NT, trained, given.updates)
        values["runs"][name] = found | {"written": written(folder, given.tokens)}
    values["original"]["written"] = written(given.original, given.tokens)
    values = without_paths(values | {"provenance": provenance()})
    text = json.dumps(values, ensure_ascii=False, separators=(",", ":"))
    text = re.sub(r"\d+\.\d{5,}(e-?\d+)?", lambda match: f"{float(match[0]):.4g}", text)
    Path(given.json).write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
