"""Everything that docs/results.md shows for SmolLM2-135M-Instruct: the sweeps, the teacher, the figures' numbers.

    python benchmarks/results_smollm2.py --data-dir DATA --model FOLDER --work /tmp/work --output OUT --workers 4

DATA holds the paper's tasks as `lolcats eval --data-dir` reads them, and train/{alpaca_original,openstax_ccby,
books_pd}.jsonl.gz. Runs and weights stay in --work; --output gets `rows.jsonl` (a line per run) and `steps.json`
(the rest), which benchmarks/results_page.py turns into the page. The same command goes on where it was stopped.
On another machine, `--done FOLDER` takes what an earlier --output holds, if --model, --work and --data-dir have the
same paths as then.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from lolcats.analysis.files import write_json, write_text
from lolcats.config import ModelSection, read_yaml
from lolcats.conversion import load_base_model
from lolcats.sweep.results import RESULTS_FILE, read_rows
from lolcats.sweep.runner import Plan, run_sweeps
from lolcats.sweep.spec import Evaluate, read_sweep
from lolcats.sweep.workers import visible_gpus
from lolcats.sweeps import sweep_path

ZERO_SHOT = "piqa,arc_easy,arc_challenge,hellaswag,winogrande"
ANALYSED = ("LoLCATs-seed0", "Hedgehog-seed0")  # runs of the main comparison whose insides are looked at
STEP_MINUTES = 8.0  # at most, for one of `later_steps`
ROWS_FILE, STEPS_FILE = "rows.jsonl", "steps.json"


@dataclass(frozen=True)
class Part:
    """A sweep, or some seeds of it.

    Attributes:
        tasks: lm-eval tasks for its models; None: as the sweep file says.
    """

    sweep: str
    seeds: tuple[int, ...] = (0,)
    tasks: str | None = ZERO_SHOT

    @property
    def name(self) -> str:
        return self.sweep if 0 in self.seeds else f"{self.sweep}-{'-'.join(map(str, self.seeds))}"


PARTS = (  # the most important first
    Part("main", tasks="paper"),
    Part("components", tasks="paper"),
    Part("windows"),
    Part("transfer-steps"),
    Part("lora-rank"),
    Part("data"),
    Part("softmax-layers"),
    Part("passkey", tasks=None),
    Part("lora-projections"),
    Part("blocks", tasks=None),
    Part("main", seeds=(1, 2), tasks="paper"),  # Hedgehog and SUPRA take 6 and 10 minutes a run
)


def make_plans(arguments: argparse.Namespace, model: str) -> dict[str, Plan]:
    """Part -> what to run, of the sweeps asked for, in the order of `PARTS`."""
    train = Path(arguments.data_dir) / "train"
    sources = {
        "instructions": str(train / "alpaca_original.jsonl.gz"),
        "textbooks": str(train / "openstax_ccby.jsonl.gz"),
        "books": str(train / "books_pd.jsonl.gz"),
        "text": str(train / "openstax_ccby.jsonl.gz"),
    }
    plans = {}
    for part in PARTS:
        if part.sweep not in arguments.sweeps:
            continue
        file = sweep_path(part.sweep)
        named = read_sweep_paths(file)
        evaluate = None
        if part.tasks is not None and not arguments.no_tasks:
            evaluate = Evaluate(tasks=part.tasks, data_dir=arguments.data_dir)
        sweep, runs = read_sweep(
            file,
            model=model,
            data=None if "instructions" in named else [{"path": sources["instructions"]}],
            paths={name: sources[name] for name in named},
            overrides=arguments.set,
            seeds=list(part.seeds),
            evaluate=evaluate,
        )
        keep = frozenset(ANALYSED if part.name == "main" else ())
        plans[part.name] = Plan(sweep, runs, Path(arguments.work) / part.name, drop_weights=True, keep=keep)
    return plans


def read_sweep_paths(file: Path) -> list[str]:
    """Names of the paths that a sweep file wants."""
    return list(read_yaml(file).get("paths", {}))


def teacher_folder(arguments: argparse.Namespace) -> str:
    """The model as a folder that loads fast: weights in a GGUF file are dequantised once."""
    if arguments.gguf_file is None:
        return str(arguments.model)
    folder = Path(arguments.work) / "teacher"
    if not (folder / "config.json").is_file():
        section = ModelSection(path=arguments.model, gguf_file=arguments.gguf_file, dtype="float32", device="cpu")
        model, tokenizer = load_base_model(section)
        model.save_pretrained(folder.with_name("teacher-unfinished"))
        tokenizer.save_pretrained(folder.with_name("teacher-unfinished"))
        folder.with_name("teacher-unfinished").rename(folder)
    return str(folder)


def first_steps(arguments: argparse.Namespace, model: str) -> dict[str, list[str]]:
    """What needs no trained model, as arguments of `lolcats` without the output file; runs beside the sweeps."""
    train = Path(arguments.data_dir) / "train"
    tasks = ["eval", model, "--tasks"]
    esl = [*tasks, "esl", "--limit", "400", "--data"]
    steps = {
        "teacher": [*tasks, "paper,passkey", "--data-dir", arguments.data_dir, "--lengths", "2048,8192"],
        "esl instructions": [*esl, str(train / "alpaca_original.jsonl.gz")],
        "esl textbooks": [*esl, str(train / "openstax_ccby.jsonl.gz")],
        "esl books": [*esl, str(train / "books_pd.jsonl.gz")],
    }
    return {name: command for name, command in steps.items() if not (arguments.no_tasks and name == "teacher")}


def later_steps(arguments: argparse.Namespace, model: str) -> dict[str, list[str]]:
    """What looks into trained models; those that exist."""
    alpaca = f"{Path(arguments.data_dir) / 'train' / 'alpaca_original.jsonl.gz'},max_rows=200"
    main = Path(arguments.work) / "main"
    steps = {
        f"analysis {name}": ["analyse", str(main / name), "--data", alpaca]
        for name in ANALYSED
        if (main / name / "model.safetensors").is_file()
    }
    if "analysis LoLCATs-seed0" in steps:
        compared = [model, *(str(main / name) for name in ANALYSED if f"analysis {name}" in steps)]
        steps["generation"] = ["eval", *compared, "--tasks", "generation", "--data", alpaca, "--limit", "64"]
    return steps


def run_step(name: str, command: list[str], gpu: str | None, arguments: argparse.Namespace, until: float) -> None:
    """Run a `lolcats` command into a JSON file of --work/steps; a failure is printed and tried again next time.

    Args:
        until: on `time.monotonic`; the command is ended then, and after STEP_MINUTES at the latest.
    """
    file = Path(arguments.work) / "steps" / f"{name}.json"
    begun = time.monotonic()
    if file.is_file() or begun >= until:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    written = file.with_suffix(".unfinished")
    if command[0] == "analyse":
        written = Path(command[1]) / "analysis.json"
    else:
        command = [*command, "-o", str(written)]
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": gpu} if gpu is not None else {})
    try:
        log = file.with_suffix(".log").open("w")
        with log:
            subprocess.run(
                [sys.executable, "-m", "lolcats", *command],
                env=environment,
                timeout=min(until - begun, 60 * STEP_MINUTES),
                stdout=log,
                stderr=log,
                check=True,
            )
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
        print(f"{name}: {error}; see {file.with_suffix('.log')}", file=sys.stderr)
        return
    values = json.loads(written.read_text(encoding="utf-8"))
    write_json(file, {"seconds": round(time.monotonic() - begun, 1), "command": command, "result": values})


def run_steps(steps: dict[str, list[str]], arguments: argparse.Namespace, until: float) -> None:
    """Steps side by side, each on a GPU."""
    gpus: list[str | None] = [*visible_gpus()] or [None]
    with ThreadPoolExecutor(min(len(gpus), max(1, len(steps)))) as pool:
        running = [
            pool.submit(run_step, name, command, gpus[number % len(gpus)], arguments, until)
            for number, (name, command) in enumerate(steps.items())
        ]
    for step in running:
        step.result()  # raises what went wrong there


def take_done(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of earlier outputs; their steps go into --work.

    Runs that are still to be looked into are left out, because their weights are needed again.
    """
    rows = []
    for folder in arguments.done:
        rows += read_rows(Path(folder) / ROWS_FILE)
        file = Path(folder) / STEPS_FILE
        for name, value in (json.loads(file.read_text()) if file.is_file() else {}).items():
            write_json(Path(arguments.work) / "steps" / f"{name}.json", value)
    steps = Path(arguments.work) / "steps"
    wanted = {name for name in ANALYSED if not (steps / f"analysis {name}.json").is_file()}
    return [row for row in rows if not (row["sweep"] == "main" and row["run"] in wanted)]


