"""How work and weights are divided; no process is started."""

from __future__ import annotations

import pytest
import torch

from lolcats.config import TransferSection
from lolcats.errors import UserError
from lolcats.parallel.group import Group, fit_micro_batches
from lolcats.parallel.sharding import shard_of


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
        assert torch.equal(whole[shard_of(rows, rank, world)], chunks[rank])


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
