"""Rows of more than 2^31 elements: heads that lie 2^30 elements apart, in memory of which only a little is used."""

import pytest
import torch
from kit import DEVICE, GPU, borders, make_case, tokens_before
from test_softmax_step import Slots

from lolcats.ops import hybrid_attention
from lolcats.ops.hybrid_attention.kernels.store_tokens import store_tokens
from lolcats.vllm_plugin.take_heads import take_heads

APART = 1 << 30
HEADS = 3  # of the last one, the offset does not fit in int32


@pytest.fixture
def apart(tmp_path):
    """What copies a tensor [B, HEADS, ...] with its heads far apart. A wrapped offset finds zeros."""
    made = []

    def copy(x):
        size, place = 2 * HEADS * APART - 2 * APART + (1 << 16), len(made)
        memory = (
            torch.zeros(size, dtype=x.dtype, device=DEVICE)
            if DEVICE == "cuda"
            else torch.from_file(str(tmp_path / f"{place}"), shared=True, size=size, dtype=x.dtype)  # sparse
        )
        made.append(memory)
        inner = x[0, 0].numel()
        rows = torch.empty(x[:, 0].shape).stride()
        far = memory.as_strided(x.shape, (inner, APART, *rows[1:]), 2 * APART)
        with torch.no_grad():
            return far.copy_(x)

    return copy


SIZES = {"batch": 2, "heads": HEADS, "kv_heads": HEADS, "dtype": torch.bfloat16}


@pytest.mark.parametrize(
    ("config", "share"), [("terraced 16 sinks=3", "kv_head"), ("sliding 20 sinks=2", "query_head")]
)
def test_attention_and_its_gradients(config, share, apart):
    case = make_case(config, 70, share=share, **SIZES | {"batch": 1 + GPU})
    incoming = torch.randn(case.q.shape).to(case.q)

    def run(place):
        inputs = [place(x).requires_grad_() for x in (case.q, case.k, case.v)]
        y, _ = hybrid_attention(*inputs, case.config, case.params, backend="triton")
        return y, *torch.autograd.grad(y, inputs, place(incoming))

    torch.testing.assert_close(run(apart), run(torch.clone), rtol=0, atol=0)


@torch.no_grad()
def test_decoding(apart):
    case = make_case("terraced 16 sinks=3", 1, **SIZES)
    _, state = tokens_before(case, (33, 32)).run("chunked", cu_seqlens=borders(33, 32), return_state=True)

    def run(place):
        y, after = case.with_qkv(place).run("triton", state=state.clone(), return_state=True)
        return y, after._asdict()

    torch.testing.assert_close(run(apart), run(torch.clone), rtol=0, atol=0)


def test_softmax_step(apart):
    slots = Slots(lengths=(5, 3), keys=8, heads=HEADS, kv_heads=1, dtype=torch.bfloat16)
    expected = slots.step()
    slots.q_BH1D = apart(slots.q_BH1D)
    assert torch.equal(slots.step(), expected)
    slots = Slots(lengths=(5, 3), keys=8, heads=HEADS, kv_heads=HEADS, dtype=torch.bfloat16)
    expected = slots.step()
    slots.k_BGKD, slots.v_BGKD = apart(slots.k_BGKD), apart(slots.v_BGKD)
    assert torch.equal(slots.step(), expected)


def test_storing_tokens(apart):
    k, v = (torch.randn(2, HEADS, 1, 8, device=DEVICE) for _ in range(2))
    caches = [torch.zeros(4, HEADS, 5, 8, device=DEVICE) for _ in range(4)]
    slot, place = torch.tensor([3, 1], device=DEVICE), torch.tensor([2, 4], device=DEVICE)
    store_tokens(k, v, *caches[:2], slot, place)
    far = [apart(x) for x in caches[2:]]
    store_tokens(apart(k), apart(v), *far, slot, place)
    torch.testing.assert_close(far, caches[:2], rtol=0, atol=0)


def test_taking_heads(apart):
    inputs = [torch.randn(2, heads * 8, device=DEVICE).bfloat16() for heads in (2 * HEADS, HEADS, HEADS)]
    places = torch.arange(HEADS, device=DEVICE), torch.tensor([9, 3], device=DEVICE)
    cache, far = (torch.zeros(3, HEADS, 4, 16, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    far = apart(far)
    for x in (cache, far):
        take_heads(inputs, places[0], x, places[1], torch.ones(3, device=DEVICE).unbind())
    assert cache.any()
    assert torch.equal(far, cache)
