"""Independent jobs over written hidden states equal joint training."""

import json

import numpy as np
import pytest
import torch
from rich.console import Console

from lolcats.errors import UserError
from lolcats.parallel.blockwise import jobs
from lolcats.parallel.blockwise.assemble import assemble
from lolcats.pipeline import linearize

QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def prepared(configure, tmp_path_factory):
    folder = tmp_path_factory.mktemp("jobs") / "jobs"
    jobs.prepare(configure(transfer={"block_layers": 2}), folder, QUIET)
    return folder


def test_equal_to_joint_training_in_any_order(configure, joint, feature_maps, tmp_path):
    config = configure()
    jobs.prepare(config, tmp_path / "jobs", QUIET)
    with pytest.raises(UserError, match=r"4 of 4 blocks .* block 0 \(layer 0\)"):
        assemble(jobs.open_finished(tmp_path / "jobs", QUIET), tmp_path / "out", QUIET)
    for block in (2, 0, 3, 1):
        jobs.train_one(tmp_path / "jobs", block, QUIET)
    assemble(jobs.open_finished(tmp_path / "jobs", QUIET), tmp_path / "out", QUIET)
    found, expected = feature_maps(tmp_path / "out"), feature_maps(joint(1)[0])
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_sequences_of_a_job_are_moved_as_in_joint_training(configure, feature_maps, tmp_path):
    changes = {"data": {"position_offset": "auto", "position_jumps": 1}, "transfer": {"block_layers": 2}}
    linearize(configure(**changes), tmp_path / "joint", console=QUIET)
    jobs.prepare(configure(**changes), tmp_path / "jobs", QUIET)
    for block in (1, 0):
        jobs.train_one(tmp_path / "jobs", block, QUIET)
    assemble(jobs.open_finished(tmp_path / "jobs", QUIET), tmp_path / "out", QUIET)
    moved, still = feature_maps(tmp_path / "joint"), tmp_path / "still"
    for name, tensor in feature_maps(tmp_path / "out").items():
        assert torch.equal(tensor, moved[name]), name
    linearize(configure(transfer={"block_layers": 2}), still, console=QUIET)
    assert any(not torch.equal(tensor, moved[name]) for name, tensor in feature_maps(still).items())


def test_status_and_restart(prepared):
    before = jobs.status(prepared, QUIET)
    assert [(state.block, state.inputs, state.step) for state in before] == [
        ("block 0 (layers 0-1)", True, None),
        ("block 1 (layers 2-3)", True, None),
    ]
    jobs.train_one(prepared, 1, QUIET)
    state = jobs.status(prepared, QUIET)[1]
    assert state.validation_loss is not None
    jobs.train_one(prepared, 1, QUIET)  # finished: nothing to do
    assert jobs.status(prepared, QUIET)[1] == state


def test_foreign_and_incomplete_folders_are_refused(prepared, configure, tmp_path):
    with pytest.raises(UserError, match="no job folder"):
        jobs.train_one(tmp_path, 0, QUIET)
    with pytest.raises(UserError, match=r"--block 2: .* blocks 0 to 1"):
        jobs.train_one(prepared, 2, QUIET)
    with pytest.raises(UserError, match=r"other settings[\s\S]*transfer.lr"):
        jobs.prepare(configure(transfer={"block_layers": 2, "lr": 1.0}), prepared, QUIET)
    with pytest.raises(UserError, match="select_by=perplexity needs the whole model"):
        jobs.prepare(configure(transfer={"select_by": "perplexity"}), tmp_path / "jobs", QUIET)
    (tmp_path / "mine.txt").write_text("")
    with pytest.raises(UserError, match="not empty"):
        jobs.prepare(configure(), tmp_path, QUIET)


def test_damage_is_found(configure, tmp_path):
    folder = tmp_path / "jobs"
    jobs.prepare(configure(transfer={"block_layers": 2}), folder, QUIET)
    data = folder / "inputs" / "block-001-train.data"
    content = np.memmap(data, dtype=np.uint8, mode="r+")
    content[::97] ^= 1
    content.flush()
    with pytest.raises(UserError, match=r"block-001-train.data: .* checksum"):
        jobs.train_one(folder, 1, QUIET)
    data.with_suffix(".rows").unlink()
    with pytest.raises(UserError, match=r"inputs of block 1 .* not complete"):
        jobs.train_one(folder, 1, QUIET)
    jobs.prepare(configure(transfer={"block_layers": 2}), folder, QUIET)
    jobs.train_one(folder, 1, QUIET)

    tokens = folder / "data" / "train-input_ids.npy"
    tokens.write_bytes(tokens.read_bytes()[:-4] + b"\1\0\0\0")
    with pytest.raises(UserError, match=r"packed data .* have changed"):
        jobs.train_one(folder, 0, QUIET)
    job = folder / jobs.JOB_FILE
    job.write_text(json.dumps(json.loads(job.read_text()) | {"fingerprint_values": {}}))
    with pytest.raises(UserError, match="checksum"):
        jobs.train_one(folder, 0, QUIET)


def test_stage_2_goes_on_from_trained_blocks(prepared, configure, tmp_path):
    for block in (0, 1):
        jobs.train_one(prepared, block, QUIET)
    taken = {"block_layers": 2, "block_mode": "jobs", "job_folder": str(prepared)}
    adjust = {"enabled": True, "max_steps": 2, "batch_size": 2, "micro_batch_size": 2}
    report = linearize(configure(transfer=taken, adjust=adjust), tmp_path / "out", console=QUIET)
    assert report["perplexity"].keys() == {"teacher", "transfer", "adjust"}
    assert len(report["stages"]["transfer"]["blocks"]) == 2
    other = configure(transfer=taken, adjust=adjust, attention={"window_size": 8})
    with pytest.raises(UserError, match=r"attention.window_size"):
        linearize(other, tmp_path / "other", console=QUIET)
