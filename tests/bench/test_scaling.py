"""benchmarks/scaling.py: every kind of row on two processes, plans beside, failures recorded, restarts."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import time
from pathlib import Path

import bench_tools
import pytest
import scaling
import scaling_row
from scaling_kinds import KINDS, TINY
from scaling_plan import all_rows, planned
from scaling_row import RowBench

from lolcats.errors import UserError
from lolcats.parallel.group import SINGLE
from lolcats.plan.gpus import find_gpu

H200, H100 = find_gpu("h200"), find_gpu("h100")
HERE = Path(__file__).parent
BASE = RowBench(tokens=1024, dtype="bfloat16", device="cuda")
FAILS = [sys.executable, "-c", "import sys; print('what went wrong'); sys.exit(3)"]
SLEEPS = [sys.executable, "-c", "import time; time.sleep(60)"]
LIMITS = {"seconds": 500.0, "row_seconds": 100.0}


@pytest.fixture
def rows():
    """Rows of the tiny model by name."""
    return {row.name: row for row in all_rows(2, RowBench(**TINY), "tiny", "tiny")}


@pytest.fixture
def measure(monkeypatch):
    """measure(rows, commands, report, **limits) -> names that were started; `commands` by name replace a row's own."""

    def run(rows, commands, report, **limits):
        started = []

        def command(row, file, seconds, python):
            started.append(row.name)
            return [str(file) if part == "FILE" else part for part in commands[row.name]]

        monkeypatch.setattr(scaling, "command", command)
        scaling.run(rows, H200, report, lambda report: None, **(LIMITS | limits))
        return started

    return run


def writes(result):
    """A command that writes a result."""
    return [sys.executable, "-c", "import sys; open(sys.argv[1], 'w').write(sys.argv[2])", "FILE", json.dumps(result)]


def test_every_kind_of_row_on_two_processes(rows, tmp_path):
    file = tmp_path / "found.json"
    command = scaling.command(rows["tiny stage 2"], file, 100.0)
    launcher = command[: command.index(str(scaling.FOLDER / "scaling_row.py"))]
    found = scaling.start([*launcher, str(HERE / "scaling_kinds.py"), str(file)], file, 200.0)
    assert found.keys() == KINDS.keys(), found.get("log")
    for name, row in found.items():
        assert (row["processes"], len(row["peak_gib"])) == (2, 2)
        assert row["provenance"]["commit"]
        if "export" in name:
            # 2 layers of matrices and norms, embeddings, head and feature maps, in float32
            layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64
            maps = 2 * (4 + (4 + 2) * 16 * 8) * 4
            assert row["bytes"] == 4 * (2 * layer + 2 * 256 * 64 + 64) + maps
            continue
        update = 32 * (KINDS[name].get("accumulate", 1)) * (1 if "pipelined" in name else 2)
        assert row["tokens_per_second"] == pytest.approx(update / row["step_ms"] * 1e3)
        assert row["steps"] >= 3


def test_the_command_of_a_row_says_all_of_it(rows, tmp_path):
    for row in all_rows(8, BASE):
        if row.vllm is None:
            row, _ = planned(row, H200)
            command = scaling.command(row, tmp_path / "x.json", 100.0)
            arguments = command[command.index(str(scaling.FOLDER / "scaling_row.py")) + 1 :]
            given = bench_tools.parser(RowBench(), None).parse_args(arguments)
            assert bench_tools.settings(RowBench(), given) == row.bench
            assert command[command.index("--nproc-per-node") + 1] == str(row.gpus)
    row = rows["tiny vLLM, all heads linear"]
    script = [str(scaling.FOLDER / "vllm_gpu.py"), "linear", "--shape", "tiny", "--gpus", "2"]
    expected = ["python", *script, "--seconds", "90", "--output", "a"]
    assert scaling.command(row, Path("a/linear.json"), 100.0, "python") == expected


def test_failures_are_recorded_and_restarts_skip_what_is_there(rows, measure, capsys):
    wanted = [rows[name] for name in ("tiny stage 2", "tiny stage 1, sharded", "tiny stage 1, pipelined")]
    result = {"tokens_per_second": 5000.0, "peak_gib": [1.0, 2.0]}
    commands = dict(zip((row.name for row in wanted), (FAILS, SLEEPS, writes(result)), strict=True))
    report = {"rows": {}}
    begin = time.monotonic()
    assert measure(wanted, commands, report, row_seconds=1.0) == [row.name for row in wanted]
    assert time.monotonic() - begin < 20
    failed, late, done = report["rows"].values()
    assert (failed["error"], failed["log"]) == ("exit status 3", "what went wrong\n")
    assert late["error"] == "not done after 1 s"
    assert done["result"] == result
    assert all(entry["planned"]["tokens_per_second"] > 0 for entry in report["rows"].values())
    assert measure(wanted, commands, report) == []
    assert measure(wanted, commands | {wanted[1].name: FAILS}, report, retry=True) == [row.name for row in wanted[:2]]
    assert late is not report["rows"][wanted[1].name]
    printed = scaling.table(wanted, H200, report["rows"])
    assert "exit status 3" in printed
    assert f"| {scaling.text(done['planned'])} | 2.1 GB, 5,000 tokens/s, 1.11 h |" in printed
    capsys.readouterr()


