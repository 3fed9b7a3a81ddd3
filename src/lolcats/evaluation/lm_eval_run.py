"""One model on lm-eval tasks: scores and standard errors."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import lm_eval.api.task
import torch
from lm_eval import evaluator
from lm_eval.api.group import Group
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
    on_progress: Callable[[int, int], None] = lambda done, total: None,
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
    results: dict[str, dict[str, Any]] = {}
    with lm_eval_set_up():
        device = str(next(model.parameters()).device)
        lm = LolcatsLM(model, tokenizer=tokenizer, batch_size=batch_size, device=device, on_progress=on_progress)
        generate = {
            name: all(member.OUTPUT_TYPE == "generate_until" for member in _members(task))
            for name, task in tasks.items()
        }
        chats = {name: template and (generate[name] if chat is None else chat) for name in tasks}
        for in_chat in set(chats.values()):
            part = {name: task for name, task in tasks.items() if chats[name] == in_chat}
            found = evaluator.evaluate(
                lm=lm,
                task_dict=flat(part),
                limit=limit,
                bootstrap_iters=1000,
                log_samples=False,
                apply_chat_template=in_chat,
                fewshot_as_multiturn=in_chat,
                confirm_run_unsafe_code=run_code,
            )
            results |= {name: _summary(name, task, found) | {"chat_template": in_chat} for name, task in part.items()}
    return {name: results[name] for name in tasks}


def _members(task: Any) -> list[Any]:
    return task.get_all_tasks() if isinstance(task, Group) else [task]


def _summary(name: str, task: Any, found: Any) -> dict[str, Any]:
    members = [member.task_name for member in _members(task)]
    rows, row = found["results"], found["results"][name if len(members) > 1 else members[0]]
    metric = getattr(task, "main_metric", None)
    if metric is None:  # normalised accuracy if there is one, else the first
        found_metrics = [key.split(",")[0] for key in row if "," in key and "_stderr" not in key]
        metric = "acc_norm" if "acc_norm" in found_metrics else found_metrics[0]
    counts = {member: int(found["n-samples"][member]["effective"]) for member in members}
    summary: dict[str, Any] = {
        "metric": metric,
        "shots": found["n-shot"].get(members[0]),
        "questions": sum(counts.values()),
        **_measured(row, metric),
        "version": found["versions"].get(members[0]),
        "task": found["configs"][members[0]].get("task_alias") or members[0],
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


@contextmanager
def lm_eval_set_up() -> Iterator[None]:
    """lm-eval without bars and log lines (ours shows the progress of all tasks together), and quicker.

    It compiles the same few Jinja templates anew for every question, which for MMLU takes minutes.
    """
    logger, template = logging.getLogger("lm_eval"), functools.lru_cache(maxsize=1024)(env.from_string)
    silent = functools.partial(lm_eval.api.task.tqdm, disable=True)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with quiet(), patch.object(lm_eval.api.task, "tqdm", silent), patch.object(env, "from_string", template):
            yield
    finally:
        logger.setLevel(level)
