"""The engine on a GPU: decoding from CUDA graphs."""

from functools import partial

import pytest
import torch
from transformers import DynamicCache

from lolcats.generation.runner import Runner, SlotCache
from lolcats.generation.sampling import SamplingParams
from lolcats.modeling.cache import HybridCacheLayer
from lolcats.modeling.graphs import Graphs

pytestmark = pytest.mark.gpu

KINDS = {"linear": {}, "sinks": {"sinks": 1}, "exact heads": {"exact": ["0.1", 1]}}


def test_captures_share_a_workspace():
    """cuBLAS keeps one a stream, of which PyTorch has 32: an engine's captures cost up to a GiB."""
    graphs, x, used = Graphs(), torch.randn(64, 64, device="cuda"), []
    for key in range(9):
        graphs.run(key, partial(torch.mm, x, x), partial(torch.mm, x, x))
        used.append(torch.cuda.memory_allocated())
    assert used[-1] - used[0] < 2**20


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_give_the_tokens_of_generate(kit, make_engine, kind):
    model = kit.make_model(dtype=torch.float32, head_dim=32, attention=KINDS[kind]).cuda()
    prompts = [kit.random_tokens(length, length) for length in (1, 30, 2, 17, 9, 40, 3, 60)]
    engine = make_engine(model, max_slots=5)
    results = engine.generate(prompts, SamplingParams(max_new_tokens=30, ignore_eos=True))
    eager = make_engine(model, max_slots=5, use_graphs=False)
    assert engine.runner.graphs.works
    assert engine.runner.compiled.works
    assert len(engine.runner.compiled.compiled) == 3  # two layers and the head
    expected = eager.generate(prompts, SamplingParams(max_new_tokens=30, ignore_eos=True))
    assert [result.token_ids for result in results] == [result.token_ids for result in expected]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "attention",
    [
        {},
        {"sinks": 2, "share_state": "query_head"},
        {"window": "sliding", "feature_map": "t2r"},
        {"feature_dim": 4},
        {"feature_map": None},
        {"exact": ["0.1", 1]},
    ],
    ids=lambda attention: ", ".join(attention) or "default",
)
@torch.no_grad()
def test_slots_keep_states_as_steps_leave_them(kit, attention, dtype):
    model = kit.make_model(dtype=dtype, head_dim=32, attention=attention).cuda()
    parts = SlotCache(model, 2, 64).parts
    cache = DynamicCache(config=model.config.get_text_config())
    token_11 = torch.zeros(1, 1, dtype=torch.int64, device="cuda")
    for _ in range(2):
        model(token_11, past_key_values=cache, use_cache=True)
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, HybridCacheLayer):
            kept, left = parts[str(index)].buffers, layer.state._asdict()
            assert set(left) - set(kept) == {"position"}  # the runner's
            for name, tensor in kept.items():
                assert (tensor.dtype, tensor.shape[1:]) == (left[name].dtype, left[name].shape[1:])


@pytest.mark.parametrize("attention", KINDS.values(), ids=KINDS)
@torch.no_grad()
def test_prompts_from_graphs(kit, attention):
    """Fresh ones and later pieces, in different slots, of lengths that are rounded up to the same."""
    model = kit.make_model(dtype=torch.float32, head_dim=32, attention=attention).cuda()
    captured, eager = (Runner(model, 4, 256, use_graphs=captures) for captures in (True, False))
    lengths = [(slot, length) for length in (30, 150) for slot in range(4)]
    for index, (slot, length) in enumerate(lengths):
        chunk = kit.random_tokens(length - slot, index)
        found, expected = (runner.prefill([slot], [chunk]).clone() for runner in (captured, eager))
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)  # float32, other tiles
    assert captured.prompt_graphs.works
    later = set() if "exact" in attention else {(160, False)}
    assert set(captured.prompt_graphs.captured) == {(28, True), (32, True)} | later
    for slot in range(4):
        for name, tensor in captured.cache.read(slot).items():
            torch.testing.assert_close(tensor, eager.cache.read(slot)[name], rtol=1e-3, atol=1e-3)
