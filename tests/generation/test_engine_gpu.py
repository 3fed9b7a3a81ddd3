"""The engine on a GPU: decoding from CUDA graphs."""

from __future__ import annotations

import pytest
import torch

from lolcats.generation.sampling import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


KINDS = {
    "linear": {},
    "exact heads": {"exact": ["0.1", 1]},
    "sparse cache": {"sinks": 1, "sparse_cache": 5},
}


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_give_the_tokens_of_generate(kit, make_engine, kind):
    model = kit.make_model(dtype=torch.float32, head_dim=32, attention=KINDS[kind]).cuda()
    prompts = [kit.random_tokens(length, length) for length in (1, 30, 2, 17, 9, 40, 3, 60)]
    engine = make_engine(model, max_slots=5)
    results = engine.generate(prompts, SamplingParams(max_new_tokens=30, ignore_eos=True))
    eager = make_engine(model, max_slots=5, use_graphs=False)
    assert engine.runner.graphs.works
    assert {key[-1] for key in engine.runner.graphs.captured} == ({True, False} if "sparse" in kind else {True})
    expected = eager.generate(prompts, SamplingParams(max_new_tokens=30, ignore_eos=True))
    assert [result.token_ids for result in results] == [result.token_ids for result in expected]
