"""Which runs divide their weights; no process is started."""

from __future__ import annotations

import pytest

from lolcats.config import LinearizeConfig, merge
from lolcats.modeling.loading import load_skeleton
from lolcats.parallel.group import Group
from lolcats.parallel.sharding import held_bytes, shards_weights


@pytest.fixture
def decide(settings, monkeypatch):
    """decide(changes, memory of each process, as a multiple of the model's) -> whether weights are divided."""
    model = held_bytes(load_skeleton(LinearizeConfig.from_dict(settings).model)[0], trains_all=False)
    monkeypatch.setattr(Group, "main_first", Group.sync_errors)
    monkeypatch.setattr(Group, "all_agree", lambda *_: None)

    def decided(changes, *memory):
        monkeypatch.setattr(Group, "gather", lambda *_: [model * times for times in memory])
        config = LinearizeConfig.from_dict(merge(settings, {"parallel": {"shard": "auto"}} | changes))
        return shards_weights(config, Group(0, len(memory)))

    return decided


def test_weights_are_whole_where_they_are_small(decide):
    assert not decide({}, 5, 5)
    assert decide({}, 5, 3)  # the smallest GPU counts
    assert not decide({}, 0.1)  # one process has nothing to divide


def test_full_finetuning_holds_four_times_as_much(decide):
    assert decide({"adjust": {"method": "full"}}, 15, 15)
    assert not decide({"adjust": {"method": "full"}}, 17, 17)
    assert not decide({"adjust": {"method": "full", "enabled": False}}, 15, 15)


def test_what_was_said_counts(decide):
    assert decide({"parallel": {"shard": "on"}}, 100, 100)
    assert decide({"parallel": {"shard": True}}, 100, 100)  # a bare `on` in YAML
    assert not decide({"parallel": {"shard": False}}, 1, 1)
    assert decide({"parallel": {"cpu_offload": True}}, 100, 100)


@pytest.mark.parametrize("section", [{"model": {"gguf_file": "it.gguf"}}, {"data": {"top_esl": 10}}])
def test_what_cannot_be_divided_is_whole(decide, section):
    assert not decide(section, 1, 1)
