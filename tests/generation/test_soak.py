"""Many requests of all kinds: no slot leaks, and every finished answer is what the request alone gets.

LOLCATS_SOAK_REQUESTS=10000 runs the whole soak.
"""

import os
import random
from collections import Counter

import pytest

from lolcats.generation.sampling import SamplingParams

REQUESTS = int(os.environ.get("LOLCATS_SOAK_REQUESTS", "60"))
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


def test_soak(kit, make_engine):
    model = kit.make_model(attention={"exact": ["0.1"]})
    poisoned = 131  # random_tokens draws below 128
    model.get_input_embeddings().weight.data[poisoned] = float("nan")
    engine = make_engine(model, max_slots=7, prefill_chunk=24, max_length=200)
    single = make_engine(model, max_slots=1, prefill_chunk=1000, max_length=200)
    choice = random.Random(1)
    open_: list = []
    reasons: Counter[str] = Counter()
    submitted = 0

    def check(prompt, params, request) -> None:
        result = request.result()
        reasons[result.finish_reason] += 1
        if poisoned in prompt:
            assert result.finish_reason in ("error", "cancelled")
        elif result.token_ids:
            cancelled = result.finish_reason == "cancelled"
            wanted = params.changed(max_new_tokens=len(result.token_ids)) if cancelled else params
            expected = single.generate([prompt], wanted)[0]
            assert result.token_ids == expected.token_ids
            assert "".join(request) == result.text
            if not cancelled:
                assert (result.text, result.finish_reason) == (expected.text, expected.finish_reason)
                assert result.logprobs == pytest.approx(expected.logprobs, abs=1e-9)

    while submitted < REQUESTS or open_:
        while submitted < REQUESTS and choice.random() < 0.6:
            submitted += 1
            params = random_params(choice)
            prompt = kit.random_tokens(choice.choice([1, 2, 3, 8, 25, 26, 60]), submitted)
            if choice.random() < 0.07:
                prompt = [*prompt, poisoned]
            open_.append((prompt, params, engine.submit(prompt, params)))
        for _, _, request in open_:
            if choice.random() < 0.01:
                request.cancel()
        engine.step()
        for item in [item for item in open_ if item[2].done]:
            open_.remove(item)
            check(*item)

    assert not engine.busy
    assert engine.counts["free_slots"] == 7
    assert set(reasons) == {"stop", "length", "cancelled", "error"}
    # the slots still work
    prompt = kit.random_tokens(30, 0)
    results = engine.generate([prompt] * 8, SamplingParams(max_new_tokens=20))
    assert {tuple(result.token_ids) for result in results} == {tuple(kit.greedy(model, prompt, 20))}
