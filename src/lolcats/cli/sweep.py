"""`lolcats sweep`: a grid of runs from one YAML file, and one table of their results."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Annotated, Any

import typer
from pydantic import ConfigDict

from lolcats.cli.console import notes, results
from lolcats.cli.options import Overrides, Sources, parse_source
from lolcats.config import Section, parse_override, read_yaml, validated
from lolcats.errors import Terminated, UserError
from lolcats.recipes import find_file
from lolcats.report import REPORT_FILE, read_optional, table, write_text

FOLDER = Path(__file__).parents[1] / "sweeps"


class SweepFile(Section):
    """What `docs/paper.md` shows: the rows are the grid of `axes` and `seeds`."""

    model_config = Section.model_config | ConfigDict(coerce_numbers_to_str=True)

    recipe: str
    set: dict[str, Any] = {}
    axes: dict[str, list[Any] | dict[str, dict[str, Any]]] = {}
    seeds: list[int] = [0]
    paths: dict[str, str | None] = {}
    held_out: dict[str, dict[str, Any]] = {}
    perplexity: dict[str, Any] = {}
    evaluate: dict[str, Any] = {}


def sweep(
    file: Annotated[str, typer.Argument(help="A YAML file, or the name of one of the package's.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the runs and results.")] = Path("sweep"),
    model: Annotated[str | None, typer.Option(help="Hub id or folder, in place of the recipe's.")] = None,
    data: Sources = None,
    path: Annotated[list[str] | None, typer.Option(metavar="NAME=PATH", help="A path that the file names.")] = None,
    overrides: Overrides = None,
) -> None:
    """Run every combination of a file's axes and seeds, a process each and one a GPU at a time; print their table.

    Finished rows are skipped. One that fails is a row with its log, and the next call tries it again.
    """
    fixed: dict[str, Any] = {"model.path": model} if model else {}
    fixed |= {"data.sources": [parse_source(text) for text in data]} if data else {}
    fixed |= dict(map(parse_override, overrides or []))
    spec = read_sweep(find_file("sweep", FOLDER, file), dict(text.partition("=")[::2] for text in path or []))
    rows = run_rows(spec, expand(spec, fixed), output)
    write_text(output / "results.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    columns, lines = list(dict.fromkeys(name for row in rows for name in numbers_of(row))), []
    for case, group in itertools.groupby(rows, lambda row: row["case"]):
        found = [numbers_of(row) for row in group]
        cells = [_mean([numbers[name] for numbers in found if name in numbers]) for name in columns]
        lines.append([*case.values(), sum(map(bool, found)), *cells])
    results().print(table("Mean ± deviation over seeds", [*case, "seeds", *columns], lines, names=len(case)))
    failed = [f"[red]failed[/]: {row['run']}, see {row['log']}" for row in rows if row["status"] == "failed"]
    notes().print(*failed, sep="\n", end="\n" * bool(failed), highlight=False, soft_wrap=True)
    raise typer.Exit(bool(failed))


def read_sweep(file: Path, paths: dict[str, str]) -> dict[str, Any]:
    """The file, with every "{name}" of its `paths` replaced."""
    spec = validated(SweepFile, read_yaml(file)).model_dump()
    if unknown := paths.keys() - spec["paths"].keys():
        raise UserError(f"--path {min(unknown)}: the paths of {file} are {', '.join(spec['paths']) or 'none'}")
    text = json.dumps(spec)
    for name, value in (spec["paths"] | paths).items():
        if value is None and f"{{{name}}}" in text:
            raise UserError(f"{file} needs the path of {name!r}: give --path {name}=FILE")
        text = text.replace(f"{{{name}}}", json.dumps(value)[1:-1])
    return json.loads(text)


def expand(spec: dict[str, Any], fixed: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows with the words of their `lolcats linearize`; `fixed` fields win over the file's.

    An axis is a field with a list of values, or a name with labelled fields, of which `recipe` replaces the file's.
    """
    axes = {a: v if isinstance(v, dict) else {str(x): {a: x} for x in v} for a, v in spec["axes"].items()}
    for axis, values in ({"seed": {"": {"seed": 0}}} | axes).items():
        if (varied := set().union(*values.values())) and varied <= fixed.keys():
            raise UserError(f"the rows of this sweep differ in {axis}: change it in the file")
    rows = []
    for labels, seed in itertools.product(itertools.product(*axes.values()), spec["seeds"]):
        fields, case = dict(spec["set"]), dict(zip(axes, labels, strict=True))
        for axis, label in case.items():
            fields |= axes[axis][label]
        words = ["linearize", "--recipe", fields.pop("recipe", spec["recipe"])]
        words += [x for f, v in (fields | fixed | {"seed": seed}).items() for x in ("--set", f"{f}={json.dumps(v)}")]
        name = "-".join([*(re.sub(r"[^A-Za-z0-9.]+", "_", label).strip("_") for label in labels), f"seed{seed}"])
        rows.append({"run": name, "case": case, "seed": seed, "words": words})
    if len({row["run"] for row in rows}) < len(rows):
        raise UserError("two rows have the same name; give their labels different letters")
    return rows


