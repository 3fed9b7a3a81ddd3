"""One model on lm-eval tasks: scores and standard errors."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lm_eval.api.task
import torch
from lm_eval import evaluator
from lm_eval.utils import env

from lolcats.data.sources import quiet
from lolcats.errors import UserError
from lolcats.evaluation.lm_eval_model import LolcatsLM
from lolcats.evaluation.tasks import flat


def run_tasks(
    model: Any,
    tokenizer: Any,
    tasks: Mapping[str, Any],
    *,
    limit: int | None = None,
    seed: int = 0,
    batch_size: int = 256,
    chat: bool | None = False,
    run_code: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, dict[str, Any]]:
    """Measure `model` on tasks; the engine generates if it is linearized or `keep_softmax` made it.

    Args:
        tasks: name in the report -> lm-eval's `Task` or `Group` (`load_tasks`, or any others).
        limit: questions of each lm-eval task (each subject of MMLU); None: all.
        chat: prompts in the chat template, few-shot examples as turns; None: those of tasks that generate, if there
            is one.
        run_code: whether programs that the model writes may run.

    Returns:
        For each name: value and stderr (shares, not percent), metric, shots, questions, lm-eval's task, whether in the
        chat template and, for groups of several tasks, those of each part.
    """
    template = bool(getattr(tokenizer, "chat_template", None))
    if chat and not template:
        raise UserError("--apply-chat-template: this model's tokenizer has no chat template")
    torch.manual_seed(seed)
    with lm_eval_set_up():
        lm = LolcatsLM(
            model,
            tokenizer=tokenizer,
            batch_size=batch_size,
            device=str(next(model.parameters()).device),
            on_progress=on_progress,
        )
        loaded = flat(dict(tasks))
        chats = {
            name: template and (task.OUTPUT_TYPE == "generate_until" if chat is None else chat)
            for name, task in loaded["tasks"].items()
        }
        for name, task in loaded["tasks"].items():
            _write_questions_once(task, chats[name])
        found = evaluator.evaluate(
            lm=lm,
            task_dict=loaded,
            limit=limit,
            bootstrap_iters=1000,
            log_samples=False,
            apply_chat_template=True,
            fewshot_as_multiturn=True,
            confirm_run_unsafe_code=run_code,
        )
    return {name: _summary(name, task, found, chats) for name, task in tasks.items()}


def _write_questions_once(task: Any, chat: bool) -> None:
    """Let a task keep its requests for the next model: the same texts, few-shot examples included, without answers."""
    if "build_all_requests" in vars(task):
        return
    build = task.build_all_requests
    kept: dict[int | None, list[Any]] = {}

    def build_once(*, limit: int | None, **options: Any) -> None:
        if limit not in kept:
            build(limit=limit, **options if chat else {})
            kept[limit] = task.instances
        for request in kept[limit]:
            request.resps, request.filtered_resps = [], {}
        task._instances = kept[limit]

    task.build_all_requests = build_once


def _summary(name: str, task: Any, found: Any, chats: dict[str, bool]) -> dict[str, Any]:
    members = [part.task_name for part in task.get_all_tasks()] if hasattr(task, "get_all_tasks") else [task.task_name]
    rows, row = found["results"], found["results"][name if len(members) > 1 else members[0]]
    metric = getattr(task, "main_metric", None) or _main_metric(row)
    counts = {member: int(found["n-samples"][member]["effective"]) for member in members}
    summary: dict[str, Any] = {
        "metric": metric,
        "shots": found["n-shot"].get(members[0]),
        "questions": sum(counts.values()),
        **_measured(row, metric),
        "version": found["versions"].get(members[0]),
        "task": found["configs"][members[0]].get("task_alias") or members[0],
        "chat_template": chats[members[0]],
    }
    if len(members) > 1:
        summary["parts"] = {
            member: {**_measured(rows[member], metric), "questions": counts[member]} for member in members
        }
    return summary


def _measured(row: dict[str, Any], metric: str) -> dict[str, Any]:
    key = metric if metric in row else next(key for key in row if key.split(",")[0] == metric)
    stderr: Any = row.get(key.replace(",", "_stderr,", 1))  # "N/A" where there is none
    known = isinstance(stderr, int | float) and math.isfinite(stderr)
    return {"value": float(row[key]), "stderr": float(stderr) if known else None}


def _main_metric(row: dict[str, Any]) -> str:
    """The metric of a task that is not known: normalised accuracy if there is one, else the first."""
    metrics = [key.split(",")[0] for key in row if "," in key and "_stderr" not in key]
    return "acc_norm" if "acc_norm" in metrics else metrics[0]


@contextmanager
def lm_eval_set_up() -> Iterator[None]:
    """lm-eval without bars and log lines (ours shows the progress of all tasks together), and quicker.

    It compiles the same few Jinja templates anew for every question, which for MMLU takes minutes.
    """
    bar, logger = lm_eval.api.task.tqdm, logging.getLogger("lm_eval")
    level = logger.level
    lm_eval.api.task.tqdm = functools.partial(bar, disable=True)
    env.from_string = functools.lru_cache(maxsize=1024)(env.from_string)  # on the instance, over the class's
    logger.setLevel(logging.ERROR)
    try:
        with quiet():
            yield
    finally:
        lm_eval.api.task.tqdm = bar
        del env.from_string
        logger.setLevel(level)
