"""The training benchmark on the tiny shape."""

from __future__ import annotations

import io
import json

import pytest
import torch
from rich.console import Console

from lolcats.bench import train
from lolcats.bench.attention import save
from lolcats.bench.train import TrainBench
from lolcats.config.attention import AttentionConfig
from lolcats.errors import UserError

QUIET = Console(quiet=True)
SMALL = {"model": "tiny", "device": "cpu", "dtype": "float32", "tokens": 32, "micro_batches": (1, 2), "steps": 2}


@pytest.fixture(autouse=True)
def _short_ceilings(monkeypatch):
    monkeypatch.setattr(train, "ceilings", lambda device: {"copy_tb_s": 1.0, "matmul_tflop_s": 1.0})


@pytest.fixture(scope="module")
def report():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "ceilings", lambda device: {"copy_tb_s": 1.0, "matmul_tflop_s": 1.0})
        return train.run(TrainBench(**SMALL, accumulate=2), QUIET)


def test_every_row_is_measured(report):
    assert [(row["micro_batch"], row["row"]) for row in report["rows"]] == [
        (size, name) for size in (1, 2) for name in train.ROWS
    ]
    for row in report["rows"]:
        assert "error" not in row
        tokens = row["micro_batch"] * 2 * 32
        assert row["tokens_per_second"] == pytest.approx(tokens / row["step_ms"] * 1e3)
        assert row["tokens_per_second_p10"] <= row["tokens_per_second"] <= row["tokens_per_second_p90"]


def test_the_report_is_json_with_its_origin(report):
    saved = json.loads(json.dumps(report))
    assert saved["settings"]["attention"]["window_size"] == 64
    assert saved["provenance"]["versions"]["torch"] == torch.__version__


def test_the_table_names_every_row(report):
    stream = io.StringIO()
    failed = {"row": "frozen", "micro_batch": 4, "tokens": 32, "error": "OutOfMemoryError: too much"}
    train.print_table({**report, "rows": [*report["rows"], failed]}, Console(file=stream, width=200))
    text = stream.getvalue()
    assert all(name in text for name in (*train.ROWS, "OutOfMemoryError"))


def test_out_of_memory_is_a_result(monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(train, "_measure", fail)
    row = train.run(TrainBench(**SMALL, rows=("adjust",)), QUIET)["rows"][0]
    assert row["error"] == "OutOfMemoryError: CUDA out of memory"


def test_a_stopped_run_keeps_its_rows(monkeypatch, tmp_path):
    """After every row the file is whole, and what cannot be written shows before the first."""
    file = tmp_path / "results" / "train.json"
    measured = []

    def measure(bench, name, *_):
        kept = json.loads(file.read_text())
        assert [row["row"] for row in kept["rows"]] == measured
        assert {"settings", "ceilings", "provenance"} <= kept.keys()
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(name)
        return {"tokens_per_second": 1.0, "step_ms": 1.0, "peak_gib": None}

    monkeypatch.setattr(train, "_measure", measure)
    with pytest.raises(KeyboardInterrupt):
        train.run(TrainBench(**SMALL), QUIET, lambda found: save(found, file))
    assert [row["row"] for row in json.loads(file.read_text())["rows"]] == ["transfer", "adjust"]
    assert [path.name for path in file.parent.iterdir()] == ["train.json"]
    with pytest.raises(UserError, match="cannot write"):
        train.run(TrainBench(**SMALL), QUIET, lambda found: save(found, tmp_path))


@pytest.mark.parametrize("wrong", [{"model": "huge"}, {"rows": ("adjust", "sleep")}])
def test_unknown_names_are_refused(wrong):
    with pytest.raises(UserError, match=r"huge|sleep"):
        train.run(TrainBench(**{**SMALL, **wrong}), QUIET)


@pytest.mark.parametrize("name", ["transfer", "adjust"])
def test_a_step_trains(name):
    bench = TrainBench(**SMALL, attention=AttentionConfig(window_size=4))  # a window over all would be perfect
    with train.updates(bench, name, 2, QUIET) as step:
        run = step.__self__
        before = {key: tensor.clone() for key, tensor in run.stage.state().items()}
        step()
        step()
        assert run.counters.step == 2
        assert any(not torch.equal(before[key], tensor) for key, tensor in run.stage.state().items())


@pytest.mark.parametrize("maps", [False, True])
def test_feature_maps_train_in_stage_2_if_asked(maps):
    bench = TrainBench(**SMALL, attention=AttentionConfig(window_size=4), train_feature_maps=maps)
    with train.updates(bench, "adjust", 2, QUIET) as step:
        trained = [name for name, tensor in step.__self__.stage.model.named_parameters() if tensor.requires_grad]
    assert any(name.endswith("linear_attention.k_weight") for name in trained) == maps


def test_sequences_are_moved_if_asked():
    assert "rotary_positions" not in train.random_data(TrainBench(**SMALL), 4).batch([1])
    moved = train.random_data(TrainBench(**SMALL, position_offset=99), 4).batch([1])["rotary_positions"]
    assert (moved.diff() > 1).sum() == 1
    with train.updates(TrainBench(**SMALL, position_offset=99), "transfer", 2, QUIET) as step:
        step()


def test_labels_are_the_given_share():
    data = train.random_data(TrainBench(**SMALL, label_share=0.25), 3)
    assert data.label_mask.sum(1).tolist() == [8, 8, 8]
    assert not train.random_data(TrainBench(**SMALL), 1).label_mask[0, 0]  # nothing comes before it


def test_profile_lists_kernels():
    found = train.profile(TrainBench(**SMALL), "transfer", 1, QUIET, steps=1)
    assert found["host_ms"] > 0
    assert found["kernels_ms"] == pytest.approx(sum(kernel["ms"] for kernel in found["kernels"]))
    assert [kernel["ms"] for kernel in found["kernels"]] == sorted((k["ms"] for k in found["kernels"]), reverse=True)
