"""One run of a sweep, from nothing to the row with its numbers."""

from __future__ import annotations

import gc
import shutil
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from lolcats.analysis.files import EVALUATION_FILE, write_json, write_text
from lolcats.config import DataSection
from lolcats.evaluation.load import load_model, set_attention
from lolcats.evaluation.perplexity import perplexity
from lolcats.evaluation.suite import EvalOptions, evaluate_models, expand_tasks
from lolcats.pipeline import linearize
from lolcats.provenance import provenance
from lolcats.report import read_report
from lolcats.sweep.spec import Evaluate, Run, Sweep
from lolcats.training.durable_files import read_json
from lolcats.training.durable_files import write_json as write_checkpoint_json

Execute = Callable[[Run, Path, Console], dict[str, Any]]
_BEFORE_ADJUSTING = ("teacher", "swapped", "transfer")
_STAGE_NUMBERS = ("steps", "tokens", "seconds", "peak_memory_gib", "best_step", "layer_losses_before", "layer_losses")


@dataclass(frozen=True)
class Task:
    """A run, the sweep that it belongs to, and its place.

    Attributes:
        folder: of the sweep; the run has a folder of its own in it.
        drop_weights: delete the run's weights, and its checkpoints of stage 2, when all is measured.
    """

    sweep: Sweep
    run: Run
    folder: Path
    drop_weights: bool = False

    @property
    def output(self) -> Path:
        return self.folder / self.run.name


def execute_run(task: Task, donor: Path | None, console: Console, execute: Execute | None = None) -> dict[str, Any]:
    """Linearize, measure, and return the row, whether the run finished or failed.

    Args:
        donor: folder of a run with the same stage 1, which has ended; None: train it.
        execute: runs one run and returns its report; None: `linearize`.
    """
    run, output = task.run, task.output
    try:
        if donor is not None:
            _copy_transfer(donor / "run", output / "run")
            console.print(f"stage 1 comes from {donor}, which has the same settings")
        report = (execute or _linearize)(run, output, console)
        measured = _measure(task, console)
        (output / "error.txt").unlink(missing_ok=True)
        if task.drop_weights:
            _drop_weights(output)
        return _row(run) | {
            "status": "finished",
            "perplexity": report["perplexity"],
            **measured,
            "stages": {name: _stage(stage) for name, stage in report["stages"].items()},
            "transfer_from": None if donor is None else donor.name,
            "provenance": report.get("provenance") or provenance(),
        }
    except Exception as error:  # one run's failure must not end the others
        console.print(f"[bold red]failed:[/] {type(error).__name__}", highlight=False)
        console.print(str(error), markup=False)
        return failure(run, output, f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)))
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def failure(run: Run, output: Path, error: str, details: str) -> dict[str, Any]:
    """The row of a run that failed, with `details` in its folder's error.txt."""
    write_text(output / "error.txt", details)
    return _row(run) | {"status": "failed", "error": error}


def _row(run: Run) -> dict[str, Any]:
    return {"run": run.name, "case": run.case, "seed": run.seed, "key": run.key}


def has_transfer(output: Path) -> bool:
    """Whether the run in this folder has ended its stage 1; it may still be in stage 2."""
    return (output / "run" / "transfer" / "done.json").is_file()


def _copy_transfer(source: Path, target: Path) -> None:
    """Take over a finished stage 1. It carries its fingerprint, which `linearize` checks."""
    copy = target.with_name(".run-copy")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(source / "transfer", copy / "transfer")
    measured = read_json(source / "perplexity.json")
    before = {name: value for name, value in measured.items() if name in _BEFORE_ADJUSTING}
    write_checkpoint_json(copy / "perplexity.json", before, what="the measured numbers")
    copy.rename(target)


def _linearize(run: Run, output: Path, console: Console) -> dict[str, Any]:
    return linearize(run.config, output, resume=True, console=console)


def _stage(stage: dict[str, Any]) -> dict[str, Any]:
    """The part of a stage's report that tables and figures need."""
    curve = [[entry["step"], entry["perplexity"]] for entry in stage.get("curve", []) if "perplexity" in entry]
    return {name: stage[name] for name in _STAGE_NUMBERS if name in stage} | {"curve": curve}


def _measure(task: Task, console: Console) -> dict[str, Any]:
    """Perplexities on held-out texts, and evaluations, as parts of the row."""
    sweep, run, output = task.sweep, task.run, task.output
    found: dict[str, Any] = {"held_out": {}, "held_out_how": sweep.held_out_how()}
    if not sweep.held_out and sweep.evaluate is None:
        return found
    model, tokenizer = _load(run, output)
    for name, source in sweep.held_out.items():
        data = DataSection(
            sources=[source],
            sequence_length=sweep.held_out_length or run.config.data.sequence_length,
            loss_on=run.config.data.loss_on,
            begin_token=run.config.data.begin_token,
            validation_sequences=sweep.held_out_sequences,
        )
        measured = perplexity(model, tokenizer, data, batch_size=run.config.adjust.micro_batch_size)
        found["held_out"][name] = measured["perplexity"]
    if sweep.evaluate is not None:
        console.print(f"evaluating {sweep.evaluate.tasks}")
        given = sweep.evaluate
        set_attention(
            model, sparse_cache=given.sparse_cache, cache_by=given.cache_by, linear_length_cap=given.linear_length_cap
        )
        report = evaluate_models([str(output)], lambda _: (model, tokenizer), eval_options(sweep.evaluate))
        write_json(output / EVALUATION_FILE, report)
        kept = ("tasks", "averages", "passkey")
        found["evaluate"] = sweep.evaluate.how()
        found["evaluation"] = {name: value for name, value in report["models"][0].items() if name in kept}
    return found


def eval_options(section: Evaluate) -> EvalOptions:
    return EvalOptions(
        tasks=expand_tasks(section.tasks),
        data_dir=section.data_dir,
        limit=section.limit,
        lengths=tuple(section.lengths),
        per_decile=section.per_decile,
    )


def _load(run: Run, output: Path) -> tuple[Any, Any]:
    section = run.config.model
    return load_model(output, dtype=section.dtype, device=section.device, trust_remote_code=section.trust_remote_code)


def _drop_weights(output: Path) -> None:
    """Delete what is large and was written by this run; reports and stage 1, which others may share, stay."""
    assert read_report(output) is not None
    for file in output.glob("model*.safetensors"):
        file.unlink()
    shutil.rmtree(output / "run" / "adjust", ignore_errors=True)
