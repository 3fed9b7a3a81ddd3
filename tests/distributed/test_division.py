"""How work, weights and errors are divided; no process is started."""

from __future__ import annotations

import pytest
import torch

from lolcats.config import TransferSection
from lolcats.distributed.division import fit_micro_batches
from lolcats.distributed.group import SINGLE
from lolcats.distributed.group import Group
from lolcats.distributed.group import open_group
from lolcats.distributed.sharding import share_of
from lolcats.errors import UserError


@pytest.mark.parametrize("items", [0, 1, 4, 7])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_item_counts_once_and_all_ranks_get_equally_many(items, world):
    shares = [Group(rank, world).share(range(items)) for rank in range(world)]
    assert sorted(item for share in shares for item, counts in share if counts) == list(range(items))
    assert len({len(share) for share in shares}) == 1


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 62])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_rows_are_divided_as_torch_chunks_them(rows, world):
    whole = torch.arange(rows)
    chunks = [*whole.chunk(world), *[whole[:0]] * world][:world]
    for rank in range(world):
        assert torch.equal(whole[share_of(rows, rank, world)], chunks[rank])


@pytest.mark.parametrize(
    ("batch", "micro", "world", "expected"), [(8, 8, 1, 8), (8, 8, 4, 2), (8, 2, 4, 2), (12, 4, 2, 3), (8, 4, 8, 1)]
)
def test_micro_batches_become_small_enough(batch, micro, world, expected):
    said = []
    section = TransferSection(batch_size=batch, micro_batch_size=micro)
    fitted = fit_micro_batches(section, "transfer", Group(0, world), said.append)
    assert fitted.micro_batch_size == expected
    assert (batch // expected) % world == 0
    assert len(said) == (expected != micro)


def test_more_processes_than_sequences_are_refused():
    section = TransferSection(batch_size=2, micro_batch_size=1)
    with pytest.raises(UserError, match=r"transfer.batch_size=2 cannot be shared equally by 4 processes"):
        fit_micro_batches(section, "transfer", Group(0, 4), print)


def test_one_process_needs_no_torchrun(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    with open_group() as group:
        assert group is SINGLE
    error = ValueError("as it was")
    with pytest.raises(ValueError, match="as it was"), SINGLE.together():
        raise error


def test_incomplete_variables_are_named(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(UserError, match=r"WORLD_SIZE=2, but MASTER_ADDR is not set; start with torchrun"), open_group():
        pass


def test_a_gpu_per_process_cannot_be_named(monkeypatch):
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"model.device='cuda:1': with several processes"), open_group("cuda:1"):
        pass


def test_processes_that_do_not_meet(monkeypatch):
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"did not meet at 127.0.0.1:1 within 0.5 s"), open_group("cpu", 0.5):
        pass
