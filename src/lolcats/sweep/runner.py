"""Running a sweep: what is finished is skipped, what fails is recorded, what runs share is done once."""

from __future__ import annotations

import gc
import shutil
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from lolcats.analysis.files import read_report
from lolcats.analysis.files import write_text
from lolcats.config import DataSection
from lolcats.errors import UserError
from lolcats.evaluation.load import load_model
from lolcats.evaluation.perplexity import perplexity
from lolcats.modeling.model import LolcatsForCausalLM
from lolcats.pipeline import linearize
from lolcats.provenance import provenance
from lolcats.sweep.results import read_rows
from lolcats.sweep.results import rich_table
from lolcats.sweep.results import summarise
from lolcats.sweep.results import write_row
from lolcats.sweep.results import write_tables
from lolcats.sweep.spec import Run
from lolcats.sweep.spec import Sweep
from lolcats.training.checkpoint import read_json
from lolcats.training.checkpoint import write_json

Execute = Callable[[Run, Path, Console], dict[str, Any]]
_BEFORE_ADJUSTING = ("teacher", "swapped", "transfer")


def run_sweep(
    sweep: Sweep,
    runs: list[Run],
    folder: Path,
    *,
    drop_weights: bool = False,
    console: Console | None = None,
    execute: Execute | None = None,
) -> list[dict[str, Any]]:
    """Run what is not finished yet and write `results.jsonl`, `table.json` and `table.md` into `folder`.

    Every run is a folder of its own, an output folder of `linearize`. A run that was killed goes on where it
    was; one that failed before is tried again. Packed data is shared through the data cache, and a stage 1
    that an earlier run of the sweep has trained with the same settings and seed is taken from it.

    Args:
        drop_weights: delete a run's weights, and its checkpoints of stage 2, once its row is written.
        execute: runs one run and returns its report; None: `linearize`.

    Returns:
        The table's entries; see `summarise`.

    Raises:
        UserError: `folder` holds runs of the same names with other settings. A run's own failure is recorded
            instead.
    """
    console = console or Console(stderr=True)
    rows = {row["run"]: row for row in read_rows(folder)}
    _check_settings(runs, rows, folder)
    for number, run in enumerate(runs, 1):
        if rows.get(run.name, {}).get("status") == "finished":
            console.print(f"run {number} of {len(runs)}, {run.name}: finished before")
            continue
        console.rule(f"run {number} of {len(runs)}: {run.name}")
        row = _one(sweep, run, runs, rows, folder, execute or _linearize, console)
        rows[run.name] = row
        write_row(folder, row)
        if drop_weights and row["status"] == "finished":
            _drop_weights(folder / run.name)
        _table(runs, folder)
    entries = _table(runs, folder)
    console.print(rich_table(entries, f"{folder}: mean ± standard deviation over seeds"))
    failed = [row["run"] for row in rows.values() if row["status"] == "failed"]
    if failed:
        console.print(f"failed: {', '.join(failed)}; see error.txt in their folders. The same command tries them again")
    return entries


def _table(runs: list[Run], folder: Path) -> list[dict[str, Any]]:
    order: list[dict[str, str]] = []
    for run in runs:
        if run.case not in order:
            order.append(run.case)
    names = {run.name for run in runs}
    entries = summarise([row for row in read_rows(folder) if row["run"] in names], folder, order)
    write_tables(folder, entries)
    return entries


def _check_settings(runs: list[Run], rows: dict[str, dict[str, Any]], folder: Path) -> None:
    for run in runs:
        row = rows.get(run.name)
        if row is not None and row["status"] == "finished" and row["key"] != run.key:
            raise UserError(
                f"{folder} holds a finished run {run.name} with other settings; choose another --output for the changed"
                f" sweep, or move {folder / run.name} away and delete its line in results.jsonl"
            )


def _one(
    sweep: Sweep,
    run: Run,
    runs: list[Run],
    rows: dict[str, dict[str, Any]],
    folder: Path,
    execute: Execute,
    console: Console,
) -> dict[str, Any]:
    """Run one run; its row, whether it finished or failed."""
    output = folder / run.name
    row: dict[str, Any] = {"run": run.name, "case": run.case, "seed": run.seed, "key": run.key}
    try:
        donor = _share_transfer(run, runs, rows, folder)
        if donor is not None:
            console.print(f"stage 1 comes from {donor}, which has the same settings")
        report = execute(run, output, console)
        held_out = _held_out(sweep, run, output)
        (output / "error.txt").unlink(missing_ok=True)
        return row | {
            "status": "finished",
            "perplexity": report["perplexity"],
            "held_out": held_out,
            "stages": {
                name: {key: stage[key] for key in ("steps", "tokens", "seconds", "peak_memory_gib", "best_step")}
                for name, stage in report["stages"].items()
            },
            "transfer_from": donor,
            "provenance": report.get("provenance") or provenance(),
        }
    except Exception as error:  # one run's failure must not end the others
        console.print(f"[bold red]failed:[/] {type(error).__name__}", highlight=False)
        console.print(str(error), markup=False)
        write_text(output / "error.txt", "".join(traceback.format_exception(error)))
        return row | {"status": "failed", "error": f"{type(error).__name__}: {error}"}
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _linearize(run: Run, output: Path, console: Console) -> dict[str, Any]:
    return linearize(run.config, output, resume=True, console=console)


def _share_transfer(run: Run, runs: list[Run], rows: dict[str, dict[str, Any]], folder: Path) -> str | None:
    """Copy stage 1 from a finished run that trained the same one; its name, or None.

    What is copied carries its own fingerprint, which `linearize` checks when it takes it over.
    """
    target = folder / run.name / "run"
    if run.transfer_key is None or target.exists():
        return None
    for other in runs:
        source = folder / other.name / "run"
        same = other.name != run.name and other.transfer_key == run.transfer_key
        if not same or rows.get(other.name, {}).get("status") != "finished":
            continue
        if not (source / "transfer" / "done.json").is_file():
            continue
        copy = target.with_name(".run-copy")
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(source / "transfer", copy / "transfer")
        measured = read_json(source / "perplexity.json")
        kept = {name: value for name, value in measured.items() if name in _BEFORE_ADJUSTING}
        write_json(copy / "perplexity.json", kept)
        copy.rename(target)
        return other.name
    return None


def _held_out(sweep: Sweep, run: Run, output: Path) -> dict[str, float]:
    if not sweep.held_out:
        return {}
    section = run.config.model
    model, tokenizer = load_model(
        output, dtype=section.dtype, device=section.device, trust_remote_code=section.trust_remote_code
    )
    if run.config.adjust.softmax_control:
        assert isinstance(model, LolcatsForCausalLM)
        model.set_attention_mode("softmax")  # as it was trained and measured
    result = {}
    for name, source in sweep.held_out.items():
        data = DataSection(
            sources=[source],
            sequence_length=run.config.data.sequence_length,
            loss_on=run.config.data.loss_on,
            validation_sequences=sweep.held_out_sequences,
        )
        measured = perplexity(model, tokenizer, data, batch_size=run.config.adjust.micro_batch_size)
        result[name] = measured["perplexity"]
    return result


def _drop_weights(output: Path) -> None:
    """Delete what is large and was written by this run; reports and stage 1, which others may share, stay."""
    assert read_report(output) is not None
    for file in output.glob("model*.safetensors"):
        file.unlink()
    shutil.rmtree(output / "run" / "adjust", ignore_errors=True)
