"""Several models on several evaluations: one report with everything that its numbers depend on."""

from __future__ import annotations

import gc
import importlib.metadata
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from lolcats.config import DataSection
from lolcats.data import build_evaluation_dataset
from lolcats.data.cache import tokenizer_hash
from lolcats.data.effective_length import dataset_lengths, distribution
from lolcats.errors import UserError
from lolcats.evaluation import agreement
from lolcats.evaluation.load import describe, with_begin_token
from lolcats.evaluation.passkey import LENGTHS, passkey_accuracy
from lolcats.evaluation.recall import RECALL_LENGTHS, RECALL_SAMPLES, recall_accuracy
from lolcats.evaluation.tables import add_averages
from lolcats.evaluation.tasks import OWN, PAPER_NAMES, check_names, data_hashes, load_tasks
from lolcats.provenance import provenance

Load = Callable[[str], tuple[Any, Any]]
Advance = Callable[[int, int], None]


@dataclass(frozen=True)
class EvalOptions:
    """What is measured, and how much of it."""

    tasks: tuple[str, ...]
    """lm-eval tasks and `OWN`; "paper" stands for the paper's six."""
    data_dir: str | None = None
    limit: int | None = None
    """Questions of each lm-eval task; texts of each kind and length of `recall` and `ruler` (50); prompts of
    `generation`; sequences of `esl`."""
    seed: int = 0
    batch_size: int = 256
    """Most contexts in a forward pass; a sixteenth of it where texts are generated."""
    lengths: tuple[int, ...] | None = None
    """Tokens of the texts of `recall`, `ruler` and `passkey`; None: their own defaults."""
    haystack: str = "demo"
    """Text around what `recall` and `ruler` ask for: a data source of plain text."""
    per_decile: int = 10
    """Passkey texts for each tenth of depth."""
    spans: tuple[int, ...] = agreement.SPANS
    """Tokens over which continuations are compared."""
    data: DataSection | None = None
    """Text for `generation` and `esl`."""
    model_options: dict[str, Any] = field(default_factory=dict)
    """How models are loaded; written into the report."""

    @property
    def lm_eval_tasks(self) -> list[str]:
        return [name for name in self.tasks if name not in OWN]

    @property
    def decode_batch(self) -> int:
        return max(1, self.batch_size // 16)


def expand_tasks(text: str) -> tuple[str, ...]:
    """`"paper,passkey"` -> task names, each once, in their order.

    Raises:
        UserError: no name.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise UserError(f"--tasks {text!r}: expected names, for example paper or piqa,mmlu,passkey")
    expanded = [part for name in names for part in (PAPER_NAMES if name == "paper" else (name,))]
    return tuple(dict.fromkeys(expanded))


def evaluate_models(
    models: list[str],
    load: Load,
    options: EvalOptions,
    *,
    progress: Callable[[str, str], Advance] | None = None,
    before: Any = None,
    keep: Callable[[dict[str, Any]], None] = lambda report: None,
) -> dict[str, Any]:
    """Measure models one after another; the first one is what the others are compared with.

    Args:
        models: folders or hub ids.
        load: opens one: (model in eval mode, tokenizer).
        progress: (model, evaluation) -> a function that is told (done, in all).
        before: an earlier report at the same place. If it is unfinished and of the same settings, versions and weights,
            its evaluations are not repeated, except the first model's `generation`: its tokens are not in the report.
        keep: gets the report after each evaluation, marked "unfinished".

    Returns:
        models, settings, provenance, as plain JSON values.

    Raises:
        UserError: unknown tasks, missing data, models that cannot be compared.
    """
    check(options)
    suite = _Suite(options)
    parts: dict[str, Callable[..., Any]] = {"tasks": suite.tasks} if options.lm_eval_tasks else {}
    parts |= {name: getattr(suite, name) for name in OWN if name in options.tasks}
    report: dict[str, Any] = {"teacher": models[0], "models": []}
    report |= {"settings": _settings(options), "provenance": _provenance(options)}
    earlier = _unfinished_rows(before, report)
    for path in models:
        modified = _weights_modified(path)
        model, tokenizer = load(path)
        data = None if options.data is None else with_begin_token(options.data, path, tokenizer)
        row: dict[str, Any] = {"model": path, "weights_modified": modified, **describe(model)}
        old = earlier.pop(path, {})
        if row.items() <= old.items():
            row = {name: value for name, value in old.items() if (name, path) != ("generation", models[0])}
        elif path == models[0]:
            earlier.clear()  # the others were compared with another model
        report["models"].append(row)
        for name, part in parts.items():
            if name in row:
                continue
            torch.manual_seed(options.seed)
            advance = progress(path, name) if progress is not None else lambda done, total: None
            try:
                row[name] = part(model, tokenizer, data, advance)
            except torch.OutOfMemoryError as error:
                raise UserError(
                    f"out of memory in {name} of {path}: lower --batch-size (now {options.batch_size})"
                ) from error
            if name == "tasks":
                add_averages(row)
            keep(report | {"models": [*report["models"], *earlier.values()], "unfinished": True})
        del model
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return report


def _unfinished_rows(before: Any, report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Model -> row of an unfinished report that differs from the one that begins in its rows and time alone."""
    try:
        origin = before["provenance"] | {"time": report["provenance"]["time"]}
        same = before | {"models": [], "provenance": origin} == report | {"unfinished": True}
        return {row["model"]: row for row in before["models"]} if same else {}
    except (KeyError, TypeError):  # something else
        return {}


def check(options: EvalOptions) -> None:
    """Raise for what cannot be measured, before any model is loaded."""
    if options.lm_eval_tasks:
        check_names(options.lm_eval_tasks, options.data_dir)
    if "ruler" in options.tasks:
        from lolcats.evaluation.ruler import check_ruler

        check_ruler()
    if "esl" in options.tasks and options.data is None:
        raise UserError("--tasks esl measures training text: name it with --data")
    if any(length < 1 for length in options.lengths or ()) or any(span < 1 for span in options.spans):
        raise UserError("--lengths and --spans count tokens; expected positive numbers")


class _Suite:
    """The evaluations, each of which takes (model, tokenizer, data, advance), and what later models share with earlier.

    That is tasks with their texts as tokens by the tokenizer's hash, and the first model's continuations.
    """

    def __init__(self, options: EvalOptions) -> None:
        self.options = options
        self.loaded: dict[str, Any] | None = None
        self.tokenised: dict[str, Any] = defaultdict(dict)
        self.vocabulary = ""
        self.prompts: list[agreement.GenerationPrompt] = []
        self.teacher: list[list[int]] | None = None

    def tasks(self, model: Any, tokenizer: Any, data: DataSection | None, advance: Advance) -> Any:
        from lolcats.evaluation.lm_eval_run import lm_eval_set_up, run_tasks  # needs lm-eval

        options = self.options
        if self.loaded is None:
            with lm_eval_set_up():
                self.loaded = load_tasks(options.lm_eval_tasks, options.data_dir, options.seed)
        return run_tasks(
            model,
            tokenizer,
            self.loaded,
            limit=options.limit,
            seed=options.seed,
            batch_size=options.batch_size,
            tokenised=self.tokenised[tokenizer_hash(tokenizer)],
            on_progress=advance,
        )

    def recall(self, model: Any, tokenizer: Any, data: DataSection | None, advance: Advance) -> Any:
        options = self.options
        return recall_accuracy(
            model,
            tokenizer,
            lengths=options.lengths or RECALL_LENGTHS,
            samples=options.limit or RECALL_SAMPLES,
            seed=options.seed,
            haystack=options.haystack,
            on_progress=advance,
        )

    def ruler(self, model: Any, tokenizer: Any, data: DataSection | None, advance: Advance) -> Any:
        from lolcats.evaluation.lm_eval_run import lm_eval_set_up, run_tasks  # needs lm-eval
        from lolcats.evaluation.ruler import ruler_tasks

        options = self.options
        with lm_eval_set_up():
            tasks = ruler_tasks(
                tokenizer,
                lengths=options.lengths or RECALL_LENGTHS,
                samples=options.limit or RECALL_SAMPLES,
                seed=options.seed,
                haystack=options.haystack,
            )
        named = {task.task_name: task for task in tasks.values()}
        found = run_tasks(
            model, tokenizer, named, seed=options.seed, batch_size=options.decode_batch, on_progress=advance
        )
        rows = []
        for (kind, length), task in tasks.items():
            measured = found[task.task_name]
            numbers = {"accuracy": measured["value"], "stderr": measured["stderr"], "samples": measured["questions"]}
            rows.append({"kind": kind, "length": length, **numbers})
        return rows

    def passkey(self, model: Any, tokenizer: Any, data: DataSection | None, advance: Advance) -> Any:
        return passkey_accuracy(
            model,
            tokenizer,
            lengths=self.options.lengths or LENGTHS,
            per_decile=self.options.per_decile,
            seed=self.options.seed,
            batch_size=self.options.decode_batch,
            on_progress=advance,
        )

    def generation(self, model: Any, tokenizer: Any, data: DataSection | None, advance: Advance) -> Any:
        options, vocabulary = self.options, tokenizer_hash(tokenizer)
        if self.teacher is None:
            self.vocabulary = vocabulary
            data = data or DataSection.model_validate({"sources": [{"path": "demo"}]})
            self.prompts = agreement.generation_prompts(data, tokenizer, options.limit or 64)
        if self.vocabulary != vocabulary:
            raise UserError(
                "the models have different tokenizers, so that their tokens cannot be compared; evaluate generation of"
                " one family at a time"
            )
        result, generated = agreement.generation_quality(
            model,
            tokenizer,
            self.prompts,
            teacher=self.teacher,
            spans=options.spans,
            batch_size=options.decode_batch,
            on_progress=advance,
        )
        if self.teacher is None:
            self.teacher = generated
        return result

    def esl(self, model: Any, tokenizer: Any, data: DataSection | None, advance: Advance) -> Any:
        assert data is not None  # see check
        if self.options.limit is not None:
            data = data.model_copy(update={"validation_sequences": self.options.limit})
        dataset = build_evaluation_dataset(data, tokenizer)
        lengths = dataset_lengths(dataset, model, batch_size=self.options.decode_batch, on_progress=advance)
        described = {"sequence_length": data.sequence_length, "begin_token": data.begin_token}
        return described | distribution(lengths)


def _settings(options: EvalOptions) -> dict[str, Any]:
    settings = asdict(options) | {"data": options.data and options.data.model_dump(mode="json")}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in settings.items()}


def _provenance(options: EvalOptions) -> dict[str, Any]:
    found = provenance()
    if options.lm_eval_tasks or "ruler" in options.tasks:
        found["versions"]["lm-eval"] = importlib.metadata.version("lm-eval")
        if options.data_dir is not None and options.lm_eval_tasks:
            found["data_sha256"] = data_hashes(options.data_dir, options.lm_eval_tasks)
    return found


def _weights_modified(path: str) -> str | None:
    """When the newest weights in a model's folder were written; None of a hub id."""
    folder = Path(path).expanduser()
    patterns = ("*.safetensors", "*.gguf")
    times = [file.stat().st_mtime for pattern in patterns for file in folder.glob(pattern)]
    return datetime.fromtimestamp(max(times), timezone.utc).isoformat() if times else None
