"""How work and weights are shared, and which rank reports what; no process is started."""

import pytest
import torch

from lolcats.config import LinearizeConfig, TransferSection, merge
from lolcats.errors import UserError
from lolcats.modeling.loading import load_skeleton
from lolcats.parallel import sharding
from lolcats.parallel.group import SINGLE, Group, fit_micro_batches
from lolcats.parallel.launch import open_group


class OneOfSeveral(Group):
    """A rank whose others do the same as it does."""

    def gather(self, value):
        return [value] * self.world

    def broadcast(self, value):
        return value

    main_first = Group.sync_errors


# --- shares -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("items", [0, 1, 4, 7])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_item_counts_once_and_all_ranks_get_equally_many(items, world, monkeypatch):
    parts, calls = [], []
    monkeypatch.setattr(Group, "gather", lambda self, own: parts.append(own) or [own])
    for rank in range(world):
        before = len(calls)
        Group(rank, world).sums(range(items), lambda item: (calls.append(item) or torch.tensor([[item]]), 1))
        assert len(calls) - before == -(-items // world)
    assert sorted(values[0] for own in parts for values, _ in own) == list(range(items))


@pytest.mark.parametrize(
    ("batch", "micro", "world", "expected"), [(8, 8, 1, 8), (8, 8, 4, 2), (8, 2, 4, 2), (12, 4, 2, 3), (8, 4, 8, 1)]
)
def test_micro_batches_become_small_enough(batch, micro, world, expected):
    said = []
    section = TransferSection(batch_size=batch, micro_batch_size=micro)
    fitted = fit_micro_batches(section, "transfer", Group(0, world), said.append)
    assert fitted.micro_batch_size == expected
    assert len(said) == (expected != micro)
    with pytest.raises(UserError, match=r"transfer.batch_size=\d+ cannot be shared equally by 16 processes"):
        fit_micro_batches(section, "transfer", Group(0, 16), print)


@pytest.mark.parametrize(
    ("changes", "memory", "expected"),
    [
        ({}, 5, False),  # in multiples of the model
        ({}, 3, True),
        ({"parallel": {"shard": True}}, 100, True),  # a bare `on` in YAML
        ({"parallel": {"shard": False}}, 1, False),
        ({"model": {"load_in_4bit": True}}, 1, False),
    ],
)
def test_which_runs_shard_their_weights(changes, memory, expected, both_stages, monkeypatch):
    model = load_skeleton(LinearizeConfig.from_dict(both_stages).model)
    held = sum(parameter.nbytes for parameter in model.parameters())
    monkeypatch.setattr(sharding, "memory_bytes", lambda group: held * memory)
    config = LinearizeConfig.from_dict(merge(both_stages, merge({"parallel": {"shard": "auto"}}, changes)))
    assert sharding.shards_weights(config, OneOfSeveral(0, 2)) == expected
    assert not sharding.shards_weights(config, SINGLE)


# --- joining ------------------------------------------------------------------------------------------------


def test_one_process_needs_no_torchrun(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    with open_group() as group:
        assert group is SINGLE
    with pytest.raises(ValueError, match="as it was"), SINGLE.sync_errors():
        raise ValueError("as it was")


@pytest.mark.parametrize(
    ("environment", "device", "message"),
    [
        ({"MASTER_ADDR": None}, "auto", "started by torchrun.*MASTER_ADDR"),
        ({}, "cuda:1", "model.device='cuda:1': with several processes"),
        ({"RANK": "1"}, "cpu", "did not meet"),
    ],
)
def test_processes_that_cannot_meet(environment, device, message, monkeypatch):
    variables = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"} | environment
    for name, value in variables.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=message), open_group(device, 0.5):
        pass