def run_rows(spec: dict[str, Any], rows: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Run what is not finished, and return all rows with their results."""
    import torch

    gpus: Queue[str] = Queue()
    for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count())))).split(","):
        gpus.put(gpu)  # one, called "", if there are none

    def run(row: dict[str, Any]) -> dict[str, Any]:
        out, log, done = (folder / f"{row['run']}{suffix}" for suffix in ("", ".log", ".json"))
        commands = [[*row["words"], "-o", str(out), "--resume"]]
        for name, source in spec["held_out"].items():
            text = ",".join([source["path"], *(f"{key}={value}" for key, value in source.items() if key != "path")])
            options = {"tasks": "perplexity"} | spec["perplexity"] | {"data": text, "output": out / f"{name}.json"}
            commands.append(["eval", str(out), *_words(options)])
        if spec["evaluate"]:
            commands.append(["eval", str(out), *_words(spec["evaluate"] | {"output": out / "eval.json"})])
        if (finished := read_optional(done)) and finished["commands"] == commands:
            return finished
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": gpus.get()}
        try:
            with log.open("a", encoding="utf-8") as stream:
                where: dict[str, Any] = {"env": environment, "stdout": stream, "stderr": stream}
                lines = ([sys.executable, "-m", "lolcats", *words] for words in commands)
                failed = any(ended.is_set() or _call(line, running, **where) for line in lines)
        finally:
            gpus.put(environment["CUDA_VISIBLE_DEVICES"])
        if failed:
            return row | {"status": "failed", "log": str(log)}
        result = row | {"status": "finished", "commands": commands} | (read_optional(out / REPORT_FILE) or {})
        files = {name: out / f"{name}.json" for name in (*spec["held_out"], *(["eval"] if spec["evaluate"] else []))}
        found = {name: read_optional(file)["models"][-1] for name, file in files.items()}
        result["held_out"] = {name: found[name]["perplexity"]["perplexity"] for name in spec["held_out"]}
        result["evaluation"] = found.get("eval", {})
        write_text(done, json.dumps(result))
        return result

    running: list[subprocess.Popen[bytes]] = []
    ended = threading.Event()

    def stop(number: int, *_: object) -> None:
        ended.set()
        if number == signal.SIGINT:  # which the terminal gave the runs, too: they end with a checkpoint
            raise KeyboardInterrupt("the same command continues")
        for process in running:
            process.terminate()
        raise Terminated("the same command continues")

    folder.mkdir(parents=True, exist_ok=True)
    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with ThreadPoolExecutor(gpus.qsize()) as pool:
            return list(pool.map(run, rows))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _call(line: list[str], running: list[subprocess.Popen[bytes]], **options: Any) -> int:
    process = subprocess.Popen(line, **options)
    running.append(process)
    return process.wait()


def numbers_of(row: dict[str, Any]) -> dict[str, float]:
    """The numbers of a row by column of the table; none of a failed one."""
    found = {f"perplexity {step}": value for step, value in row.get("perplexity", {}).items()}
    found |= {f"perplexity on {name}": value for name, value in row.get("held_out", {}).items()}
    measured = row.get("evaluation", {})
    for cell in [cell for name in ("passkey", "recall", "ruler") for cell in measured.get(name, [])]:
        found[f"{cell.get('kind', 'passkey')} {cell['length']}"] = cell["accuracy"]
    found |= {name: cell["value"] for part in ("tasks", "averages") for name, cell in measured.get(part, {}).items()}
    return {name: value for name, value in found.items() if value is not None}


def _words(options: dict[str, Any]) -> list[str]:
    """Options of a command; true is a flag."""
    pairs = ((f"--{key.replace('_', '-')}", () if value is True else (str(value),)) for key, value in options.items())
    return [word for name, values in pairs for word in (name, *values)]


def _mean(values: list[float]) -> str:
    spread = f"\u00a0±\u00a0{statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.3f}{spread}" if values else ""
