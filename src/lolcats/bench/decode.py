"""Decoding speed and memory of a linearized model, against its softmax original and the device's floor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from lolcats.bench.decode_latency import endurance, latency
from lolcats.bench.decode_prefill import prefill
from lolcats.bench.decode_session import SECTIONS, DecodeBench, Session, describe
from lolcats.bench.decode_throughput import softmax, throughput
from lolcats.bench.models import check_shape
from lolcats.bench.timing import ceilings, free
from lolcats.errors import UserError
from lolcats.provenance import provenance

RUN: dict[str, Callable[[Session], None]] = {
    "throughput": throughput,
    "softmax": softmax,
    "latency": latency,
    "prefill": prefill,
    "endurance": endurance,
}
NOTES = {
    "weights": "random, of the named shape; times do not depend on their values",
    "throughput": "real prompts are read; steps are greedy, tokens stay on the device; step_ms is the mean over whole"
    " blocks; names that end in _extrapolated take it for every step of the run; run_s is a whole run by the clock",
    "softmax": "transformers' model, SDPA, DynamicCache, eager; step_ms is integrated over the run from steps timed"
    " at the contexts in step_ms_at_context, whose caches hold random values; it does not include prompts",
    "latency": "position_set: nothing was generated up to the position. The linearized model's states, after a real"
    " prompt and a full window, were told that they are there; the softmax caches hold random values",
    "endurance": "every token is generated; chunk times are by the clock and include one look at the device a chunk",
    "floor": "bytes and FLOPs of a step, counted from the shapes, at the measured ceilings; the larger time of both",
}


def run(
    bench: DecodeBench, console: Console, keep: Callable[[dict[str, Any]], object] = lambda report: None
) -> dict[str, Any]:
    """Measure section after section; what cannot run says why.

    Args:
        keep: gets the report after every row, so that an interrupted run loses nothing.
    """
    _check(bench)
    session = Session(bench, console, keep)
    settings = asdict(bench)
    session.limits = ceilings(session.device)
    free(session.device)
    session.say(f"copy {session.limits['copy_tb_s']:.2f} TB/s, matmul {session.limits['matmul_tflop_s']:.0f} TFLOP/s")
    session.report |= {
        "settings": settings,
        "ceilings": session.limits,
        "provenance": provenance(),
        "notes": NOTES,
        "sections": {},
    }
    keep(session.report)  # a file that cannot be written shows now
    if set(bench.sections) != {"endurance"}:
        session.model(bench.model)  # apart from the sections' time
    for name in bench.sections:
        began_s = session.elapsed_s
        section: dict[str, Any] = {"rows": session.begin_section(name)}
        session.report["sections"][name] = section
        try:
            RUN[name](session)
        except Exception as error:  # the other sections are still worth something
            section["error"] = describe(error)
            session.say(f"{name}: {section['error']}")
        section["seconds"] = session.elapsed_s - began_s
        free(session.device)
        keep(session.report)
    session.report["seconds"] = session.elapsed_s
    keep(session.report)
    return session.report


def _check(bench: DecodeBench) -> None:
    check_shape(bench.model)
    check_shape(bench.endurance_model)
    unknown = [name for name in bench.sections if name not in SECTIONS]
    if unknown:
        raise UserError(f"no section named {unknown[0]!r}; there are {', '.join(SECTIONS)}")
    if bench.attention.keep_softmax:
        raise UserError("keep_softmax: decoding is measured with all layers linear; leave it empty")
    numbers = (*bench.batches, *bench.softmax_batches, *bench.positions, *bench.prefill_lengths)
    if min((bench.prompt_tokens, bench.prefill_chunk, bench.blocks, bench.softmax_steps, *numbers)) < 1:
        raise UserError("batch sizes, lengths, positions and numbers of tokens must be at least 1")
    if bench.new_tokens < bench.softmax_steps + 2:
        raise UserError(f"new_tokens={bench.new_tokens}: expected at least {bench.softmax_steps + 2}")
    if bench.full_run_batch and bench.full_run_batch not in bench.batches:
        raise UserError(f"full_run_batch={bench.full_run_batch} is not one of the batch sizes {list(bench.batches)}")


def print_table(report: dict[str, Any], console: Console) -> None:
    """One table a section."""
    settings = report["settings"]
    where = f"{settings['model']}, {settings['dtype']}, {report['provenance']['device']}"
    run_of = f"{settings['prompt_tokens']} + {settings['new_tokens']} tokens"
    sections = report["sections"]
    rows = [row for name in ("throughput", "softmax") for row in sections.get(name, {}).get("rows", [])]
    columns: dict[str, tuple[str, str]] = {
        "tokens/s": ("tokens_per_s", ",.0f"),
        "ms/step": ("step_ms", ".2f"),
        "floor ms": ("floor_ms", ".2f"),
        "peak GiB": ("peak_gib", ".1f"),
        "state MiB": ("state_mib_per_sequence", ".2f"),
        "prefill tokens/s": ("prefill_tokens_per_s", ",.0f"),
        "run s (extrapolated)": ("run_s_extrapolated", ".1f"),
        "run s (measured)": ("run_s", ".1f"),
    }
    _print(console, f"throughput, {run_of}, {where}", "batch", rows, columns)
    columns = {
        "ms/token": ("step_ms", ".3f"),
        "median": ("step_ms_median", ".3f"),
        "p90": ("step_ms_p90", ".3f"),
        "state or cache MiB": ("state_mib", ",.1f"),
        "peak GiB": ("peak_gib", ".1f"),
    }
    _print(console, f"latency, one sequence, {where}", "position", sections.get("latency", {}).get("rows", []), columns)
    columns = {
        "seconds": ("seconds", ".3f"),
        "tokens/s": ("tokens_per_s", ",.0f"),
        "peak GiB": ("peak_gib", ".1f"),
    }
    _print(console, f"prefill, one sequence, {where}", "tokens", sections.get("prefill", {}).get("rows", []), columns)
    columns = {
        "model": ("model", "s"),
        "first ms/token": ("first_chunk_ms", ".3f"),
        "last ms/token": ("last_chunk_ms", ".3f"),
        "allocated bytes first": ("allocated_bytes_first", ",d"),
        "last": ("allocated_bytes_last", ",d"),
        "finite": ("finite", ""),
    }
    _print(console, "endurance, one sequence", "tokens", sections.get("endurance", {}).get("rows", []), columns)
    for name, section in sections.items():
        if "error" in section:
            console.print(f"{name}: {section['error']}", highlight=False, markup=False)


def _print(
    console: Console, title: str, key: str, rows: list[dict[str, Any]], columns: dict[str, tuple[str, str]]
) -> None:
    """Columns that no row has are left out."""
    if not rows:
        return
    shown = {head: entry for head, entry in columns.items() if any(row.get(entry[0]) is not None for row in rows)}
    notes = ["note"] if any("error" in row for row in rows) else []
    table = Table("system", key, *shown, *notes, title=title)
    for row in rows:
        values = (row.get(name) for name, _ in shown.values())
        forms = (form for _, form in shown.values())
        cells = ["-" if value is None else format(value, form) for value, form in zip(values, forms, strict=True)]
        table.add_row(row["system"], f"{row[key]:,}", *cells, *(row.get("error", "") for _ in notes))
    console.print(table)