def collect(arguments: argparse.Namespace, known: list[dict[str, Any]]) -> None:
    """Write --output: every row and every step so far."""
    rows = {(row["sweep"], row["run"]): row for row in known}
    for part in PARTS:
        for row in read_rows(Path(arguments.work) / part.name / RESULTS_FILE):
            rows[part.sweep, row["run"]] = row | {"sweep": part.sweep}
    output = Path(arguments.output)
    write_text(output / ROWS_FILE, "".join(json.dumps(row) + "\n" for row in rows.values()))
    files = sorted((Path(arguments.work) / "steps").glob("*.json"))
    write_json(output / STEPS_FILE, {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files})


def main() -> None:
    begun = time.monotonic()
    names = list(dict.fromkeys(part.sweep for part in PARTS))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="SmolLM2-135M-Instruct, a folder")
    parser.add_argument("--gguf-file", default=None, help="name of the GGUF file in --model")
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--work", required=True, help="folder for runs; needs about 1 GiB, more while runs train")
    parser.add_argument("--output", required=True, help="folder for rows.jsonl and steps.json")
    parser.add_argument("--workers", type=int, default=1, help="runs at the same time, each on its own GPU")
    parser.add_argument("--sweeps", type=lambda text: text.split(","), default=names, metavar=",".join(names))
    parser.add_argument("--time-limit", type=float, default=None, help="minutes; stops before them")
    parser.add_argument("--reserve", type=float, default=2.0, help="minutes of --time-limit for the last steps")
    parser.add_argument("--done", action="append", default=[], help="an earlier --output; repeatable")
    parser.add_argument("--set", action="append", default=[], help="section.key=value for all runs, for a quick look")
    parser.add_argument("--no-tasks", action="store_true", help="without the tasks, where lm-eval is not installed")
    arguments = parser.parse_args()
    unknown = set(arguments.sweeps) - set(names)
    if unknown:
        parser.error(f"--sweeps: no part {sorted(unknown)[0]!r}; there are {', '.join(names)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what there is is collected all the same
    known = take_done(arguments)
    limit = float("inf") if arguments.time_limit is None else begun + 60 * arguments.time_limit
    try:
        model = teacher_folder(arguments)
        plans = make_plans(arguments, model)
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(run_steps, first_steps(arguments, model), arguments, limit)
            deadline = limit - 60 * arguments.reserve
            run_sweeps(
                list(plans.values()),
                workers=arguments.workers,
                known=known,
                deadline=deadline,
                console=Console(stderr=True, width=150),
            )
        first.result()  # raises what went wrong there
        run_steps(later_steps(arguments, model), arguments, limit)
    finally:
        collect(arguments, known)


if __name__ == "__main__":
    main()
