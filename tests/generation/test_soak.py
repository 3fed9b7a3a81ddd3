"""Many requests of all kinds: no slot leaks, and every finished answer is what the request alone gets.

LOLCATS_SOAK_REQUESTS=10000 runs the whole soak.
"""

from __future__ import annotations

import os
import random

import pytest

from lolcats.generation.sampling import SamplingParams

REQUESTS = int(os.environ.get("LOLCATS_SOAK_REQUESTS", "120"))
STOPS = ["e", "th", "\n", "###", "qu", "  "]


def random_params(choice: random.Random) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=choice.choice([1, 2, 5, 12, 30]),
        temperature=choice.choice([0.0, 0.0, 0.7, 1.5]),
        top_k=choice.choice([0, 0, 1, 20]),
        top_p=choice.choice([1.0, 0.9, 0.3]),
        min_p=choice.choice([0.0, 0.0, 0.05]),
        stop=choice.choice([(), (), (choice.choice(STOPS),), tuple(choice.sample(STOPS, 2))]),
        stop_token_ids=choice.choice([(), (), (choice.randrange(260),)]),
        ignore_eos=choice.random() < 0.3,
        seed=choice.randrange(1000),
        logprobs=choice.choice([None, None, 2]),
    )


@pytest.mark.parametrize(
    ("exact", "window"),
    [(["0.1"], None), pytest.param(["0.1", 1], 6, marks=pytest.mark.slow)],
    ids=["hybrid", "window"],
)
def test_soak(kit, make_engine, exact, window):
    model = kit.make_model(attention={"exact": exact, "exact_window": window, "sinks": 1 if window else 0})
    poisoned = 131  # random_tokens draws below 128
    model.get_input_embeddings().weight.data[poisoned] = float("nan")
    longest = 200 if exact and window is None else None
    engine = make_engine(model, max_slots=7, prefill_chunk=24, max_length=longest)
    single = make_engine(model, max_slots=1, prefill_chunk=1000, max_length=longest)
    choice = random.Random(len(exact))
    requests = REQUESTS if not exact else REQUESTS // 2
    open_: list = []
    reasons: dict[str, int] = {}
    submitted = 0

    def check(prompt, params, handle) -> None:
        result = handle.result(timeout=0)
        reasons[result.finish_reason] = reasons.get(result.finish_reason, 0) + 1
        if poisoned in prompt:
            assert result.finish_reason in ("error", "cancelled")
            return
        wanted = params
        if result.finish_reason == "cancelled":
            if not result.token_ids:
                return
            wanted = params.changed(max_new_tokens=len(result.token_ids))
        expected = single.generate([prompt], wanted)[0]
        assert result.token_ids == expected.token_ids
        assert "".join(handle) == result.text
        if result.finish_reason == "cancelled":
            return
        assert (result.text, result.finish_reason, result.stop) == (
            expected.text,
            expected.finish_reason,
            expected.stop,
        )
        assert bool(result.logprobs) == (params.logprobs is not None)
        assert result.logprobs == pytest.approx(expected.logprobs, abs=1e-9)

    while submitted < requests or open_:
        while submitted < requests and choice.random() < 0.6:
            submitted += 1
            params = random_params(choice)
            prompt = kit.random_tokens(choice.choice([1, 2, 3, 8, 25, 26, 60]), submitted)
            if choice.random() < 0.07:
                prompt = [*prompt, poisoned]
            open_.append((prompt, params, engine.submit(prompt, params)))
        for _, _, handle in open_:
            if choice.random() < 0.01:
                handle.cancel()
        engine.step()
        for item in [item for item in open_ if item[2].done]:
            open_.remove(item)
            check(*item)

    assert not engine.busy
    counts = engine.counts
    assert (counts["free_slots"], counts["running"], counts["waiting"]) == (7, 0, 0)
    assert set(reasons) == {"stop", "length", "cancelled", "error"}
    assert sum(reasons.values()) == requests
    # the slots still work
    prompt = kit.random_tokens(30, 0)
    results = engine.generate([prompt] * 8, SamplingParams(max_new_tokens=20))
    assert {tuple(result.token_ids) for result in results} == {tuple(kit.greedy(model, prompt, 20))}
