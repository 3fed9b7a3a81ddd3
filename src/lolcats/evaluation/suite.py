"""Several models on several evaluations: one report with everything that its numbers depend on."""

from __future__ import annotations

import gc
import importlib.metadata
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from lolcats.config import DataSection
from lolcats.data import build_evaluation_dataset
from lolcats.errors import UserError
from lolcats.evaluation.effective_length import dataset_lengths, distribution
from lolcats.evaluation.load import cache_bytes_of, describe, for_engine, with_begin_token
from lolcats.evaluation.options import EvalOptions
from lolcats.evaluation.recall import PASSKEY, RECALL, recall_accuracy
from lolcats.evaluation.tables import add_averages
from lolcats.evaluation.tasks import check_names, data_hashes, load_tasks
from lolcats.provenance import provenance

Load = Callable[[str], tuple[Any, Any]]
Advance = Callable[[int, int], None]


def evaluate_models(
    models: list[str],
    load: Load,
    options: EvalOptions,
    *,
    progress: Callable[[str, str], Advance] = lambda model, evaluation: lambda done, total: None,
    keep: Callable[[dict[str, Any]], None] = lambda report: None,
) -> dict[str, Any]:
    """Measure models one after another; the first one is what the others are compared with.

    Args:
        models: folders or hub ids.
        load: opens one: (model in eval mode, tokenizer).
        progress: (model, evaluation) -> a function that is told (done, in all).
        keep: gets the report after each evaluation, marked "unfinished".

    Returns:
        models, settings, provenance, as plain JSON values.

    Raises:
        UserError: unknown tasks, missing data, models that cannot be compared.
    """
    check(options)
    parts: dict[str, Callable[..., Any]] = {"tasks": _tasks} if options.lm_eval_tasks else {}
    parts |= {name: part for name, part in EVALUATIONS.items() if name in options.tasks}
    report: dict[str, Any] = {"teacher": models[0], "models": []}
    report |= {"settings": options.model_dump(mode="json"), "provenance": provenance()}
    if options.lm_eval_tasks or "ruler" in options.tasks:
        report["provenance"]["versions"]["lm-eval"] = importlib.metadata.version("lm-eval")
    if options.lm_eval_tasks and options.data_dir is not None:
        report["provenance"]["data_sha256"] = data_hashes(options.data_dir, options.lm_eval_tasks)
    for path in models:
        model, tokenizer = load(path)
        data = None if options.data is None else with_begin_token(options.data, path, tokenizer)
        row: dict[str, Any] = {"model": path, **describe(model)}
        model = for_engine(model)
        row |= cache_bytes_of(model)
        report["models"].append(row)
        for name, part in parts.items():
            torch.manual_seed(options.seed)
            advance = progress(path, name)
            try:
                row[name] = part(options, model, tokenizer, data, advance)
            except torch.OutOfMemoryError as error:
                raise UserError(
                    f"out of memory in {name} of {path}: lower --batch-size (now {options.batch_size})"
                ) from error
            if name == "tasks":
                add_averages(row)
            keep(report | {"unfinished": True})
        del model
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return report


def check(options: EvalOptions) -> None:
    """Raise for what cannot be measured, before any model is loaded."""
    if options.lm_eval_tasks:
        check_names(options.lm_eval_tasks, options.data_dir, options.run_code)
    if "ruler" in options.tasks:
        from lolcats.evaluation.ruler import check_ruler

        check_ruler()
    if "esl" in options.tasks and options.data is None:
        raise UserError("--tasks esl measures training text: name it with --data")


def _tasks(options: EvalOptions, model: Any, tokenizer: Any, data: DataSection | None, advance: Advance) -> Any:
    from lolcats.evaluation.lm_eval_run import lm_eval_set_up, run_tasks  # needs lm-eval

    chat = options.apply_chat_template is not False and bool(getattr(tokenizer, "chat_template", None))
    with lm_eval_set_up():
        tasks = load_tasks(options.lm_eval_tasks, options.data_dir, options.seed, tokenizer, chat)
    given: dict[str, Any] = {"limit": options.limit, "batch_size": options.batch_size}
    given |= {"chat": options.apply_chat_template, "run_code": options.run_code, "on_progress": advance}
    return run_tasks(model, tokenizer, tasks, **given)


def _recall(
    options: EvalOptions,
    model: Any,
    tokenizer: Any,
    data: DataSection | None,
    advance: Advance,
    usual: dict[str, Any] = RECALL,
) -> Any:
    given = {"lengths": options.lengths, "samples": options.limit, "seed": options.seed}
    plan = usual | {name: value for name, value in given.items() if value is not None}
    return recall_accuracy(model, tokenizer, **plan, haystack=options.haystack, on_progress=advance)


def _ruler(options: EvalOptions, model: Any, tokenizer: Any, data: DataSection | None, advance: Advance) -> Any:
    from lolcats.evaluation.lm_eval_run import lm_eval_set_up, run_tasks  # needs lm-eval
    from lolcats.evaluation.ruler import ruler_tasks

    seed, samples = options.seed, options.limit or RECALL["samples"]
    with lm_eval_set_up():
        lengths = options.lengths or RECALL["lengths"]
        tasks = ruler_tasks(tokenizer, lengths=lengths, samples=samples, seed=seed, haystack=options.haystack)
    named = {task.task_name: task for task in tasks.values()}
    found = run_tasks(model, tokenizer, named, batch_size=options.batch_size, on_progress=advance)
    rows = []
    for (kind, length), task in tasks.items():
        measured = found[task.task_name]
        numbers = {"accuracy": measured["value"], "stderr": measured["stderr"], "samples": measured["questions"]}
        rows.append({"kind": kind, "length": length, **numbers})
    return rows


def _esl(options: EvalOptions, model: Any, tokenizer: Any, data: DataSection | None, advance: Advance) -> Any:
    assert data is not None  # see check
    if options.limit is not None:
        data = data.model_copy(update={"validation_sequences": options.limit})
    dataset = build_evaluation_dataset(data, tokenizer)
    lengths = dataset_lengths(dataset, model, batch_size=max(1, options.batch_size // 16), on_progress=advance)
    return {"sequence_length": data.sequence_length, "begin_token": data.begin_token, **distribution(lengths)}


EVALUATIONS: dict[str, Callable[..., Any]] = {
    "recall": _recall,
    "ruler": _ruler,
    "passkey": partial(_recall, usual=PASSKEY),
    "esl": _esl,
}
