"""Two processes do together what one does alone; their faults are reported, and nothing is lost."""

import json
import shutil

import pytest
from ranks import largest_difference, run_ranks
from rich.console import Console
from toy_stage import Killed, failing

from lolcats.config import LinearizeConfig, merge
from lolcats.pipeline import linearize
from lolcats.training import loop
from lolcats.training.checkpoint import list_checkpoints

pytestmark = pytest.mark.slow
QUIET = Console(quiet=True)
SPARING = {"adjust": {"gradient_checkpointing": True, "distill_factor": 0.5}}
REPLICATED = {"parallel": {"shard": "off"}, "adjust": {"train_feature_maps": True, "feature_lr": 1e-3}}


@pytest.fixture(scope="module")
def gated(half_exact):
    """Changes of settings by which gates choose half of the heads."""
    stage = {"max_steps": 2, "batch_size": 2, "micro_batch_size": 1, "eval_every": 1}
    return merge(half_exact, {"gates": stage | {"gradient_checkpointing": True}})


@pytest.fixture(scope="module")
def shared(both_stages, gated, model_dir, tmp_path_factory):
    """Many runs of the same two processes (starting them is what takes time): (folder, results of each rank)."""
    folder = tmp_path_factory.mktemp("shared")

    def run(name, changes=None, *, resume=False, **others):
        values = merge(both_stages, changes or {})
        return {name: {"settings": values, "output": str(folder / name), "resume": resume, **others}}

    damaged, missing = folder / "damaged model", folder / "missing model"
    for copied in (damaged, missing):
        shutil.copytree(model_dir, copied)
    data = (damaged / "model.safetensors").read_bytes()
    (damaged / "model.safetensors").write_bytes(data[: len(data) // 2])
    (missing / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}}
    (missing / "model.safetensors.index.json").write_text(json.dumps(index))
    with failing(loop, "write_checkpoint", 4), pytest.raises(Killed):  # the first of stage 2 is the third
        linearize(LinearizeConfig.from_dict(both_stages), folder / "begun alone", console=QUIET)
    ended = run_ranks(
        {
            **run("lora"),
            **run("sparing", SPARING),
            **run("replicated", REPLICATED),
            **run("gated", gated),
            **run("begun alone", {"output": {"track": "tensorboard"}}, resume=True),
            **run("nan", fault="nan"),
            **run("damaged", {"model": {"path": str(damaged)}}),
            **run("missing", {"model": {"path": str(missing)}}),
            **run("odd", {"adjust": {"batch_size": 3, "micro_batch_size": 1}}),
            **run("4 bits", {"model": {"load_in_4bit": True}}),
        },
        folder / "ranks",
    )
    for process in ended:
        assert process.status == 0, process.errors
    return folder, [process.result for process in ended]


@pytest.mark.parametrize(("name", "changes"), [("lora", {}), ("sparing", SPARING), ("replicated", REPLICATED)])
def test_two_processes_end_with_the_weights_of_one(shared, alone, weights, name, changes):
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


def test_two_processes_choose_the_heads_of_one(shared, alone, gated, weights):
    folder, reports = shared
    expected, report = alone(gated)
    found = reports[0]["gated"]
    assert not isinstance(found, str), found
    assert found["exact_heads"] == report["exact_heads"]
    values = [[gate for row in one["gates"]["values"].values() for gate in row] for one in (found, report)]
    assert values[0] == pytest.approx(values[1], rel=1e-4)
    assert found["perplexity"] == pytest.approx(report["perplexity"], rel=1e-5)
    assert largest_difference(weights(folder / "gated"), weights(expected)) < 2e-6


def test_two_processes_resume_a_run_of_one(shared, alone, weights):
    folder, reports = shared
    assert not isinstance(reports[0]["begun alone"], str), reports[0]["begun alone"]
    assert largest_difference(weights(folder / "begun alone"), weights(alone({})[0])) < 2e-6
    assert len(list((folder / "begun alone" / "run" / "tracking" / "adjust").iterdir())) == 1  # one process logged


def test_one_process_resumes_a_run_of_two(shared, both_stages, alone, weights):
    output = shared[0] / "nan"
    assert [path.name for path in list_checkpoints(output / "run" / "transfer")] == ["step-00000002"]
    linearize(LinearizeConfig.from_dict(both_stages), output, resume=True, console=QUIET)
    assert largest_difference(weights(output), weights(alone({})[0])) < 2e-6


def test_faults_are_reported_by_all_ranks(shared):
    for report in shared[1]:
        assert "rank 1: stage transfer, step 3: the loss of layer 1 is nan" in report["nan"]
        assert "model.safetensors is damaged" in report["damaged"]
        assert "model-00001-of-00001.safetensors" in report["missing"]
        assert "adjust.batch_size=3 cannot be shared equally by 2 processes" in report["odd"]
        assert "parallel.shard=off" in report["4 bits"]


def test_after_a_failure_of_rank_0_the_others_do_not_begin(shared):
    reports = shared[1]
    assert [report["main first"]["ran"] for report in reports] == [True, False]
    assert [report["main first"]["error"] for report in reports] == ["rank 0: no room"] * 2
