"""Drafts by lookup for linearized models: the tokens of the model without a draft."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from generation_kit import BOUNDED, HYBRID

from lolcats.generation.drafting import PassCosts
from lolcats.generation.engine import Engine
from lolcats.generation.graphs import Graphs
from lolcats.generation.layer_slots import HybridSlots, SoftmaxSlots
from lolcats.generation.lookup import Lookup, LookupRounds, Repetitions
from lolcats.generation.runner import Runner
from lolcats.generation.sampling import SamplingParams
from lolcats.generation.slots import SlotCache
from lolcats.modeling.call import Reach

LENGTHS = [1, 2, 17, 30, 7, 3, 50]
LOOKUP = Lookup(most=4, longest=2, shortest=1, adapt=False)
KINDS: dict[str, dict[str, Any]] = {
    "linear, blocks of 3": {},
    "linear, blocks of 16, sinks, a length cap": {
        "attention": {"window_size": 16, "sinks": 2, "linear_length_cap": 20}
    },
    "linear, softmax and native windows": HYBRID,
    "exact heads": {"attention": {"exact": ["0.1", 1], "window_size": 8}},
    "bounded exact heads": BOUNDED,
    "in 8 bits": {"attention": BOUNDED["attention"] | {"exact_bits": 8, "window_size": 4}},
    "no linear part": {"attention": {"feature_map": None, "window_size": 5}},
}


@pytest.fixture(scope="module")
def prompts(kit):
    return [kit.random_tokens(length, seed) for seed, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def answers(kit, prompts) -> Callable[[str], tuple[Any, list[list[int]]]]:
    """By kind, a model in float32 and its own greedy answers, one by one."""
    made: dict[str, Any] = {}

    def of(kind: str) -> tuple[Any, list[list[int]]]:
        if kind not in made:
            model = kit.make_model(**KINDS[kind], dtype=torch.float32)
            made[kind] = model, [kit.greedy(model, prompt, 24) for prompt in prompts]
        return made[kind]

    return of


@pytest.fixture
def known_drafts(monkeypatch, prompts) -> Callable[[list[list[int]]], None]:
    """Drafts are the answers, from some token on wrong: random models seldom repeat themselves."""

    def use(expected: list[list[int]]) -> None:
        whole, source = [a + b for a, b in zip(prompts, expected, strict=True)], random.Random(0)

        def draft(self: Any, tokens: list[int], settings: Lookup) -> list[int]:
            found = next((row[len(tokens) :] for row in whole if row[: len(tokens)] == list(tokens)), [])
            guess = found[: source.randint(0, settings.most)]
            right = source.randint(0, settings.most)
            return [token if place < right else (token + 1) % 128 for place, token in enumerate(guess)]

        monkeypatch.setattr(Repetitions, "draft", draft)

    return use


def answer(model: Any, tokenizer: Any, prompts: list[list[int]], graphs: bool, draft: Any = LOOKUP) -> list[list[int]]:
    """Batched, of mixed lengths, beside prompts in prefill."""
    engine = Engine(model, tokenizer, max_slots=3, prefill_chunk=8, draft=draft)
    if graphs:  # rows and keys as CUDA graphs have them
        engine.runner.graphs = Graphs()
        engine.runner.graphs.works = False
    results = engine.generate(prompts, SamplingParams(max_new_tokens=24))
    assert engine.counts["free_slots"] == 3
    return [result.token_ids for result in results]


@pytest.mark.parametrize("graphs", [False, True], ids=["", "as graphs"])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_the_models_own(tokenizer, prompts, answers, known_drafts, kind, graphs, monkeypatch):
    model, expected = answers(kind)
    rounds: list[list[int]] = []
    keep = Runner.keep
    monkeypatch.setattr(Runner, "keep", lambda self, counts: (rounds.append(counts), keep(self, counts))[1])
    known_drafts(expected)
    assert answer(model, tokenizer, prompts, graphs) == expected
    assert len({tuple(tokens) for tokens in expected}) > 4
    taken = [count for counts in rounds for count in counts]
    longest = min(5, model.config.attention.window_size)
    assert {1, 2, 3} <= set(taken) <= set(range(1, longest + 1))


@pytest.mark.parametrize("kind", ["linear, blocks of 3", "exact heads", "bounded exact heads"])
def test_lookups_of_random_models(tokenizer, prompts, answers, kind):
    """What is looked up is rejected mostly."""
    model, expected = answers(kind)
    assert answer(model, tokenizer, prompts, False) == expected


def no_limits(patch: Any) -> None:
    patch.setattr(Runner, "limits", lambda self, count: None)


def positions_stay(patch: Any) -> None:
    patch.setattr(SlotCache, "set_lengths", lambda self, length_B: None)


def nothing_to_go_back_to(patch: Any) -> None:
    init = SlotCache.__init__
    patch.setattr(SlotCache, "__init__", lambda self, *args, most_removed: init(self, *args))


def everything_is_seen(patch: Any) -> None:
    init = SoftmaxSlots.__init__

    def wrong(self: Any, *args: Any) -> None:
        init(self, *args)
        if self.reach is not None:
            self.reach = Reach(self.reach.tokens + 1, self.sinks)

    patch.setattr(SoftmaxSlots, "__init__", wrong)


def rejected_tokens_stay(patch: Any) -> None:
    keep = Runner.keep
    patch.setattr(Runner, "keep", lambda self, counts: keep(self, [count + 1 for count in counts]))


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (no_limits, "linear, blocks of 3"),
        (positions_stay, "linear, blocks of 16, sinks, a length cap"),
        (rejected_tokens_stay, "linear, blocks of 16, sinks, a length cap"),
        (nothing_to_go_back_to, "bounded exact heads"),
        (everything_is_seen, "bounded exact heads"),
        (everything_is_seen, "linear, softmax and native windows"),
    ],
)
def test_wrong_rounds_are_found(tokenizer, prompts, answers, known_drafts, fault, kind, monkeypatch):
    """The wrong variants of the first test."""
    model, expected = answers(kind)
    known_drafts(expected)
    fault(monkeypatch)
    assert answer(model, tokenizer, prompts, False) != expected


@pytest.mark.parametrize("kind", ["bounded exact heads", "linear, softmax and native windows"])
def test_a_check_is_as_the_model_step_by_step(kit, answers, kind):
    """Logits of a round, whatever was drafted and rejected before; a row that takes no part stays as it is."""
    model, _ = answers(kind)
    runner, alone = Runner(model, 4, 64, draft=LOOKUP), Runner(model, 4, 64)
    prompts = [kit.random_tokens(length, length) for length in (9, 4, 21)]
    runner.prefill([0, 1, 2], prompts)
    before = runner.read(2)
    alone.prefill([0, 1], prompts[:2])
    for number, wanted in enumerate(([1, 3], [5, 1], [2, 2], [3, 5])):
        tokens = [kit.random_tokens(5, 10 * number + row) for row in range(2)]
        limits = runner.limits(2)
        assert limits == [3 - length % 3 for length in runner.lengths[:2]]
        kept = [min(pair) for pair in zip(wanted, limits, strict=True)]
        _, logits_BTV = runner.check(tokens)
        for row, count in enumerate(kept):
            for column in range(count):
                expected = alone.prefill([row], [[tokens[row][column]]])[0]
                torch.testing.assert_close(logits_BTV[row, column], expected, rtol=1e-4, atol=1e-4)
        runner.keep(kept)
        for part in runner.cache.parts.values():
            if isinstance(part, HybridSlots):
                assert part.store.position[:2].tolist() == runner.lengths[:2]
    after = runner.read(2)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_snapshots_and_seeds(kit, tokenizer, answers, prompts):
    """A snapshot of an engine that drafts goes on in one that does not, and back."""
    for kind in ("bounded exact heads", "linear, softmax and native windows"):
        model, expected = answers(kind)
        engines = [Engine(model, tokenizer, max_slots=2, draft=draft) for draft in (LOOKUP, None)]
        for first, second in (engines, engines[::-1]):
            params = SamplingParams(max_new_tokens=11, ignore_eos=True)
            whole = engines[1].submit(prompts[3], SamplingParams(max_new_tokens=24, ignore_eos=True)).result()
            start = first.submit(prompts[3], params, keep_state=True).result()
            rest = second.submit(
                None, SamplingParams(max_new_tokens=13, ignore_eos=True), snapshot=start.snapshot
            ).result()
            assert start.token_ids + rest.token_ids == whole.token_ids
            assert whole.token_ids[: len(expected[3])] == expected[3]
    params = SamplingParams(temperature=1.0, seed=4, max_new_tokens=20)
    one, other = (engines[0].generate([prompts[4]], params)[0].token_ids for _ in range(2))
    assert one == other


def test_no_more_tokens_than_the_kernels_take(model):
    assert LookupRounds(model, Lookup(most=20)).settings.most == 15


def test_what_a_pass_costs(kit):
    """Linear heads read states of one size; exact heads all tokens, or as many as they keep."""
    linear, exact, bounded = (
        PassCosts(kit.make_model(attention=attention))
        for attention in ({}, {"exact": ["0.1"]}, {"exact": ["0.1"], "exact_window": 5, "sinks": 2})
    )
    assert linear.of([10], 1) == linear.of([1000], 1)
    token = 2 * 8 * 8  # keys and values of a head, float64
    assert exact.of([1000], 1) - exact.of([10], 1) == 990 * token
    assert bounded.of([1000], 1) == bounded.of([7], 1) > bounded.of([6], 1)
    assert linear.of([10, 10], 1) - linear.of([10], 1) == linear.states > 0
    rounds = LookupRounds(kit.make_model(), Lookup())
    rounds.costs.flop, rounds.costs.weights, rounds.costs.flop_per_byte = 100, 400, 1.0
    rounds.costs.round = rounds.costs.latency = rounds.costs.states = 0
    draft = [5] * 8
    assert rounds.tokens([draft], [0.9], [1]) > 0
    assert rounds.tokens([draft, *[[]] * 7], [0.9] * 8, [1] * 8) == 0  # products take long
