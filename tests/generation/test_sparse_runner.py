"""A sparse cache in slots: steps that fold a block, and those of which the host knows that none does."""

from __future__ import annotations

import importlib

import pytest
import torch

from lolcats.config.attention import AttentionConfig
from lolcats.generation.runner import Graphs, Runner

WINDOW = 3  # of the kit's models; two blocks


class Keys(Graphs):
    """Runs eagerly, and remembers for which steps there would be graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: list = []

    def run(self, key, call, warm_up):
        self.keys.append(key)
        warm_up()
        return call()


@pytest.fixture(scope="module", params=["leverage", "recall"])
def sparse_model(request, kit):
    return kit.make_model(attention={"sparse_cache": 4, "cache_by": request.param, "sinks": 1})


def tokens_of(runner: Runner, prompts: list[list[int]], steps: int) -> list[list[int]]:
    """Greedy tokens; the slots' lengths differ, and so do the steps at which their blocks begin."""
    rows = list(range(len(prompts)))
    tokens = runner.prefill(rows, prompts).argmax(-1).tolist()
    found = [tokens]
    for _ in range(steps):
        tokens = runner.decode(tokens).argmax(-1).tolist()
        found.append(tokens)
    return [list(row) for row in zip(*found, strict=True)]


def expected(model, prompts: list[list[int]], steps: int) -> list[list[int]]:
    """The same without help of the host: every step looks for blocks to fold."""
    runner = Runner(model, len(prompts))
    runner.spec = AttentionConfig()
    return tokens_of(runner, prompts, steps)


def test_blocks_fold_where_the_host_says(kit, sparse_model):
    prompts = [kit.random_tokens(length, length) for length in (14, 2, 17)]
    runner = Runner(sparse_model, 4)
    runner.graphs = graphs = Keys()
    found = tokens_of(runner, prompts, 24)
    assert found == expected(sparse_model, prompts, 24)
    folds = [key[-1] for key in graphs.keys]
    # 14 and 17 tokens begin a block after one step; 2 tokens too, but the window holds them for three more.
    assert folds == [step % WINDOW == 1 for step in range(24)]
    assert len(set(graphs.keys)) == 2


def test_folds_that_the_host_forgets_are_missed(kit, sparse_model):
    """What the test above would find."""
    prompts = [kit.random_tokens(14, 14)]
    forgetful = Runner(sparse_model, 1)
    forgetful.spec = AttentionConfig("terraced", 1000, sparse_cache=4)
    assert tokens_of(forgetful, prompts, 24) != expected(sparse_model, prompts, 24)


def test_rows_that_do_not_decode_fold_nothing(kit, sparse_model):
    """A slot in prefill stands where a block begins; it keeps its state, and its length asks for no fold."""
    runner = Runner(sparse_model, 4)
    runner.graphs = graphs = Keys()
    runner.prefill([0, 1, 2, 3], [kit.random_tokens(length, length) for length in (7, 10, 13, 12)])
    before = runner.read(3)
    runner.decode([1, 2, 3])  # four rows run
    assert graphs.keys == [(4, 0, False, False)]
    runner.decode([1, 2, 3])
    runner.decode([1, 2, 3])
    assert graphs.keys[-1] == (4, 0, False, True)
    after = runner.read(3)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_models_without_a_sparse_cache_have_one_graph(kit, model):
    runner = Runner(model, 1)
    runner.graphs = graphs = Keys()
    tokens_of(runner, [kit.random_tokens(9, 0)], 7)
    assert len(set(graphs.keys)) == 1


@pytest.mark.parametrize("rows", [[2], [1, 2], [3, 1], [3, 2, 1]])
def test_layers_look_at_lengths_once(kit, sparse_model, rows, monkeypatch):
    """In passes of fresh slots, and of slots that go on."""
    runner = Runner(sparse_model, 4)
    calls: list = []

    def plans(*sources):
        calls.append(sources)
        return original(*sources)

    module = importlib.import_module("lolcats.ops.hybrid_attention.sparse_chunked")  # a function of this name hides it
    original = module.plans
    monkeypatch.setattr(module, "plans", plans)
    for index, length in enumerate((20, 11)):
        runner.prefill(rows, [kit.random_tokens(length - row, row) for row in rows])
        assert len(calls) == index + 1
