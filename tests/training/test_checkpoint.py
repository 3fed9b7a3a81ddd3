"""Checkpoints: exact, complete or not there at all, and a damaged one is found and explained."""

from __future__ import annotations

import errno
import json
import os

import pytest
import torch
from toy_stage import TENSORS, folders

from lolcats.errors import UserError
from lolcats.training.checkpoint import (
    CorruptCheckpoint,
    checkpoint_path,
    read_checkpoint,
    read_json,
    write_checkpoint,
    write_json,
)


def tensors():
    return {
        "weights": {"a": torch.randn(3, 4), "b": torch.randn(2).bfloat16(), "transposed": torch.randn(3, 4).T},
        "optimizer": {"0/a/step": torch.tensor(7.0), "0/a/exp_avg": torch.randn(3, 4)},
    }


def write(directory, step, kind="step", value=None):
    return write_checkpoint(checkpoint_path(directory, kind, step), value or tensors(), {"step": step})


@pytest.mark.parametrize("file_bytes", [2**32, 20])
def test_round_trip_is_exact_and_without_pickle(tmp_path, monkeypatch, file_bytes):
    monkeypatch.setattr("lolcats.training.checkpoint.FILE_BYTES", file_bytes)
    written = tensors() | {"nothing": {}}
    state = {"best": 0.1 + 0.2, "nothing": None, "history": [{"loss": 1e-300}]}
    path = write_checkpoint(checkpoint_path(tmp_path, "step", 12), written, state)
    read = read_checkpoint(path)
    assert read.state == state
    assert read.tensors.keys() == written.keys()
    for kind, group in written.items():
        assert read.tensors[kind].keys() == group.keys()
        for name, tensor in group.items():
            assert read.tensors[kind][name].dtype == tensor.dtype
            assert torch.equal(read.tensors[kind][name], tensor)
    names = folders(path)
    assert {name.rpartition(".")[2] for name in names} == {"safetensors", "json"}
    assert (len(names) == 2) == (file_bytes > 20)


@pytest.mark.parametrize("name", [TENSORS, "state.json"])
def test_every_changed_byte_is_found(tmp_path, name):
    path = write(tmp_path, 1)
    original = (path / name).read_bytes()
    for position in range(0, len(original), max(len(original) // 40, 1)):
        data = bytearray(original)
        data[position] ^= 4
        if name == "state.json" and _same_json(data, original):
            continue
        (path / name).write_bytes(data)
        with pytest.raises(CorruptCheckpoint, match=name):
            read_checkpoint(path)
    (path / name).write_bytes(original)
    read_checkpoint(path)


def _same_json(first, second):
    try:
        return json.loads(first) == json.loads(second)
    except ValueError:
        return False


def full_disk(*arguments, **options):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("call", range(1, 4))
def test_full_disk_keeps_the_old_checkpoint(tmp_path, monkeypatch, call):
    """The disk is full at the first, second, ... flush before the folder gets its name."""
    old = read_checkpoint(write(tmp_path, 1))
    count = [0]
    fsync = os.fsync

    def failing(descriptor):
        count[0] += 1
        if count[0] == call:
            full_disk()
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing)
        with pytest.raises(UserError, match=r"No space left.*step-00000001 is intact.*--resume"):
            write(tmp_path, 2)
        assert folders(tmp_path) == ["step-00000001"]
    for name, tensor in read_checkpoint(tmp_path / "step-00000001").tensors["weights"].items():
        assert torch.equal(tensor, old.tensors["weights"][name])
    write(tmp_path, 2)


def test_json_round_trip_and_damage(tmp_path, monkeypatch):
    file = tmp_path / "done.json"
    write_json(file, {"value": 0.1})
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        with pytest.raises(UserError, match=r"cannot write \S*done\.json: .*No space left"):
            write_json(file, {"value": 2})
    assert read_json(file) == {"value": 0.1}
    assert folders(tmp_path) == ["done.json"]
    for text in (file.read_text().replace("0.1", "0.2"), "{", "[]", "{}"):
        file.write_text(text)
        with pytest.raises(CorruptCheckpoint, match=r"done\.json is damaged"):
            read_json(file)
