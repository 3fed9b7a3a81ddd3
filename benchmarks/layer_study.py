"""Attention transfer of a few layers alone: options compared in minutes, on a CPU if need be.

    python benchmarks/layer_study.py --model FOLDER --data alpaca_original.jsonl.gz --work /tmp/layers --json study.json

Attention transfer teaches each layer from the teacher's own activations, so a layer can be trained without the others:
queries, keys, values and softmax outputs of --layers are collected once (into --work), and every arm trains its feature
maps on them. An arm is a name and settings, `--arm "sinks 1: attention.sinks=1"`; without any, those of ARMS run. The
numbers: squared error on validation sequences over the mean square of the softmax outputs, at 0 and every 100 updates.

With --all-layers every arm is a whole stage 1: its validation perplexity is measured, and --output gets a linearized
model for each arm, which `lolcats eval` takes.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lolcats.config import LinearizeConfig, merge, parse_override
from lolcats.conversion import convert, fit_positions, load_base_model
from lolcats.data import build_datasets
from lolcats.evaluation.perplexity import dataset_perplexity
from lolcats.modeling.loading import load_skeleton
from lolcats.provenance import provenance
from lolcats.recipes import load_recipe
from lolcats.training.schedule import Schedule

ARMS = {
    "paper's recipe, one state per KV head": [],
    "one state per query head": ["attention.share_state=query_head"],
    "gamma 0.5": ["attention.window_gamma=0.5"],
    "feature scale 2": ["attention.feature_scale=2"],
    "sinks 1": ["attention.sinks=1"],
    "sinks 4": ["attention.sinks=4"],
    "sinks 16": ["attention.sinks=16"],
    "sinks 1, gamma 0.5": ["attention.sinks=1", "attention.window_gamma=0.5"],
    "sinks 1, gamma 0.9": ["attention.sinks=1", "attention.window_gamma=0.9"],
    "sinks 4, gamma 0.5": ["attention.sinks=4", "attention.window_gamma=0.5"],
    "sinks 1, exp": ["attention.sinks=1", "attention.feature_map=exp"],
    "sinks 1, bias": ["attention.sinks=1", "attention.feature_map=hedgehog_bias"],
    "sinks 1, feature scale 2": ["attention.sinks=1", "attention.feature_scale=2"],
    "sinks 1, cosine": ["attention.sinks=1", "transfer.schedule=cosine"],
    "sinks 1, rate 0.003": ["attention.sinks=1", "transfer.lr=0.003"],
    "sinks 1, twice the features": ["attention.sinks=1", "attention.feature_dim=64"],
    "sinks 1, one state per query head": ["attention.sinks=1", "attention.share_state=query_head"],
}
EVERY = 100  # updates between two evaluations
MOST_SHOWN = 8  # layers with a column in the table
Layer = dict[str, Tensor]  # q, k, v, y: [sequences, heads, tokens, head_dim]


class _Enough(Exception):
    pass


@torch.no_grad()
def collect(config: LinearizeConfig, layers: list[int], sequences: int, validation: int, work: Path) -> None:
    """Write LAYER.safetensors for each layer: validation sequences first, then randomly chosen ones of training."""
    files = {layer: work / f"{layer}.safetensors" for layer in layers}
    if all(file.is_file() for file in files.values()):
        return
    base, tokenizer = load_base_model(config.model)
    train, held_out = build_datasets(fit_positions(config.data, base), tokenizer, seed=config.seed, model=base)
    model = convert(base, config.attention)
    found: dict[int, dict[str, list[Tensor]]] = {layer: {name: [] for name in "qkvy"} for layer in layers}

    def observe(module: nn.Module, layer_idx: int, **seen: Any) -> None:
        if layer_idx in found:
            for name, tensor in zip("qkvy", (seen["q"], seen["k"], seen["v"], seen["y_softmax"]), strict=True):
                found[layer_idx][name].append(tensor.to("cpu", torch.bfloat16))
        if layer_idx == max(layers):
            raise _Enough

    chosen = torch.randperm(len(train), generator=torch.Generator().manual_seed(config.seed))[:sequences].tolist()
    with model.attention_mode("softmax"), model.observe(observe):
        for data, rows in ((held_out, list(range(validation))), (train, chosen)):
            for row in rows:
                batch = {name: x.to(model.device) for name, x in data.batch([row]).items() if name != "labels"}
                try:
                    model.get_decoder()(**batch, use_cache=False)
                except _Enough:
                    continue
    work.mkdir(parents=True, exist_ok=True)
    for layer, file in files.items():
        save_file({name: torch.cat(tensors).contiguous() for name, tensors in found[layer].items()}, file)


def fresh_module(config: LinearizeConfig, layer: int) -> nn.Module:
    """The layer's feature maps and window factors as conversion makes them."""
    model = convert(load_skeleton(config.model)[0], config.attention)
    module = dict(model.linear_layers())[layer].to_empty(device="cpu")
    module.reset_parameters()
    return module


