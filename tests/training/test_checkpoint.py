"""Checkpoints: exact, complete or not there at all, and a damaged one is found and explained."""

import errno
import os

import pytest
import torch
from toy_stage import failing, folders

from lolcats.errors import UserError
from lolcats.training.checkpoint import STATE_FILE, list_checkpoints, read_checkpoint, write_checkpoint


def tensors():
    return {
        "weights": {"a": torch.randn(3, 4), "b": torch.randn(2).bfloat16(), "transposed": torch.randn(3, 4).T},
        "optimizer": {"0/a/step": torch.tensor(7.0), "0/a/exp_avg": torch.randn(3, 4)},
    }


def test_round_trip_is_exact_and_without_pickle(tmp_path):
    written, state = tensors(), {"best": 0.1 + 0.2, "nothing": None, "history": [{"loss": 1e-300}]}
    write_checkpoint(tmp_path, 12, written, state)
    (path,) = list_checkpoints(tmp_path)
    read, plain = read_checkpoint(path)
    assert plain == state
    assert read.keys() == written.keys()
    for kind, group in written.items():
        assert read[kind].keys() == group.keys()
        for name, tensor in group.items():
            assert read[kind][name].dtype == tensor.dtype
            assert torch.equal(read[kind][name], tensor)
    assert folders(path) == ["state.json", "tensors.safetensors"]


@pytest.mark.parametrize("call", range(1, 3))
def test_full_disk_keeps_the_old_checkpoint(tmp_path, call):
    """The disk is full at the first or second flush before the folder gets its name."""
    old, full = tensors(), OSError(errno.ENOSPC, "No space left on device")
    write_checkpoint(tmp_path, 1, old, {})
    message = r"No space left.*step-00000001 is intact.*--resume"
    with failing(os, "fsync", call, full), pytest.raises(UserError, match=message):
        write_checkpoint(tmp_path, 2, tensors(), {})
    assert folders(tmp_path) == ["step-00000001"]
    for name, tensor in read_checkpoint(tmp_path / "step-00000001")[0]["weights"].items():
        assert torch.equal(tensor, old["weights"][name])
    write_checkpoint(tmp_path, 2, tensors(), {})
    assert folders(tmp_path) == ["step-00000002"]


@pytest.mark.parametrize("suffix", [".safetensors", ".json"])
def test_a_truncated_file_is_explained(tmp_path, suffix):
    write_checkpoint(tmp_path, 1, tensors(), {"a": 1})
    (path,) = list_checkpoints(tmp_path)
    (file,) = path.glob(f"*{suffix}")
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(UserError, match=rf"{path} is damaged.*\n.*from its beginning"):
        read_checkpoint(path)
    (path / STATE_FILE).unlink()
    assert not list_checkpoints(tmp_path)
