"""Kills, damaged files and full disks in streaming: finished blocks stay, messages name the file, resuming is exact."""

import errno
import json
import os
import shutil

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from toy_stage import Killed, failing

from lolcats.errors import UserError
from lolcats.parallel.blockwise.activation_cache import ActivationCache
from lolcats.parallel.blockwise.blocks import Blocks
from lolcats.pipeline import linearize
from lolcats.training import loop
from lolcats.training.checkpoint import finished, list_checkpoints

QUIET = Console(quiet=True)


@pytest.fixture
def streamed(configure, tmp_path):
    """Run streaming into one folder, by default resuming what is there."""

    def run(resume=True, **transfer):
        config = configure(transfer={"block_mode": "streaming", **transfer})
        return linearize(config, tmp_path / "out", resume=resume, console=QUIET)

    return run


@pytest.mark.parametrize(
    ("owner", "name", "number", "blocks"),
    [
        (loop, "write_checkpoint", 8, 1),  # in the middle of block 1
        # block 1 is trained, its inputs are still there
        pytest.param(Blocks, "_delete_inputs", 2, 2, marks=pytest.mark.slow),
    ],
)
def test_killed_and_resumed(owner, name, number, blocks, streamed, assert_equals_joint, tmp_path):
    with failing(owner, name, number), pytest.raises(Killed):
        streamed(resume=False)
    folder = tmp_path / "out" / "run" / "transfer"
    done = sorted(path.name for path in folder.glob("block-*") if finished(path))
    assert done == ["block-000", "block-001"][:blocks]
    assert list_checkpoints(folder / "block-001")
    streamed()
    assert_equals_joint(tmp_path / "out")
    assert not list(folder.rglob("*.data"))


def test_damaged_and_foreign_caches(streamed, assert_equals_joint, tmp_path):
    with failing(loop, "write_checkpoint", 8), pytest.raises(Killed):
        streamed(resume=False)
    with pytest.raises(UserError, match=r"run with other settings[\s\S]*transfer.lr"):
        streamed(lr=1e-4)
    (data,) = (tmp_path / "out" / "run" / "transfer").rglob("block-001-validation.data")
    content = np.memmap(data, dtype=np.uint8, mode="r+")
    content[100] ^= 255
    content.flush()
    remedy = "delete block-001-validation.data and block-001-validation.rows"
    with pytest.raises(UserError, match=rf"block-001-validation.data: .* sequence 0 .* checksum[\s\S]*{remedy}"):
        streamed()
    data.unlink()
    data.with_suffix(".rows").unlink()
    streamed()
    assert_equals_joint(tmp_path / "out")


def test_a_full_disk_while_blocks_are_trained(streamed, assert_equals_joint, tmp_path):
    with failing(ActivationCache, "write", 30, UserError("no room")), pytest.raises(UserError, match="no room"):
        streamed(resume=False)
    streamed()
    assert_equals_joint(tmp_path / "out")


def test_a_full_disk_when_a_cache_is_made(tmp_path):
    full, message = OSError(errno.ENOSPC, "No space left on device"), r"a.data: No space left on device .*--resume"
    with failing(os, "posix_fallocate", 1, full), pytest.raises(UserError, match=message):
        ActivationCache(tmp_path / "a", np.arange(3), tokens=2, hidden=4, dtype=torch.float32)
    assert not list(tmp_path.iterdir())


def test_missing_and_damaged_shards(broken_model, configure, tmp_path):
    folder, shard_of = broken_model(tmp_path / "model")
    config = configure(transfer={"block_mode": "streaming"}, model={"path": str(folder)})
    name = "model.layers.2.mlp.up_proj.weight"
    shard = shard_of(name)
    content = shard.read_bytes()

    def refused(match):
        with pytest.raises(UserError, match=match):
            linearize(config, tmp_path / "out", console=QUIET)
        shutil.rmtree(tmp_path / "out", ignore_errors=True)

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
    changed = json.loads(index.read_text())
    del changed["weight_map"][name]
    index.write_text(json.dumps(changed))
    refused(rf"no tensor for {name}")
    index.write_text("{")
    refused("is not an index")
