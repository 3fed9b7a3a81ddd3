"""benchmarks/results_*.py: what is run, and how its numbers become docs/results.md."""

from __future__ import annotations

import argparse
import gzip
import importlib
import json
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TASKS = ("piqa", "arc_easy", "arc_challenge", "hellaswag", "winogrande", "mmlu")


@pytest.fixture
def load(monkeypatch):
    """Import a script of benchmarks/."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module
    for name in [name for name in sys.modules if name.startswith("results_")]:
        del sys.modules[name]


def evaluation(value):
    tasks = {name: {"value": value, "stderr": 0.01} for name in TASKS}
    averages = {name: {"value": value, "stderr": 0.01} for name in ("average", "average_without_mmlu")}
    return {"tasks": tasks, "averages": averages, "passkey": [{"length": 8192, "accuracy": value}]}


def row(sweep, case, seed, perplexity, accuracy):
    return {
        "sweep": sweep,
        "run": f"{'-'.join(case.values())}-seed{seed}",
        "case": case,
        "seed": seed,
        "status": "finished",
        "perplexity": {"teacher": 7.0, "swapped": 900.0, "adjust": perplexity},
        "evaluation": evaluation(accuracy),
        "stages": {"adjust": {"curve": [[0, 9.0], [100, perplexity]]}},
        "provenance": {"device": "a GPU", "commit": "abc"},
    }


def component(transfer, window, perplexity, accuracy):
    case = {"feature map": "hedgehog", "transfer": transfer, "window": window}
    return row("components", case, 0, perplexity, accuracy)


@pytest.fixture
def measured(tmp_path):
    """A folder like an output of results_smollm2.py."""
    rows = [row("main", {"method": "LoLCATs"}, seed, 6.0 + seed, 0.5 + seed / 100) for seed in (0, 1, 2)]
    rows += [component("yes", "64", 6.0, 0.50), component("yes", "none", 9.5, 0.45), component("no", "64", 9.0, 0.51)]
    rows.append({**row("windows", {"window": "4"}, 0, 9.0, 0.4), "status": "failed"})
    folder = tmp_path / "measured"
    folder.mkdir()
    (folder / "rows.jsonl").write_text("".join(json.dumps(item) + "\n" for item in rows))
    histogram = {"counts": [1, 3], "edges": [0.0, 10.0, 20.0]}
    esl = {"sequences": 4, "mean": 12.0, "histogram": histogram}
    maps = [{"layer": 0, "head": 0, "softmax": [[0.5, 0.5]], "adjust": [[0.4, 0.6]]}]
    analysis = {"layers": [0, 1], "mse": {"adjust": [0.1, 0.2]}, "stages": ["adjust"], "maps": {"maps": maps}}
    agreement = [{"matching_prefix": 5.0, "equal_share": 0.5}]
    generated = {"agreement": agreement, "repetition": 0.25, "exact_match": 0.125}
    origin = {"provenance": {"device": "a CPU", "commit": "def"}}
    command = [
        "eval",
        "/t",
        "/m",
        "--tasks",
        "generation",
        "--data",
        "/d/x.jsonl,max_rows=2",
        "--limit",
        "6",
        "-o",
        "f",
    ]
    steps = {
        "teacher": {"result": {"models": [evaluation(0.6)], **origin}},
        "esl books": {"result": {"models": [{"esl": esl}], **origin}},
        "analysis LoLCATs-seed0": {"result": analysis | origin},
        "generation": {
            "command": command,
            "result": {"models": [{"model": "x/LoLCATs-seed0", "generation": generated}], **origin},
        },
    }
    (folder / "steps.json").write_text(json.dumps(steps))
    return folder


def test_the_page_shows_what_was_measured(load, measured, tmp_path):
    page, data = load("results_page"), load("results_data")
    text = page.write_page(data.read_results([measured]), tmp_path)
    lines = text.splitlines()
    # mean and deviation of three seeds beside the paper's value
    ours = next(line for line in lines if line.startswith("| LoLCATs |"))
    assert ours.startswith("| LoLCATs | 7.00 ± 1.00 / - | 51.00 ± 1.00 / 80.9 |")
    teacher = next(line for line in lines if line.startswith("| SmolLM2 135M Instruct"))
    assert "| 7.00 / - | 60.00 / 79.9 |" in teacher
    assert any(line.startswith("| T2R (not measured) |") for line in lines)
    assert any(line.startswith("| 4 (not measured) |") for line in lines)  # a failed run is none
    # swapped stands for what is before LoRA where there is no transfer
    assert any(line.startswith("| Hedgehog, no transfer, window | 900.00 / - | 9.00 / - |") for line in lines)
    assert "| LoLCATs-seed0 | 5.0 | 50.0 | 25.0 | 12.5 |" in lines
    assert "    lolcats eval TEACHER MODEL --tasks generation --data x.jsonl,max_rows=2 --limit 6" in lines
    assert '- The step "generation" on a CPU at commit def.' in lines
    assert "- Runs on a GPU at commit abc: 6." in lines
    pictures = {file.name for file in (tmp_path / "images").iterdir()}
    assert pictures == {f"results_{name}.png" for name in ("curves", "layers", "maps", "esl")}
    for name in pictures:
        assert f"(images/{name})" in text


def test_findings_are_judged_by_the_numbers(load, measured):
    page, data = load("results_page"), load("results_data")
    lines = [line for line in page.findings(data.read_results([measured])) if line.startswith("| ")]
    verdicts = {line.split(" | ")[0]: line.split(" | ")[1] for line in lines}
    assert verdicts["| Hedgehog: transfer and window beat each alone, perplexity"] == "holds"
    assert (
        verdicts["| Hedgehog: transfer and window beat each alone, accuracy"] == "does not hold, within the scatter"
    )  # 51 > 50 ± 1
    assert verdicts["| T2R: transfer and window beat each alone, perplexity"] == "not measured"


def test_the_page_of_nothing_is_complete(load, tmp_path):
    page, data, tables = load("results_page"), load("results_data"), load("results_tables")
    text = page.write_page(data.read_results([]), tmp_path)
    for table in tables.TABLES:
        assert f"## {table.title}" in text
    assert text.count("*not measured*") == 5  # generation and four pictures
    assert " holds |" not in text


def test_the_committed_numbers_are_read(load):
    data = load("results_data")
    files = sorted((ROOT / "benchmarks" / "results").glob("quality_smollm2_h200_*.json"))
    results = data.read_results(files)
    mean, _, _ = results.metric("main", "LoLCATs", "perplexity adjust")
    assert 5 < mean < 7
    assert results.metric("main", "teacher", "perplexity adjust")[0] == pytest.approx(7.163, abs=1e-3)


def test_tables_fit_the_sweeps_and_the_paper(load):
    """Every row is a case of its sweep, and every number of the paper has a place."""
    from lolcats.sweep.spec import read_sweep
    from lolcats.sweeps import sweep_path

    data, tables = load("results_data"), load("results_tables")
    paper = data.read_results([]).paper
    paths = dict.fromkeys(("textbooks", "books"), "x.jsonl")
    shown = set()
    for table in tables.TABLES:
        _, runs = read_sweep(sweep_path(table.sweep), paths=paths if table.sweep == "data" else None)
        cases = {"|".join(run.case.values()) for run in runs}
        # LoRA of rank 256 does not exist on the small model, and the paper has it
        assert cases <= set(table.cases) <= cases | {"teacher", "256"}, table.sweep
        for name in table.papers:
            shown.add(name)
            for case, numbers in paper[name]["rows"].items():
                assert case in table.cases, (name, case)
                assert set(numbers) <= set(table.columns), (name, case)
    assert shown == set(paper)
    for finding in tables.FINDINGS:
        table = next(table for table in tables.TABLES if table.sweep == finding.sweep)
        assert set(finding.cases) <= set(table.cases), finding.text
        assert finding.metric in table.columns, finding.text


@pytest.fixture
def arguments(tmp_path):
    return argparse.Namespace(
        model="m",
        gguf_file=None,
        data_dir=str(tmp_path / "data"),
        work=str(tmp_path / "work"),
        output=str(tmp_path / "out"),
        done=[],
        set=[],
        no_tasks=False,
        sweeps=["main", "transfer-steps", "data", "passkey"],
    )


def test_plans_have_data_tasks_and_what_is_kept(load, arguments):
    module = load("results_smollm2")
    plans = module.make_plans(arguments, "m")
    assert list(plans) == ["main", "transfer-steps", "data", "passkey", "main-1-2"]  # the important first
    assert {run.seed for run in plans["main-1-2"].runs} == {1, 2}
    main = plans["main"]
    assert (main.sweep.evaluate.tasks, main.sweep.evaluate.limit) == ("paper", None)
    assert main.sweep.evaluate.data_dir == arguments.data_dir
    assert {task.run.name for task in main.tasks() if not task.drop_weights} == set(module.ANALYSED)
    assert all(task.drop_weights for task in plans["main-1-2"].tasks())
    assert main.runs[0].config.data.sources[0].path.endswith("train/alpaca_original.jsonl.gz")
    assert plans["transfer-steps"].sweep.held_out["text"].path.endswith("train/openstax_ccby.jsonl.gz")
    assert plans["passkey"].sweep.evaluate.tasks == "passkey"
    arguments.no_tasks = True
    assert module.make_plans(arguments, "m")["main"].sweep.evaluate is None
    assert "teacher" not in module.first_steps(arguments, "m")


def test_steps_run_once_and_in_time(load, arguments, monkeypatch):
    module = load("results_smollm2")
    calls = []

    def run(command, env, timeout, stdout, stderr, check):
        calls.append((command[3:], env.get("CUDA_VISIBLE_DEVICES"), timeout))
        if "bad" in command:
            raise module.subprocess.CalledProcessError(1, command)
        Path(command[command.index("-o") + 1]).write_text('{"models": []}')

    monkeypatch.setattr(module.subprocess, "run", run)
    monkeypatch.setattr(module, "visible_gpus", lambda: ["2"])
    until = time.monotonic() + 60
    module.run_steps({"good": ["eval", "m"], "failed": ["eval", "bad"]}, arguments, until)
    module.run_steps({"good": ["eval", "m"]}, arguments, until)
    module.run_steps({"late": ["eval", "m"]}, arguments, time.monotonic() - 1)
    assert [(command[:2], gpu) for command, gpu, _ in calls] == [(["eval", "m"], "2"), (["eval", "bad"], "2")]
    assert all(0 < timeout <= 60 for _, _, timeout in calls)
    module.collect(arguments, [])
    steps = json.loads((Path(arguments.output) / "steps.json").read_text())
    assert list(steps) == ["good"]
    assert steps["good"]["result"] == {"models": []}


def test_earlier_outputs_are_taken_over(load, arguments, measured, tmp_path):
    module = load("results_smollm2")
    arguments.done = [str(measured)]
    known = module.take_done(arguments)
    # the analysis of LoLCATs-seed0 is there, so its row counts; Hedgehog's is not, and neither is its run
    assert {item["run"] for item in known if item["sweep"] == "main"} == {f"LoLCATs-seed{seed}" for seed in (0, 1, 2)}
    work = tmp_path / "work" / "windows"
    work.mkdir()
    (work / "results.jsonl").write_text(json.dumps({"run": "16-seed0", "status": "finished"}) + "\n")
    module.collect(arguments, known)
    rows = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()]
    assert {"run": "16-seed0", "status": "finished", "sweep": "windows"} in rows
    assert len(rows) == len(known) + 1
    assert "analysis LoLCATs-seed0" in json.loads((tmp_path / "out" / "steps.json").read_text())

    (measured / "steps.json").unlink()
    (tmp_path / "work" / "steps" / "analysis LoLCATs-seed0.json").unlink()
    assert "LoLCATs-seed0" not in {item["run"] for item in module.take_done(arguments)}  # its weights are needed


def test_the_whole_way_from_nothing_to_the_page(load, model_dir, data_file, tmp_path, monkeypatch):
    """A sweep on a tiny model, steps, a second machine that has only what came back, and the page of it."""
    module, page, data = load("results_smollm2"), load("results_page"), load("results_data")
    monkeypatch.setenv("LOLCATS_CACHE", str(tmp_path / "cache"))
    train = tmp_path / "data" / "train"
    train.mkdir(parents=True)
    with gzip.open(train / "alpaca_original.jsonl.gz", "wt") as file:
        file.write(data_file.read_text())
    commands = []
    original = module.subprocess.run

    def run(command, **options):
        if "lolcats" not in command:  # provenance asks git
            return original(command, **options)
        commands.append(command[3:])
        esl = {"sequences": 1, "mean": 5.0, "histogram": {"counts": [1], "edges": [0.0, 10.0]}}
        Path(command[command.index("-o") + 1]).write_text(json.dumps({"models": [{"esl": esl}]}))

    monkeypatch.setattr(module.subprocess, "run", run)
    tiny = "data.sequence_length=48 data.validation_rows=10 transfer.max_steps=1 adjust.max_steps=1 model.device=cpu"
    common = ["--data-dir", str(train.parent), "--model", str(model_dir), "--sweeps", "windows", "--no-tasks"]
    for setting in [*tiny.split(), "attention.feature_dim=4"]:
        common += ["--set", setting]

    def drive(name, *more):
        places = ["--work", str(tmp_path / name / "work"), "--output", str(tmp_path / name / "out")]
        monkeypatch.setattr(sys, "argv", ["results_smollm2.py", *common, *places, *more])
        module.main()
        return [json.loads(line) for line in (tmp_path / name / "out" / "rows.jsonl").read_text().splitlines()]

    assert drive("late", "--time-limit", "0") == []
    rows = drive("first")
    assert [(row["sweep"], row["status"]) for row in rows] == [("windows", "finished")] * 5
    assert [command[:3] for command in commands] == [["eval", str(model_dir), "--tasks"]] * 3  # the three of ESL
    assert not list((tmp_path / "first" / "work").rglob("model*.safetensors"))
    commands.clear()
    again = drive("second", "--done", str(tmp_path / "first" / "out"))
    assert commands == []
    assert not list((tmp_path / "second" / "work").rglob("lolcats_report.json"))  # nothing was trained again
    assert {row["run"]: row["perplexity"] for row in again} == {row["run"]: row["perplexity"] for row in rows}
    text = page.write_page(data.read_results([tmp_path / "second" / "out"]), tmp_path / "docs")
    shown = next(line for line in text.splitlines() if line.startswith("| terraced 64 |"))
    assert f"| {rows[4]['perplexity']['adjust']:.2f} / - |" in shown
