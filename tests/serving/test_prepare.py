"""How many tokens a request may have."""

from __future__ import annotations

import pytest

from lolcats.generation.engine import Engine
from lolcats.serving.errors import ApiError
from lolcats.serving.prepare import max_length, prepare
from lolcats.serving.schema import CompletionRequest
from lolcats.serving.settings import ServerSettings


@pytest.fixture(scope="module")
def hybrid(kit, tokenizer):
    return Engine(kit.make_model(attention={"keep_softmax": [1]}), tokenizer, max_slots=1, max_length=50)


def test_the_smallest_limit_holds(model, tokenizer, hybrid):
    linear = Engine(model, tokenizer, max_slots=1)
    assert max_length(linear, ServerSettings("m")) == 256  # max_position_embeddings
    assert max_length(linear, ServerSettings("m", max_length=9999)) == 9999
    assert max_length(hybrid, ServerSettings("m")) == 50  # its buffers
    assert max_length(hybrid, ServerSettings("m", max_length=9999)) == 50


@pytest.mark.parametrize(("wanted", "expected"), [(None, 16), (3, 3), (43, 43)])
def test_new_tokens(hybrid, wanted, expected):
    job = prepare(CompletionRequest(prompt=[5] * 7, max_tokens=wanted), hybrid, ServerSettings("m"))
    assert job.groups[0][0].params.max_new_tokens == expected
    with pytest.raises(ApiError, match="7 prompt tokens and 44 new ones are more than the 50"):
        prepare(CompletionRequest(prompt=[5] * 7, max_tokens=44), hybrid, ServerSettings("m"))


def test_a_seed_counts_up_over_choices(hybrid):
    request = CompletionRequest(prompt=[[5], [6, 7]], n=2, seed=10)
    groups = prepare(request, hybrid, ServerSettings("m")).groups
    found = [[(item.index, item.tokens, item.params.seed) for item in group] for group in groups]
    assert found == [[(0, [5], 10), (1, [5], 11)], [(2, [6, 7], 10), (3, [6, 7], 11)]]
