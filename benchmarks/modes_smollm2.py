"""The paper's recipe on SmolLM2-135M-Instruct in every mode of training: the same quality, at what speed.

    python benchmarks/modes_smollm2.py --model FOLDER --data alpaca_original.jsonl.gz --work /tmp/modes --gpus 1 2 4

Joint training and streaming blocks on one GPU; pipelined blocks, whole weights on each GPU and weights divided by FSDP2
on several. Every mode takes the loss per block of 10 layers and selects by loss, as blocks must. Each run is a process
of its own (torchrun for several GPUs) in its own folder of --work, and goes on if it was interrupted. Rewrites --json
after every run. FOLDER holds safetensors files: FSDP2 does not read GGUF.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lolcats.config import LinearizeConfig, merge, parse_override
from lolcats.recipes import load_recipe

MODES: dict[str, dict[str, Any]] = {
    "joint": {},
    "streaming": {"transfer": {"block_mode": "streaming"}},
    "pipelined": {"transfer": {"block_mode": "pipelined", "block_layers": None}},
    "replicated": {"parallel": {"shard": "off"}},
    "sharded": {"parallel": {"shard": "on"}},
}
ON_ONE = ("joint", "streaming")
KEPT = ("steps", "tokens", "seconds", "tokens_per_second", "peak_memory_gib", "best_metric")


def command(mode: str, gpus: int, config: Path, output: Path) -> list[str]:
    """What a user would type."""
    python = [sys.executable, "-m"]
    if gpus > 1:
        python += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus), "-m"]
    return [*python, "lolcats", "linearize", "--recipe", str(config), "-o", str(output), "--resume"]


def settings(mode: str, arguments: argparse.Namespace) -> LinearizeConfig:
    values = merge(load_recipe("smollm2-135m-paper"), {"model": {"path": arguments.model, "device": arguments.device}})
    values["data"]["sources"] = [{"path": arguments.data}]
    values = merge(values, {"transfer": {"select_by": "loss", "block_layers": 10}, "adjust": {"max_steps": 400}})
    values = merge(values, MODES[mode])
    for override in arguments.set:
        values = merge(values, parse_override(override))
    return LinearizeConfig.from_dict(values)


def run(mode: str, gpus: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """One linearization; its numbers, or the end of what it printed, which is on stderr, too."""
    output = Path(arguments.work) / f"{mode}-{gpus}"
    config, log = output.with_suffix(".yaml"), output.with_suffix(".log")
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(settings(mode, arguments).to_yaml(), encoding="utf-8")
    row: dict[str, Any] = {"mode": mode, "gpus": gpus}
    try:
        with log.open("w") as stream:
            subprocess.run(
                command(mode, gpus, config, output),
                env=os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(arguments.visible[:gpus])},
                timeout=60 * arguments.minutes,
                stdout=stream,
                stderr=stream,
                check=True,
            )
    except subprocess.SubprocessError as error:
        end = log.read_text(errors="replace")[-2000:]
        print(end, file=sys.stderr)
        return row | {"error": str(error).splitlines()[0], "log": end}
    report = json.loads((output / "lolcats_report.json").read_text(encoding="utf-8"))
    stages = {name: {key: stage[key] for key in KEPT} for name, stage in report["stages"].items()}
    losses = report["stages"]["transfer"]["layer_losses"].values()
    return row | {
        "perplexity": report["perplexity"],
        "transfer_loss": sum(losses) / len(losses),
        "stages": stages,
        "config": report["config"],
        "provenance": report["provenance"],
    }


def print_table(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table(title="SmolLM2-135M, every mode")
    for name in ("mode", "GPUs", "ppl, transfer", "ppl, adjusted", "MSE", "tokens/s transfer", "adjust", "peak GiB"):
        table.add_column(name, justify="left" if name == "mode" else "right")
    for row in rows:
        if "error" in row:
            table.add_row(row["mode"], str(row["gpus"]), "failed")
            continue
        perplexity, stages = row["perplexity"], row["stages"]
        table.add_row(
            row["mode"],
            str(row["gpus"]),
            f"{perplexity['transfer']:.3f}",
            f"{perplexity['adjust']:.3f}",
            f"{row['transfer_loss']:.4f}",
            *(f"{stages[name]['tokens_per_second']:,.0f}" for name in ("transfer", "adjust")),
            f"{stages['transfer']['peak_memory_gib']:.2f}",
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True, help="Stanford Alpaca, JSON lines")
    parser.add_argument("--work", required=True)
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--gpus", nargs="+", type=int, default=[1], help="numbers of GPUs to try")
    parser.add_argument("--minutes", type=float, default=10.0, help="for a run at most")
    parser.add_argument("--set", action="append", default=[], help="section.key=value for all runs, for a quick look")
    parser.add_argument("--device", default="auto", help="cpu: processes take the place of GPUs")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    arguments.visible = given.split(",") if given else [str(number) for number in range(max(arguments.gpus))]
    rows = []
    for mode in arguments.modes:
        for gpus in arguments.gpus:
            if (mode in ON_ONE) == (gpus > 1):
                continue
            rows.append(run(mode, gpus, arguments))
            print_table(rows[-1:], Console(width=150))
            if arguments.json:
                arguments.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")
    print_table(rows, Console(width=150))


if __name__ == "__main__":
    main()