def test_a_row_that_the_visit_cuts_off_is_begun_again(rows, measure, capsys):
    wanted, report = [rows["tiny stage 2"]], {"rows": {}}
    commands = {"tiny stage 2": SLEEPS}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scaling, "LEAST_S", 0.1)
        assert measure(wanted, commands, report, seconds=0.5) == ["tiny stage 2"]
    assert report["rows"] == {}
    assert measure(wanted, commands, report, seconds=0.5) == []  # less than LEAST_S
    assert capsys.readouterr().out.count("the same command resumes") == 2


def test_rows_that_cannot_run_say_why(measure, monkeypatch, capsys):
    rows = {row.name: row for row in all_rows(8, BASE)}
    names = ["405b stage 2", "405b vLLM, all heads linear", "405b stage 2, checkpointing and offload"]
    monkeypatch.setattr(scaling.os, "sysconf", lambda name: 10**6)  # 1000 GB
    names += ["405b stage 2, checkpointing, 40 layers"]
    report = {"rows": {"405b stage 2, checkpointing": {"result": {}}}}
    no_vllm = shutil.which("false")
    assert measure([rows[name] for name in names], {}, report, python=no_vllm) == []
    reasons = [report["rows"][name]["skipped"] for name in names]
    assert reasons[0] == "by plan needs 178 GB on each of 8 GPUs with 141 GB"
    assert reasons[1].endswith("cannot import vllm (--vllm-python)")
    assert "need about 1218 GB of host memory" in reasons[2]
    assert reasons[3] == "all layers were measured"
    capsys.readouterr()


def test_an_error_in_one_process_is_its_result(tmp_path, monkeypatch):
    """The process that fails writes it and ends at once."""
    file = tmp_path / "x.json"
    monkeypatch.setattr(sys, "argv", ["scaling_row.py", "--mode", "pipelined", "--device", "cpu", "--json", str(file)])
    monkeypatch.setattr(scaling_row.os, "_exit", sys.exit)
    with pytest.raises(SystemExit):
        scaling_row.main()
    assert json.loads(file.read_text())["error"].startswith("rank 0: UserError: --mode pipelined needs several")
    for wrong, message in (({"stage": "nap"}, "--stage nap: expected one of"), ({"stage": "adjust"}, "is for --stage")):
        with pytest.raises(UserError, match=message):
            RowBench(**TINY | {"mode": "pipelined"} | wrong)


def test_fewer_layers_and_one_process():
    for layers, expected in ((1, 1), (0, 2)):
        model = scaling_row.build(RowBench(**TINY, layers=layers), SINGLE)
        assert len(list(model.linear_layers())) == expected
        assert not any(parameter.is_meta for parameter in model.parameters())


# --- plans --------------------------------------------------------------------------------------------------------


def test_probes_come_first_and_every_row_has_a_plan():
    rows = all_rows(8, BASE)
    names = [row.name for row in rows]
    assert len(set(names)) == len(names)
    for row in rows:
        if row.unless is not None:
            whole = names.index(row.unless)
            assert names.index(f"{row.unless}, 8 layers") < whole < names.index(row.name)
        for gpu in (H200, H100):
            sized, plan = planned(row, gpu)
            assert plan["gb"] > 0
            assert {"tokens_per_second", "seconds", "decode_tokens_per_second"} & plan.keys()
            per_gpu = sized.bench.micro_batch * sized.bench.accumulate
            assert row.update is None or per_gpu * row.gpus == row.update  # strong scaling
    fitting = [[row.name for row in rows if planned(row, gpu)[1]["missing"] is None] for gpu in (H200, H100)]
    assert "405b stage 2, checkpointing" in set(fitting[0]) - set(fitting[1])
    assert "405b stage 2, checkpointing, 40 layers" in fitting[1]


def test_hours_of_fewer_layers_are_those_of_all():
    row = next(row for row in all_rows(8, BASE) if row.name == "405b stage 1, sharded, 40 layers")
    plan = planned(row, H200)[1]
    half = {"tokens_per_second": plan["tokens_per_second"] / 2, "peak_gib": [None]}
    words = scaling.outcome({"planned": plan, "result": half})
    assert f"{2 * plan['all_layers_hours']:.2f} h for all layers, extrapolated" in words
    whole = planned(dataclasses.replace(row, bench=dataclasses.replace(row.bench, layers=0)), H200)[1]
    assert plan["all_layers_hours"] == pytest.approx(whole["hours"])


def test_what_vllm_measured_is_put_in_words():
    rates = [{"tokens_per_s": 10.0, "running": 1}, {"tokens_per_s": 900.0, "running": 256}]
    found = {"prefill": [{"tokens_per_s": 5e4}], "decode": rates, "state_bytes": 2**21, "token_bytes": 2**10}
    words = scaling.outcome({"planned": {}, "result": found})
    assert words == "prompts 50,000 tokens/s, decoding one sequence 10 tokens/s, many 900 tokens/s, 10.0 MiB a sequence"


def test_the_page_has_the_plans(capsys):
    scaling.main(["--gpus", "8", "--gpu", "h200", "--plan-only"])
    assert capsys.readouterr().out.strip() in (HERE.parents[1] / "docs" / "scaling.md").read_text()


def test_results_of_other_settings_are_not_mixed(tmp_path, monkeypatch):
    monkeypatch.setattr(scaling, "run", lambda *_, **options: None)
    arguments = ["--gpus", "2", "--models", "tiny,tiny", "--device", "cpu", "--json", str(tmp_path / "x.json")]
    scaling.main(arguments)
    with pytest.raises(UserError, match="name another file"):
        scaling.main([*arguments, "--tokens", "64"])
    with pytest.raises(UserError, match="--plan-only"):
        scaling.main(["--gpus", "64"])
