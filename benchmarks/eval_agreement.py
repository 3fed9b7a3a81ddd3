"""`lolcats eval` against plain lm-eval: every score of the paper's six tasks, computed both ways by the same model.

    python benchmarks/eval_agreement.py --model FOLDER --data-dir DATA --dtype float32 --json agreement.json

Rows: scores in all, the largest difference between the two log-likelihoods, requests that one calls the greedy
answer and the other does not, and each task's result from either's scores. `--limit` takes the first requests of each
task (the results are then left out, because the choices of the last question may be cut off).
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from lm_eval import evaluator
from lm_eval.api.model import LM
from lm_eval.models.huggingface import HFLM
from rich.console import Console
from rich.table import Table

from lolcats.config import ModelSection
from lolcats.conversion import load_base_model
from lolcats.evaluation.lm_eval_model import LolcatsLM
from lolcats.evaluation.lm_eval_run import lm_eval_set_up
from lolcats.evaluation.lm_eval_run import lm_eval_version
from lolcats.evaluation.tasks import PAPER_NAMES
from lolcats.evaluation.tasks import load_tasks
from lolcats.evaluation.tasks import paper_task
from lolcats.provenance import provenance

Scores = dict[tuple[str, str], tuple[float, bool]]


class Replay(LM):
    """An lm-eval model whose scores are known."""

    def __init__(self, scores: Scores) -> None:
        super().__init__()
        self.scores = scores

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return [self.scores[request.args] for request in requests]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        raise NotImplementedError

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        raise NotImplementedError


def score(lm: LM, requests: list[Any]) -> tuple[Scores, float]:
    """What the model says of every request, and the seconds it took."""
    begun = time.perf_counter()
    found = lm.loglikelihood(requests, disable_tqdm=True)
    return {request.args: value for request, value in zip(requests, found, strict=True)}, time.perf_counter() - begun


def results(scores: Scores, loaded: dict[str, Any], parts: dict[str, list[str]]) -> dict[str, float]:
    """The paper's number of each task from given scores; subjects of MMLU count by their questions."""
    found = evaluator.evaluate(lm=Replay(scores), task_dict=loaded, bootstrap_iters=0, log_samples=False)
    values = {}
    for name in PAPER_NAMES:
        task = paper_task(name)
        assert task is not None
        sizes = [found["n-samples"][part]["effective"] for part in parts[name]]
        shares = [found["results"][part][f"{task.metric},none"] for part in parts[name]]
        values[name] = sum(s * n for s, n in zip(shares, sizes, strict=True)) / sum(sizes)
    return values


def compare(model: Any, tokenizer: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    with lm_eval_set_up():
        loaded, parts = load_tasks(list(PAPER_NAMES), arguments.data_dir, seed=0)
        requests: dict[str, list[Any]] = {}
        for name, task in loaded["tasks"].items():
            task.build_all_requests(limit=None)
            requests[name] = task.instances[: arguments.limit]
        everything = [request for some in requests.values() for request in some]
        device = str(next(model.parameters()).device)
        ours, our_s = score(LolcatsLM(model, tokenizer=tokenizer, batch_size=256, device=device), everything)
        plain = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=arguments.batch_size, device=device)
        theirs, their_s = score(plain, everything)
        rows: dict[str, dict[str, Any]] = defaultdict(dict)
        for name in PAPER_NAMES:
            pairs = [request.args for part in parts[name] for request in requests[part]]
            rows[name] = {
                "scores": len(pairs),
                "largest_difference": max(abs(ours[pair][0] - theirs[pair][0]) for pair in pairs),
                "greedy_differs": sum(ours[pair][1] != theirs[pair][1] for pair in pairs),
            }
        if arguments.limit is None:
            for key, scores in (("lolcats", ours), ("hf", theirs)):
                for name, value in results(scores, loaded, parts).items():
                    rows[name][key] = value
    return {"tasks": dict(rows), "seconds": {"lolcats": our_s, "hf": their_s}, "lm_eval": lm_eval_version()}


def print_table(report: dict[str, Any], console: Console) -> None:
    table = Table(title="the same model, scored by lolcats and by lm-eval's hf")
    for name in ("task", "scores", "largest difference", "greedy differs", "lolcats, %", "hf, %"):
        table.add_column(name, justify="left" if name == "task" else "right")
    for name, row in report["tasks"].items():
        shares = [f"{100 * row[key]:.2f}" if key in row else "" for key in ("lolcats", "hf")]
        difference = f"{row['largest_difference']:.1e}"
        table.add_row(name, f"{row['scores']:,}", difference, str(row["greedy_differs"]), *shares)
    console.print(table)
    console.print(", ".join(f"{name}: {seconds:.1f} s" for name, seconds in report["seconds"].items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--gguf-file", default=None)
    parser.add_argument("--data-dir", required=True, help="the six tasks, as for lolcats eval --data-dir")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch-size", type=int, default=64, help="of lm-eval's hf model")
    parser.add_argument("--limit", type=int, default=None, help="first requests of each task and each subject of MMLU")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    section = ModelSection(
        path=arguments.model, gguf_file=arguments.gguf_file, dtype=arguments.dtype, device=arguments.device
    )
    model, tokenizer = load_base_model(section, allow_linearized=True)
    settings = {name: str(value) for name, value in vars(arguments).items() if value is not None}
    report = compare(model, tokenizer, arguments) | {"settings": settings, "provenance": provenance()}
    print_table(report, Console(width=120))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
