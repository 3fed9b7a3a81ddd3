"""The paper's recipe on SmolLM2-135M-Instruct: perplexity after both stages, and a softmax + LoRA control.

    python benchmarks/quality_smollm2.py --model MODEL_FOLDER --data alpaca_original.jsonl.gz --work /tmp/quality

Three arms, each a resumable run in its own folder of --work: state per query head (the paper), state per KV
head (the default), and softmax attention with the same LoRA. Writes one JSON with the resolved configuration,
versions and commit beside the numbers. `--seeds` repeats the arms; seed 0 keeps the arm's plain name.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from lolcats.config import LinearizeConfig, merge
from lolcats.pipeline import linearize
from lolcats.recipes import load_recipe

STAGE_2_STEPS = (200, 400, 600, 1414)
ARMS: dict[str, dict[str, Any]] = {
    "query_head": {"attention": {"share_state": "query_head"}},
    "kv_head": {"attention": {"share_state": "kv_head"}},
    "softmax_control": {"adjust": {"softmax_control": True, "max_steps": 200}},
}


def run(arm: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Linearize with the settings of one arm and return its numbers."""
    values = merge(load_recipe("smollm2-135m-paper"), ARMS[arm] | {"seed": seed})
    values = merge(values, {"model": {"path": arguments.model, "gguf_file": arguments.gguf_file}})
    values["data"]["sources"] = [{"path": arguments.data, "format": "alpaca"}]
    if arguments.max_steps:
        values = merge(
            values, {"transfer": {"max_steps": arguments.max_steps}, "adjust": {"max_steps": arguments.max_steps}}
        )
    config = LinearizeConfig.from_dict(values)
    output = Path(arguments.work) / name_of(arm, seed)
    report = linearize(config, output, resume=True, console=Console(stderr=True, width=140))
    stages = report["stages"]
    adjust = {entry["step"]: entry["perplexity"] for entry in stages["adjust"]["curve"]}
    result = {
        "perplexity": report["perplexity"],
        "adjust_perplexity_at_step": {step: adjust[step] for step in STAGE_2_STEPS if step in adjust},
        "adjust_curve": adjust,
        "data": {name: report["data"][name] for name in ("train", "validation")},
        "config": report["config"],
        "provenance": report["provenance"],
        "stages": {
            name: {key: value for key, value in stage.items() if key != "curve"} for name, stage in stages.items()
        },
    }
    if "transfer" in stages:
        curve = stages["transfer"]["curve"]
        result["transfer_loss_at_step"] = {entry["step"]: entry["loss"] for entry in curve}
        result["transfer_perplexity_at_step"] = {
            entry["step"]: entry["perplexity"] for entry in curve if "perplexity" in entry
        }
    return result


def name_of(arm: str, seed: int) -> str:
    return arm if seed == 0 else f"{arm}-seed{seed}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--gguf-file", default=None)
    parser.add_argument("--data", required=True, help="Stanford Alpaca, JSON lines")
    parser.add_argument("--work", required=True, help="folder for the runs; an interrupted run goes on")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--max-steps", type=int, default=None, help="for a quick look only")
    parser.add_argument("--json", default=None, help="result file, rewritten after every arm")
    arguments = parser.parse_args()
    results = {}
    for arm, seed in itertools.product(arguments.arms, arguments.seeds):
        name = name_of(arm, seed)
        results[name] = run(arm, seed, arguments)
        text = json.dumps(results, indent=1)
        if arguments.json:
            Path(arguments.json).write_text(text + "\n")
        summary = {key: results[name][key] for key in ("perplexity", "adjust_perplexity_at_step")}
        print(name, json.dumps(summary), flush=True)


if __name__ == "__main__":
    main()