def train_layer(
    data: Layer, layer: int, config: LinearizeConfig, steps: int, batch: int, validation: int
) -> tuple[nn.Module, dict[str, Any]]:
    """The trained module; its relative error by updates, and where its gammas went."""
    transfer = config.transfer
    torch.manual_seed(config.seed)
    module = fresh_module(config, layer).to(data["q"].device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=transfer.lr, weight_decay=transfer.weight_decay)
    schedule = Schedule(transfer, steps)
    signal = data["y"][:validation].float().square().mean()
    generator = torch.Generator().manual_seed(config.seed)
    queue: list[int] = []

    def error(rows: list[int]) -> Tensor:
        q, k, v, y = (data[name][rows].float() for name in "qkvy")
        return module(q, k, v, task="output_mse", target=y)[0] / signal

    def validate() -> float:
        with torch.no_grad():
            return sum(float(error([row])) for row in range(validation)) / validation

    curve = [validate()]
    for step in range(steps):
        if len(queue) < batch:
            queue = (validation + torch.randperm(len(data["q"]) - validation, generator=generator)).tolist()
        for group in optimizer.param_groups:
            group["lr"] = schedule.lr(step, plateau_lr=transfer.lr)  # too few evaluations for a plateau
        loss = 100 * error([queue.pop() for _ in range(batch)])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), transfer.clip_norm or math.inf)
        optimizer.step()
        if (step + 1) % EVERY == 0 or step + 1 == steps:
            curve.append(validate())
    return module, {"errors": curve, "gamma": float(torch.sigmoid(module.window_factor.detach()).mean())}


def whole_model(config: LinearizeConfig, modules: dict[int, nn.Module], output: Path | None) -> float:
    """Validation perplexity of the model with these feature maps, which is written to `output`."""
    base, tokenizer = load_base_model(config.model)
    _, validation = build_datasets(fit_positions(config.data, base), tokenizer, seed=config.seed, model=base)
    model = convert(base, config.attention)
    for layer, module in model.linear_layers():
        module.load_state_dict(modules[layer].state_dict())
    if output is not None:
        model.save_pretrained(output)
        tokenizer.save_pretrained(output)
    with torch.no_grad():
        return dataset_perplexity(model.eval(), validation, batch_size=4)["perplexity"]


def print_table(rows: list[dict[str, Any]], layers: list[int], console: Console) -> None:
    table = Table(title="error over the mean square of softmax outputs, in percent")
    shown = layers if len(layers) <= MOST_SHOWN else []
    for name in ("arm", *(f"layer {layer}" for layer in shown), "mean"):
        table.add_column(name, justify="left" if name == "arm" else "right")
    for row in rows:
        shares = {layer: 100 * row["layers"][str(layer)]["errors"][-1] for layer in layers}
        cells = [shares[layer] for layer in shown] + [sum(shares.values()) / len(shares)]
        table.add_row(row["arm"], *(f"{share:.2f}" for share in cells))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder with safetensors files")
    parser.add_argument("--data", required=True)
    parser.add_argument(
        "--work", type=Path, required=True, help="folder for the activations, 3.4 MB a sequence and layer"
    )
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 20, 22, 25])
    parser.add_argument("--all-layers", action="store_true", help="instead of --layers: all, and the whole model")
    parser.add_argument("--output", type=Path, help="with --all-layers: folder for the models")
    parser.add_argument("--sequences", type=int, default=128, help="to train on")
    parser.add_argument("--validation", type=int, default=12, help="sequences")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=2, help="sequences of an update")
    parser.add_argument(
        "--arm", action="append", default=[], metavar="NAME: KEY=VALUE KEY=VALUE", help="instead of ARMS"
    )
    parser.add_argument("--set", action="append", default=[], help="section.key=value for all arms")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    arms = {name.strip(): rest.split() for name, _, rest in (arm.partition(":") for arm in arguments.arm)} or ARMS
    model = {"path": arguments.model, "device": arguments.device, "dtype": "float32"}
    values = merge(load_recipe("smollm2-135m"), {"model": model})
    values["data"]["sources"] = [{"path": arguments.data}]
    for override in arguments.set:
        values = merge(values, parse_override(override))
    plain = LinearizeConfig.from_dict(values)
    if arguments.all_layers:
        arguments.layers = [
            layer for layer, _ in convert(load_skeleton(plain.model)[0], plain.attention).linear_layers()
        ]
    collect(plain, arguments.layers, arguments.sequences, arguments.validation, arguments.work)
    console, rows = Console(width=120), []
    for name, overrides in arms.items():
        begun, changed = time.perf_counter(), values
        for override in overrides:
            changed = merge(changed, parse_override(override))
        config, modules, layers = LinearizeConfig.from_dict(changed), {}, {}
        for layer in arguments.layers:
            data = load_file(arguments.work / f"{layer}.safetensors", device=arguments.device)
            modules[layer], layers[str(layer)] = train_layer(
                data, layer, config, arguments.steps, arguments.batch, arguments.validation
            )
        row: dict[str, Any] = {"arm": name, "overrides": overrides, "layers": layers}
        if arguments.all_layers:
            output = None if arguments.output is None else arguments.output / name.replace(" ", "_")
            row["perplexity"] = whole_model(config, modules, output)
            console.print(f"{name}: perplexity {row['perplexity']:.3f}", highlight=False)
        rows.append(row | {"seconds": round(time.perf_counter() - begun, 1)})
        print_table(rows[-1:], arguments.layers, console)
        if arguments.json:
            settings = {key: str(value) for key, value in vars(arguments).items()}
            report = {"rows": rows, "settings": settings, "config": values, "provenance": provenance()}
            arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print_table(rows, arguments.layers, console)


if __name__ == "__main__":
    main()
