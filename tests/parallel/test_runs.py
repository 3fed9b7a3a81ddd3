"""Two processes do together what one does alone; their faults are told, and nothing is lost."""

from __future__ import annotations

import json
import shutil

import pytest
from ranks import run_ranks
from rich.console import Console
from safetensors.torch import load_file

from lolcats.config import LinearizeConfig, merge
from lolcats.errors import UserError
from lolcats.pipeline import linearize
from lolcats.training import folder
from lolcats.training.checkpoint import list_checkpoints

QUIET = Console(quiet=True)
FULL = {
    "transfer": {"max_steps": 2},
    "adjust": {"max_steps": 2, "method": "full", "train_feature_maps": True, "lr": 1e-3},
}
SPARING = {"adjust": {"gradient_checkpointing": True, "distill_factor": 0.5}, "parallel": {"cpu_offload": True}}
OPTIONS = {
    "attention": {"feature_scale": 0.3},
    "transfer": {"schedule": "cosine"},
    "adjust": {"train_feature_maps": True, "feature_lr": 1e-3, "distill_factor": 0.5},
}
WHOLE = {"parallel": {"shard": "off"}, "adjust": {"enabled": False}}


def weights(folder):
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors.update(load_file(file))
    return tensors


def largest_difference(first, second):
    """Largest over the tensors of the largest difference, relative to the tensor's largest value."""
    assert first.keys() == second.keys()
    return max(
        float((first[name].double() - second[name].double()).abs().max() / second[name].double().abs().max())
        for name in first
    )


@pytest.fixture(scope="module")
def shared(settings, tmp_path_factory, model_dir):
    """Many runs of the same two processes (starting them is what takes time): rank -> name -> report or error."""
    folder = tmp_path_factory.mktemp("shared")
    damaged = folder / "damaged model"
    shutil.copytree(model_dir, damaged)
    data = (damaged / "model.safetensors").read_bytes()
    (damaged / "model.safetensors").write_bytes(data[: len(data) // 2])
    missing = folder / "missing model"
    shutil.copytree(model_dir, missing)
    (missing / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}}
    (missing / "model.safetensors.index.json").write_text(json.dumps(index))
    begun = folder / "begun"
    _begin_alone(settings, begun)
    runs = {
        "lora": {"changes": {}},
        "full": {"changes": FULL},
        "sparing": {"changes": SPARING},
        "whole": {"changes": WHOLE},
        "options": {"changes": OPTIONS},
        "begun": {"changes": {}, "resume": True},
        "nan": {"changes": {}, "broken": "nan"},
        "full disk": {"changes": {}, "broken": "full disk"},
        "damaged": {"changes": {"model": {"path": str(damaged)}}},
        "missing": {"changes": {"model": {"path": str(missing)}}},
        "odd": {"changes": {"adjust": {"batch_size": 3, "micro_batch_size": 1}}},
        "gguf": {"changes": {"model": {"gguf_file": "it.gguf"}}},
    }
    for name, item in runs.items():
        item["output"] = str(folder / name)
    ended = run_ranks("several", {"settings": settings, "runs": runs}, folder / "ranks")
    for process in ended:
        assert process.status == 0, process.errors
    return folder, [process.result for process in ended]


class _Stop(Exception):
    pass


def _begin_alone(settings, output):
    """A run of one process that is broken off after its first checkpoint of stage 2."""
    write = folder.write_checkpoint

    def once(path, *args):
        write(path, *args)
        if path.name == "step-00000002" and path.parent.name == "adjust":
            raise _Stop

    config = LinearizeConfig.from_dict(settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder, "write_checkpoint", once)
        with pytest.raises(_Stop):
            linearize(config, output, console=QUIET)


@pytest.mark.parametrize(
    ("name", "changes"),
    [("lora", {}), ("full", FULL), ("sparing", SPARING), ("whole", WHOLE), ("options", OPTIONS)],
)
def test_two_processes_end_with_the_weights_of_one(shared, alone, name, changes):
    folder, reports = shared
    expected, report = alone(changes)
    found = reports[0][name]
    assert not isinstance(found, str), found
    assert found["perplexity"] == pytest.approx(report["perplexity"], rel=1e-5)
    assert found["stages"]["transfer"]["layer_losses"] == pytest.approx(report["stages"]["transfer"]["layer_losses"])
    assert found["stages"]["transfer"]["tokens"] == report["stages"]["transfer"]["tokens"]
    # Sums of gradients are added in another order, and Adam divides by their size.
    assert largest_difference(weights(folder / name), weights(expected)) < 2e-6
    assert not list((folder / name).rglob("*.tmp*"))


def test_a_run_of_one_process_goes_on_with_two(shared, alone):
    folder, reports = shared
    assert not isinstance(reports[0]["begun"], str), reports[0]["begun"]
    assert largest_difference(weights(folder / "begun"), weights(alone({})[0])) < 2e-6


def test_a_run_of_two_processes_goes_on_with_one_after_a_full_disk(shared, settings, alone):
    folder, reports = shared
    for report in reports:
        assert "rank 1: cannot write" in report["full disk"]
        assert "File too large" in report["full disk"]
        assert "resume with --resume" in report["full disk"]
    output = folder / "full disk"
    assert [path.name for path in list_checkpoints(output / "run" / "transfer", "step")] == ["step-00000002"]
    linearize(LinearizeConfig.from_dict(settings), output, resume=True, console=QUIET)
    assert largest_difference(weights(output), weights(alone({})[0])) < 2e-6


def test_faults_are_told_by_all_ranks(shared):
    _, reports = shared
    for report in reports:
        assert "rank 1: stage transfer, step 3: the loss of layer 1 is nan" in report["nan"]
        assert "model.safetensors is damaged" in report["damaged"]
        assert "model-00001-of-00001.safetensors" in report["missing"]
        assert "adjust.batch_size=3 cannot be shared equally by 2 processes" in report["odd"]
        assert "parallel.shard=off" in report["gguf"]


def test_after_a_failure_of_rank_0_the_others_do_not_begin(shared):
    _, reports = shared
    assert [report["main first"]["ran"] for report in reports] == [True, False]
    assert [report["main first"]["error"] for report in reports] == ["rank 0: no room"] * 2


def test_a_damaged_part_of_a_checkpoint_is_named(shared, settings, tmp_path):
    folder, _ = shared
    output = tmp_path / "lora"
    shutil.copytree(folder / "lora", output)
    part = next((output / "run" / "adjust").glob("best-*/__1_0.distcp"))
    part.write_bytes(part.read_bytes()[:-1] + b"x")
    with pytest.raises(UserError, match=r"__1_0.distcp is damaged"):
        linearize(LinearizeConfig.from_dict(settings), output, resume=True, console=QUIET)


def test_a_killed_rank_ends_the_run_and_another_goes_on(settings, alone, tmp_path):
    output = tmp_path / "out"
    values = merge(settings, {"parallel": {"timeout": 60}})
    survivor, victim = run_ranks("killed", {"settings": values, "output": str(output), "steps": 3}, tmp_path / "ranks")
    assert victim.status == -9
    assert "another process of this run vanished" in survivor.result["run"]
    assert "--resume" in survivor.result["run"]
    linearize(LinearizeConfig.from_dict(settings), output, resume=True, console=QUIET)
    assert largest_difference(weights(output), weights(alone({})[0])) < 2e-6
