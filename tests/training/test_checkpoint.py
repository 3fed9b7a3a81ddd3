from __future__ import annotations

import errno
import json
import os
import subprocess
import sys

import pytest
import torch
from toy_stage import folders

from lolcats.errors import UserError
from lolcats.training import checkpoint
from lolcats.training.checkpoint import latest_checkpoint, read_checkpoint, write_checkpoint
from lolcats.training.checkpoint_folders import checkpoint_path
from lolcats.training.durable_files import CorruptCheckpoint


def tensors():
    return {
        "weights": {"a": torch.randn(3, 4), "b": torch.randn(2).bfloat16()},
        "optimizer": {"0/a/step": torch.tensor(7.0), "0/a/exp_avg": torch.randn(3, 4)},
    }


def write(directory, step, kind="step", value=None):
    return write_checkpoint(checkpoint_path(directory, kind, step), value or tensors(), {"step": step})


def test_round_trip_is_exact(tmp_path):
    written = tensors()
    state = {"best": 0.1 + 0.2, "nothing": None, "history": [{"loss": 1e-300}]}
    path = write_checkpoint(checkpoint_path(tmp_path, "step", 12), written, state)
    read = read_checkpoint(path)
    assert read.step == 12
    assert read.state == state
    assert read.tensors.keys() == written.keys()
    for stem, group in written.items():
        assert read.tensors[stem].keys() == group.keys()
        for name, tensor in group.items():
            assert read.tensors[stem][name].dtype == tensor.dtype
            assert torch.equal(read.tensors[stem][name], tensor)


def test_only_safetensors_and_json(tmp_path):
    path = write(tmp_path, 100)
    assert folders(tmp_path) == ["step-00000100"]
    assert folders(path) == ["optimizer.safetensors", "state.json", "weights.safetensors"]


def test_tied_and_strided_tensors(tmp_path):
    base = torch.randn(4, 6)
    path = write(tmp_path, 1, value={"weights": {"a": base, "tied": base, "transposed": base.T}})
    read = read_checkpoint(path).tensors["weights"]
    assert torch.equal(read["tied"], base)
    assert torch.equal(read["transposed"], base.T)


def test_no_tensors(tmp_path):
    assert read_checkpoint(write(tmp_path, 1, value={"optimizer": {}})).tensors == {"optimizer": {}}


def test_read_tensors_outlive_the_file(tmp_path):
    path = write(tmp_path, 1)
    before = read_checkpoint(path).tensors["weights"]["a"]
    kept = before.clone()
    (path / "weights.safetensors").write_bytes(b"\0" * 10)
    assert torch.equal(before, kept)


def test_latest_passes_over_damaged_ones(tmp_path):
    reports = []
    assert latest_checkpoint(tmp_path, reports.append) is None
    write(tmp_path, 1)
    write(tmp_path, 2)
    latest = latest_checkpoint(tmp_path, reports.append)
    assert latest is not None
    assert latest.step == 2
    assert reports == []
    (tmp_path / "step-00000002" / "state.json").write_text("{")
    latest = latest_checkpoint(tmp_path, reports.append)
    assert latest is not None
    assert latest.step == 1
    assert len(reports) == 1
    assert "step-00000002" in reports[0]
    (tmp_path / "step-00000001" / "weights.safetensors").unlink()
    with pytest.raises(CorruptCheckpoint, match="no intact checkpoint") as caught:
        latest_checkpoint(tmp_path, reports.append)
    assert "step-00000001" in str(caught.value)
    assert "step-00000002" in str(caught.value)


@pytest.mark.parametrize("name", ["weights.safetensors", "optimizer.safetensors", "state.json"])
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


def test_changed_value_in_state_is_found(tmp_path):
    path = write(tmp_path, 5)
    content = json.loads((path / "state.json").read_text())
    content["state"]["step"] = 6
    (path / "state.json").write_text(json.dumps(content))
    with pytest.raises(CorruptCheckpoint, match="checksum"):
        read_checkpoint(path)


def test_other_format_version_is_named(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "FORMAT_VERSION", 99)
        path = write(tmp_path, 1)
    with pytest.raises(CorruptCheckpoint, match="expected checkpoint format 1, got 99"):
        read_checkpoint(path)


def test_rewriting_replaces(tmp_path):
    write(tmp_path, 1)
    path = write(tmp_path, 1, value={"weights": {"new": torch.ones(1)}})
    assert list(read_checkpoint(path).tensors["weights"]) == ["new"]
    assert folders(tmp_path) == ["step-00000001"]


def full_disk(*arguments, **options):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("call", range(1, 6))
def test_full_disk_keeps_the_old_checkpoint(tmp_path, monkeypatch, call):
    """The disk is full at the first, second, ... flush."""
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
        if call == 5:  # the flush after renaming: the new one is complete, but maybe not yet on the disk
            with pytest.raises(UserError):
                write(tmp_path, 2)
        else:
            with pytest.raises(UserError, match=r"No space left.*step-00000001 is intact.*--resume"):
                write(tmp_path, 2)
            assert folders(tmp_path) == ["step-00000001"]
    for name, tensor in read_checkpoint(tmp_path / "step-00000001").tensors["weights"].items():
        assert torch.equal(tensor, old.tensors["weights"][name])
    write(tmp_path, 2)


def test_failed_rewriting_keeps_the_old_one(tmp_path, monkeypatch):
    path = write(tmp_path, 1, value={"weights": {"old": torch.ones(1)}})
    rename = type(path).rename

    def failing(self, target):
        if self.name == ".tmp-step-00000001":
            full_disk()
        return rename(self, target)

    monkeypatch.setattr(type(path), "rename", failing)
    with pytest.raises(UserError, match="No space left"):
        write(tmp_path, 1)
    assert list(read_checkpoint(path).tensors["weights"]) == ["old"]
    assert folders(tmp_path) == ["step-00000001"]


LIMITED = """
import resource, sys
from pathlib import Path
import torch
from lolcats.errors import UserError
from lolcats.training.checkpoint import read_checkpoint, write_checkpoint
from lolcats.training.checkpoint_folders import checkpoint_path
directory = Path(sys.argv[1])
old = write_checkpoint(checkpoint_path(directory, "step", 1), {"weights": {"a": torch.ones(10)}}, {})
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    write_checkpoint(checkpoint_path(directory, "step", 2), {"weights": {"a": torch.ones(100_000)}}, {})
except UserError as error:
    print(error)
read_checkpoint(old)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX file size limit")
def test_real_write_error_inside_safetensors(tmp_path):
    """A file size limit stands for the full disk: the error comes from the library's own writing."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "too large" in done.stdout
    assert "step-00000001 is intact" in done.stdout
    assert folders(tmp_path) == ["step-00000001"]


def test_unwritable_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write.*No earlier checkpoint"):
        write(tmp_path / "file", 1)
