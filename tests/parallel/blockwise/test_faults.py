"""Kills, damaged files and full disks: what is finished stays, messages name the file, resuming gives the same."""

import errno
import json
import shutil

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from lolcats.errors import UserError
from lolcats.parallel.blockwise import activation_cache, streaming
from lolcats.pipeline import linearize
from lolcats.training.checkpoint import list_checkpoints
from lolcats.training.folder import RunFolder
from lolcats.training.readings import TrainingDiverged
from lolcats.training.transfer import TransferStage

QUIET = Console(quiet=True)


class Killed(BaseException):
    """Stands for a signal: nothing catches it."""


@pytest.fixture
def streamed(configure, tmp_path):
    """Run streaming into one folder, by default going on with what is there."""

    def run(resume=True, **transfer):
        config = configure(transfer={"block_mode": "streaming", **transfer})
        return linearize(config, tmp_path / "out", resume=resume, console=QUIET)

    return run


@pytest.fixture
def equals_joint(joint, feature_maps, tmp_path):
    def check():
        found, expected = feature_maps(tmp_path / "out"), feature_maps(joint(1)[0])
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name

    return check


def kill_at(monkeypatch, owner, name, calls):
    """`owner.name` raises Killed at the given call, counted from 1."""
    original = getattr(owner, name)
    left = [calls]

    def counted(*arguments, **keywords):
        left[0] -= 1
        if left[0] == 0:
            raise Killed
        return original(*arguments, **keywords)

    monkeypatch.setattr(owner, name, counted)


@pytest.mark.parametrize("where", ["steps", "rows", "handing on"])
@pytest.mark.parametrize("place", ["disk", "memory"])
def test_killed_and_resumed(where, place, streamed, equals_joint, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        if where == "steps":
            kill_at(patch, RunFolder, "save", 14)  # in the middle of block 1
        elif where == "rows":
            kill_at(patch, activation_cache.ActivationCache, "write", 40)
        else:
            kill_at(patch, streaming, "_complete", 2)  # block 1 is trained, its outputs are not complete
        with pytest.raises(Killed):
            streamed(resume=False, activation_cache=place)
    folder = tmp_path / "out" / "run" / "transfer"
    done = sorted(path.parent.name for path in folder.glob("block-*/done.json"))
    assert done == {"steps": ["block-000"], "rows": ["block-000"], "handing on": ["block-000", "block-001"]}[where]
    if where == "steps":
        assert list_checkpoints(folder / "block-001", "step")
    streamed(activation_cache=place)
    equals_joint()
    assert not list(folder.rglob("*.data"))


def test_a_damaged_row_is_found_and_made_again(streamed, equals_joint, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        kill_at(patch, RunFolder, "save", 14)
        with pytest.raises(Killed):
            streamed(resume=False)
    data = tmp_path / "out" / "run" / "transfer" / "activations" / "block-001-train.data"
    content = np.memmap(data, dtype=np.uint8, mode="r+")
    content[100] ^= 255
    content.flush()
    with pytest.raises(UserError, match=r"block-001-train.data: the hidden states of sequence 0 .* checksum") as caught:
        streamed()
    assert "delete block-001-train.data and block-001-train.rows" in str(caught.value)
    data.unlink()
    data.with_suffix(".rows").unlink()
    streamed()
    equals_joint()


def test_the_cache_of_another_run_is_refused(streamed, configure, monkeypatch, tmp_path):
    shared = str(tmp_path / "shared")
    with monkeypatch.context() as patch:
        kill_at(patch, RunFolder, "save", 14)
        with pytest.raises(Killed):
            streamed(resume=False, activation_cache_folder=shared)
    other = configure(transfer={"block_mode": "streaming", "activation_cache_folder": shared, "lr": 1e-4})
    with pytest.raises(UserError, match=r"hidden states of another run[\s\S]*transfer.lr"):
        linearize(other, tmp_path / "other", console=QUIET)


def test_a_full_disk(streamed, equals_joint, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
        with pytest.raises(UserError, match=r"hidden states of 2 blocks need .* GiB .* free"):
            streamed(resume=False)
    write = activation_cache.ActivationCache._write_file
    left = [30]

    def full(self, offset, content):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, offset, content)

    with monkeypatch.context() as patch:
        patch.setattr(activation_cache.ActivationCache, "_write_file", full)
        with pytest.raises(OSError, match="No space"):
            streamed()
    streamed()
    equals_joint()


def test_a_full_disk_while_a_row_is_written(tmp_path):
    rows = activation_cache.ActivationCache(tmp_path / "a", np.arange(3), tokens=2, hidden=4, dtype=torch.float32)
    rows.write(np.array([0]), torch.ones(1, 2, 4))

    class Full:
        def seek(self, offset):
            pass

        def write(self, view):
            raise OSError(errno.ENOSPC, "No space left on device")

    rows._file = Full()
    with pytest.raises(UserError, match=r"a.data: No space left on device .*--resume"):
        rows.write(np.array([1]), torch.ones(1, 2, 4))
    assert rows.missing().tolist() == [1, 2]
    assert torch.equal(rows.read(np.array([0])), torch.ones(1, 2, 4))


@pytest.fixture
def broken_model(deep_model_dir, tmp_path):
    """A copy of the model in shards, and the name of the shard that holds a tensor."""
    folder = tmp_path / "model"
    shutil.copytree(deep_model_dir, folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return folder, lambda name: folder / index["weight_map"][name]


def test_missing_and_damaged_shards(broken_model, configure, tmp_path):
    folder, shard_of = broken_model
    config = configure(transfer={"block_mode": "streaming"}, model={"path": str(folder)})
    name = "model.layers.2.mlp.up_proj.weight"
    shard = shard_of(name)
    content = shard.read_bytes()

    def refused(match):
        with pytest.raises(UserError, match=match):
            linearize(config, tmp_path / "out", resume=True, console=QUIET)

    shard.unlink()
    refused(rf"names {shard.name}.*not found")
    shard.write_bytes(content[:-20])
    refused(rf"{shard.name} is damaged")
    shard.write_bytes(content)
    tensors = load_file(shard)
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, shard)
    refused(rf"{shard.name} does not hold the tensor {name}")
    save_file(tensors | {name: torch.zeros(3, 3)}, shard)
    refused(rf"{name}.* has shape \[3, 3\]")
    index = folder / "model.safetensors.index.json"
    saved = index.read_text()
    changed = json.loads(saved)
    del changed["weight_map"][name]
    index.write_text(json.dumps(changed))
    refused(rf"no tensor for {name}")
    index.write_text("{")
    refused("is not an index")


def test_nan_ends_the_block_and_keeps_what_is_finished(streamed, equals_joint, monkeypatch, tmp_path):
    step = TransferStage._gradient_step
    calls = [0]

    def spoilt(self, inputs, scale):
        calls[0] += 1
        result = step(self, inputs, scale)
        if list(self.layers) == [1]:
            result["layers"] = result["layers"] * float("nan")
        return result

    with monkeypatch.context() as patch:
        patch.setattr(TransferStage, "_gradient_step", spoilt)
        with pytest.raises(TrainingDiverged, match="the loss of layer 1 is nan"):
            streamed(resume=False)
    assert (tmp_path / "out" / "run" / "transfer" / "block-000" / "done.json").exists()
    streamed()
    equals_joint()
