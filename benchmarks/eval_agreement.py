"""`lolcats eval` against plain lm-eval: every score of the paper's six tasks, computed both ways by the same model.

    python benchmarks/eval_agreement.py --model FOLDER --data-dir DATA --dtype float32 --json agreement.json
    python benchmarks/eval_agreement.py --model FOLDER --data-dir DATA --against vllm --tasks piqa --documents 20

A row for each task: scores in all, the largest difference between the two log-likelihoods, requests that one calls the
greedy answer and the other does not, and the task's result from either's scores. `--limit` takes the first requests of
each task (the results are then omitted, because the choices of the last question may be cut off), `--documents` the
first questions. lm-eval's side is its `hf` model, or its `vllm`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import time
from pathlib import Path
from typing import Any

import torch
from lm_eval import evaluator
from lm_eval.api.model import LM
from lm_eval.models.huggingface import HFLM
from rich.console import Console
from rich.table import Table

from lolcats.analysis.files import write_json
from lolcats.config import ModelSection
from lolcats.conversion import load_base_model
from lolcats.evaluation.lm_eval_model import LolcatsLM
from lolcats.evaluation.lm_eval_run import lm_eval_set_up
from lolcats.evaluation.tasks import PAPER_NAMES, PAPER_TASKS, flat, load_tasks
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


def result(scores: Scores, loaded: dict[str, Any], name: str, documents: int | None) -> float:
    """The paper's number of a task from given scores; subjects of MMLU count by their questions."""
    replay = Replay(scores)
    found = evaluator.evaluate(lm=replay, task_dict=loaded, limit=documents, bootstrap_iters=0, log_samples=False)
    return found["results"][name][f"{PAPER_TASKS[name].metric},none"]


def plain_model(model: Any, tokenizer: Any, arguments: argparse.Namespace) -> LM:
    """The same model as lm-eval runs it."""
    if arguments.against == "hf":
        device = str(next(model.parameters()).device)
        return HFLM(pretrained=model, tokenizer=tokenizer, batch_size=arguments.batch_size, device=device)
    import vllm
    from vllm import LLM  # noqa: F401  # chooses its platform by the distribution's version, too

    known = importlib.metadata.version
    # vLLM's CPU build is another distribution, for whose version lm-eval does not ask.
    importlib.metadata.version = lambda name: vllm.__version__ if name == "vllm" else known(name)
    try:
        from lm_eval.models.vllm_causallms import VLLM
    finally:
        importlib.metadata.version = known
    return VLLM(arguments.model, dtype=arguments.dtype, max_model_len=2048, **json.loads(arguments.engine))


def compare(name: str, model: Any, tokenizer: Any, plain: LM, arguments: argparse.Namespace) -> dict[str, Any]:
    """A task's row."""
    with lm_eval_set_up():
        loaded = flat(load_tasks([name], arguments.data_dir, seed=0))
        requests: list[Any] = []
        for task in loaded["tasks"].values():
            task.build_all_requests(limit=arguments.documents)
            requests += task.instances[: arguments.limit]
        device = str(next(model.parameters()).device)
        ours, our_s = score(LolcatsLM(model, tokenizer=tokenizer, batch_size=256, device=device), requests)
        theirs, their_s = score(plain, requests)
        row: dict[str, Any] = {
            "scores": len(requests),
            "largest_difference": max(abs(ours[each.args][0] - theirs[each.args][0]) for each in requests),
            "greedy_differs": sum(ours[each.args][1] != theirs[each.args][1] for each in requests),
            "seconds": {"lolcats": our_s, arguments.against: their_s},
        }
        if arguments.limit is None:
            both = (("lolcats", ours), (arguments.against, theirs))
            row |= {key: result(scores, loaded, name, arguments.documents) for key, scores in both}
    return row


def print_table(report: dict[str, Any], console: Console) -> None:
    other = report["settings"]["against"]
    table = Table(title=f"the same model, scored by lolcats and by lm-eval's {other}")
    for name in ("task", "scores", "largest difference", "greedy differs", "lolcats, %", f"{other}, %"):
        table.add_column(name, justify="left" if name == "task" else "right")
    for name, row in report["tasks"].items():
        shares = [f"{100 * row[key]:.2f}" if key in row else "" for key in ("lolcats", other)]
        difference = f"{row['largest_difference']:.1e}"
        table.add_row(name, f"{row['scores']:,}", difference, str(row["greedy_differs"]), *shares)
    console.print(table)
    for name in ("lolcats", other):
        seconds = sum(row["seconds"][name] for row in report["tasks"].values())
        console.print(f"{name}: {seconds:.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--gguf-file", default=None)
    parser.add_argument("--data-dir", required=True, help="the six tasks, as for lolcats eval --data-dir")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--against", default="hf", choices=("hf", "vllm"), help="lm-eval's model")
    parser.add_argument("--engine", default="{}", help="further arguments of vllm.LLM, as JSON")
    parser.add_argument("--batch-size", type=int, default=64, help="of lm-eval's hf model")
    parser.add_argument("--limit", type=int, default=None, help="first requests of each task and each subject of MMLU")
    parser.add_argument("--documents", type=int, default=None, help="first questions of each task and subject")
    parser.add_argument("--tasks", nargs="+", default=list(PAPER_NAMES), choices=list(PAPER_NAMES))
    parser.add_argument("--json", type=Path, help="rewritten after every task; tasks that it holds are not run again")
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    settings = {name: str(value) for name, value in vars(arguments).items() if value is not None and name != "tasks"}
    report = {
        "tasks": {},
        "settings": settings,
        "lm_eval": importlib.metadata.version("lm-eval"),
        "provenance": provenance(),
    }
    if arguments.json and arguments.json.is_file():
        earlier = json.loads(arguments.json.read_text(encoding="utf-8"))
        if earlier["settings"] != settings:
            parser.error(f"{arguments.json} has other settings, {earlier['settings']}: remove it, or name another file")
        report["tasks"] = earlier["tasks"]
    section = ModelSection(
        path=arguments.model, gguf_file=arguments.gguf_file, dtype=arguments.dtype, device=arguments.device
    )
    model, tokenizer = load_base_model(section, allow_linearized=True)
    plain = plain_model(model, tokenizer, arguments)
    for name in arguments.tasks:
        if name not in report["tasks"]:
            report["tasks"][name] = compare(name, model, tokenizer, plain, arguments)
            if arguments.json:
                write_json(arguments.json, report)
            print_table(report, Console(width=120))


if __name__ == "__main__":
    main()
