"""Several models on several evaluations: one report with everything that its numbers depend on."""

from __future__ import annotations

import gc
import importlib.metadata
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from lolcats.data import build_evaluation_dataset
from lolcats.errors import UserError
from lolcats.evaluation.effective_length import effective_lengths
from lolcats.evaluation.load import describe, for_engine, with_begin_token
from lolcats.evaluation.options import EvalOptions
from lolcats.evaluation.perplexity import dataset_perplexity
from lolcats.evaluation.recall import PASSKEY, RECALL, recall_accuracy
from lolcats.evaluation.tables import add_averages
from lolcats.evaluation.tasks import check_names, data_hashes, load_tasks
from lolcats.modeling.cache_size import cache_bytes
from lolcats.modeling.model import LolcatsForCausalLM
from lolcats.provenance import provenance

CACHE_LENGTHS = (1024, 8192, 32768)
Load = Callable[[str], tuple[Any, Any]]


def evaluate_models(
    models: list[str],
    load: Load,
    options: EvalOptions,
    *,
    note: Callable[[str], None] = lambda text: None,
    keep: Callable[[dict[str, Any]], None] = lambda report: None,
) -> dict[str, Any]:
    """Measure models one after another; the first one is what the others are compared with.

    Args:
        models: folders or hub ids.
        load: opens one: (model in eval mode, tokenizer).
        note: is told what is measured next.
        keep: gets the report after each evaluation, marked "unfinished".

    Returns:
        models, settings, provenance, as plain JSON values.
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
    # One model in memory at a time.
    for path in models:
        model, tokenizer = load(path)
        row: dict[str, Any] = {"model": path, **describe(model)}
        model = for_engine(model)
        if isinstance(model, LolcatsForCausalLM):
            row["cache_bytes"] = {str(n): cache_bytes(model.config, n, model.dtype) for n in CACHE_LENGTHS}
        report["models"].append(row)
        for name, part in parts.items():
            torch.manual_seed(options.seed)
            note(f"{path}: {name}")
            try:
                row[name] = part(options, path, model, tokenizer)
            except torch.OutOfMemoryError as error:
                raise UserError(
                    f"out of memory in {name} of {path}: lower --batch-size (now {options.batch_size})"
                ) from error
            if name == "tasks":
                add_averages(row)
            keep(report | {"unfinished": True})
        del model
        gc.collect()
        torch.cuda.empty_cache()
    return report


def check(options: EvalOptions) -> None:
    """Raise for what cannot be measured, before any model is loaded."""
    if options.lm_eval_tasks:
        check_names(options.lm_eval_tasks, options.data_dir, options.run_code)
    if "ruler" in options.tasks:
        from lolcats.evaluation.ruler import check_ruler

        check_ruler()
    for name in ("perplexity", "esl"):
        if name in options.tasks and options.data is None:
            raise UserError(f"--tasks {name} measures text: name it with --data")


def _tasks(options: EvalOptions, path: str, model: Any, tokenizer: Any) -> Any:
    from lolcats.evaluation.lm_eval_run import lm_eval_set_up, run_tasks  # needs lm-eval

    chat = options.apply_chat_template is not False and bool(getattr(tokenizer, "chat_template", None))
    with lm_eval_set_up():
        tasks = load_tasks(options.lm_eval_tasks, options.data_dir, options.seed, tokenizer, chat)
    given: dict[str, Any] = {"limit": options.limit, "batch_size": options.batch_size}
    return run_tasks(model, tokenizer, tasks, **given, chat=options.apply_chat_template, run_code=options.run_code)


def _recall(
    options: EvalOptions, path: str, model: Any, tokenizer: Any, usual: dict[str, Any] = RECALL
) -> list[dict[str, Any]]:
    given = {"lengths": options.lengths, "samples": options.limit, "seed": options.seed}
    plan = usual | {name: value for name, value in given.items() if value is not None}
    return recall_accuracy(model, tokenizer, **plan, haystack=options.haystack)


def _ruler(options: EvalOptions, path: str, model: Any, tokenizer: Any) -> list[dict[str, Any]]:
    from lolcats.evaluation.lm_eval_run import lm_eval_set_up, run_tasks  # needs lm-eval
    from lolcats.evaluation.ruler import ruler_tasks

    given: dict[str, Any] = {"seed": options.seed, "haystack": options.haystack}
    given |= {"lengths": options.lengths or RECALL["lengths"], "samples": options.limit or RECALL["samples"]}
    with lm_eval_set_up():
        tasks = ruler_tasks(tokenizer, **given)
    named = {task.task_name: task for task in tasks.values()}
    found = run_tasks(model, tokenizer, named, batch_size=options.batch_size)
    rows = []
    for (kind, length), task in tasks.items():
        cell = found[task.task_name]
        numbers = {"accuracy": cell["value"], "stderr": cell["stderr"], "samples": cell["questions"]}
        rows.append({"kind": kind, "length": length, **numbers})
    return rows


def _text(
    options: EvalOptions, path: str, model: Any, tokenizer: Any, measure: Callable[..., dict[str, Any]]
) -> dict[str, Any]:
    assert options.data is not None  # see check
    data = with_begin_token(options.data, path, tokenizer)
    if options.limit is not None:
        data = data.model_copy(update={"validation_sequences": options.limit})
    found = measure(model, build_evaluation_dataset(data, tokenizer), batch_size=options.batch_size)
    return {"sequence_length": data.sequence_length, "begin_token": data.begin_token, **found}


EVALUATIONS: dict[str, Callable[..., Any]] = {
    "ruler": _ruler,  # first those that may refuse a length
    "recall": _recall,
    "passkey": partial(_recall, usual=PASSKEY),
    "perplexity": partial(_text, measure=dataset_perplexity),
    "esl": partial(_text, measure=effective_lengths),
}
