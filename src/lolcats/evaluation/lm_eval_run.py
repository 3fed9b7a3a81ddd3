"""One model on lm-eval tasks: scores and standard errors."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from lolcats.data.cache import tokenizer_hash
from lolcats.data.sources import quiet
from lolcats.evaluation.tasks import data_hashes, load_tasks, paper_task


def run_tasks(
    model: Any,
    tokenizer: Any,
    names: list[str],
    *,
    data_dir: str | None = None,
    limit: int | None = None,
    seed: int = 0,
    batch_size: int = 256,
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, dict[str, Any]]:
    """Measure `model` on tasks.

    Args:
        limit: questions of each lm-eval task (each subject of MMLU); None: all.

    Returns:
        For each name: value and stderr (shares, not percent), metric, shots, questions and, for groups of
        several tasks, those of each part.
    """
    import torch
    from lm_eval import evaluator

    from lolcats.evaluation.lm_eval_model import LolcatsLM

    torch.manual_seed(seed)
    with lm_eval_set_up():
        prepared = _prepare(tuple(names), data_dir, seed, _content(names, data_dir))
        loaded, parts = prepared.loaded, prepared.parts
        lm = LolcatsLM(
            model,
            tokenizer=tokenizer,
            batch_size=batch_size,
            device=str(next(model.parameters()).device),
            on_progress=on_progress,
            tokenised=prepared.tokenised.setdefault(tokenizer_hash(tokenizer), {}),
        )
        found = evaluator.evaluate(lm=lm, task_dict=loaded, limit=limit, bootstrap_iters=1000, log_samples=False)
    return {name: _summary(name, parts[name], found, loaded) for name in names}


@dataclass
class _Prepared:
    """What several models have in common: the tasks, and their texts as tokens, by the tokenizer's hash."""

    loaded: dict[str, Any]
    parts: dict[str, list[str]]
    tokenised: dict[str, dict[tuple[str, str], tuple[list[int], list[int]]]] = field(default_factory=dict)


@functools.lru_cache(maxsize=1)
def _prepare(names: tuple[str, ...], data_dir: str | None, seed: int, content: str) -> _Prepared:
    prepared = _Prepared(*load_tasks(list(names), data_dir, seed))
    for task in prepared.loaded["tasks"].values():
        _write_questions_once(task)
    return prepared


def _write_questions_once(task: Any) -> None:
    """Let a task keep its requests for the next model: the same texts, few-shot examples included, without answers."""
    build = task.build_all_requests
    kept: dict[int | None, list[Any]] = {}

    def build_once(*, limit: int | None, **options: Any) -> None:
        if limit not in kept:
            build(limit=limit, **options)
            kept[limit] = task.instances
        for request in kept[limit]:
            request.resps, request.filtered_resps = [], {}
        task._instances = kept[limit]

    task.build_all_requests = build_once


def _content(names: list[str], data_dir: str | None) -> str:
    """Changes with the local data, so that other data are not taken for those of an earlier call."""
    return "" if data_dir is None else repr(data_hashes(data_dir, names))


def lm_eval_version() -> str:
    return importlib.metadata.version("lm-eval")


def _summary(name: str, members: list[str], found: Any, loaded: dict[str, Any]) -> dict[str, Any]:
    task = paper_task(name)
    rows = {member: found["results"][member] for member in members}
    metric = task.metric if task is not None else _main_metric(next(iter(rows.values())))
    counts = {member: _questions(member, found, loaded) for member in members}
    key = next(key for key in next(iter(rows.values())) if key.split(",")[0] == metric)
    error_key = key.replace(",", "_stderr,", 1)
    values = {member: float(row[key]) for member, row in rows.items()}
    errors = {member: _number(row.get(error_key)) for member, row in rows.items()}
    total = sum(counts.values())
    summary: dict[str, Any] = {
        "metric": metric,
        "shots": task.shots if task is not None else found.get("n-shot", {}).get(members[0]),
        "questions": total,
        "value": sum(values[member] * counts[member] for member in members) / total,
        "stderr": _pooled([errors[member] for member in members], [counts[member] for member in members]),
        "version": found.get("versions", {}).get(members[0]),
    }
    if len(members) > 1:
        summary["parts"] = {
            member: {"value": values[member], "stderr": errors[member], "questions": counts[member]}
            for member in members
        }
    return summary


def _main_metric(row: dict[str, Any]) -> str:
    """The metric of a task that is not the paper's: normalised accuracy if there is one, else the first."""
    metrics = [key.split(",")[0] for key in row if "," in key and "_stderr" not in key]
    return "acc_norm" if "acc_norm" in metrics else metrics[0]


def _questions(member: str, found: Any, loaded: dict[str, Any]) -> int:
    if member in loaded["groups"]:
        return sum(_questions(child, found, loaded) for child in loaded["group_map"][member])
    return int(found["n-samples"][member]["effective"])


def _pooled(errors: list[float | None], counts: list[int]) -> float | None:
    """Standard error of the mean over all questions of several tasks, as lm-eval pools it."""
    from lm_eval.api.metrics import pooled_sample_stderr

    known = [error for error in errors if error is not None]
    if len(errors) == 1 or len(known) < len(errors) or sum(counts) <= len(counts):
        return errors[0] if len(errors) == 1 else None
    return float(pooled_sample_stderr(known, counts))


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


@contextmanager
def lm_eval_set_up() -> Iterator[None]:
    """lm-eval without bars and log lines (ours shows the progress of all tasks together), and quicker.

    It compiles the same few Jinja templates anew for every question, which for MMLU takes minutes.
    """
    import lm_eval.api.task as module
    from lm_eval.utils import env

    bar = module.tqdm
    logger = logging.getLogger("lm_eval")
    level = logger.level
    module.tqdm = functools.partial(bar, disable=True)
    env.from_string = functools.lru_cache(maxsize=1024)(env.from_string)  # on the instance, over the class's
    logger.setLevel(logging.ERROR)
    try:
        with quiet():
            yield
    finally:
        module.tqdm = bar
        del env.from_string
        logger.setLevel(level)
