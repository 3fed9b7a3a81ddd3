"""generate() on a GPU: the decoding kernel inside transformers' strategies, and a compiled static cache."""

from __future__ import annotations

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
STRATEGIES = {
    "greedy": {"do_sample": False},
    "sample": {"do_sample": True, "temperature": 1.5, "top_k": 20},
    "beam": {"num_beams": 4, "do_sample": False, "num_return_sequences": 2},
    "prefill-chunks": {"do_sample": False, "prefill_chunk_size": 5},
}


@pytest.fixture(scope="module", params=[[], [0]], ids=["linear", "hybrid"])
def model(request, kit):
    original = kit.build("llama3", head_dim=32)
    return kit.linearized(original, window="terraced", window_size=4, keep_softmax=request.param).cuda()


def generate(model, input_ids, mask, **settings):
    torch.manual_seed(7)
    return model.generate(input_ids, attention_mask=mask, max_new_tokens=20, pad_token_id=0, **settings)


@pytest.mark.parametrize("strategy", list(STRATEGIES))
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_with_cache_equals_without(model, kit, strategy, padded):
    input_ids, mask = kit.tokens(2, 12).cuda(), kit.padding([12, 7 if padded else 12], 12).cuda()
    settings = dict(STRATEGIES[strategy])
    cached = generate(model, input_ids, mask, **settings)
    settings.pop("prefill_chunk_size", None)
    assert torch.equal(cached, generate(model, input_ids, mask, use_cache=False, **settings))


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_a_static_cache_gives_the_same(model, kit, padded):
    """transformers compiles the forward pass here, as it does for every static cache on a GPU."""
    input_ids, mask = kit.tokens(2, 12).cuda(), kit.padding([12, 7 if padded else 12], 12).cuda()
    torch.compiler.reset()
    expected = generate(model, input_ids, mask, do_sample=False)
    static = generate(model, input_ids, mask, do_sample=False, cache_implementation="static")
    assert torch.equal(static, expected)
