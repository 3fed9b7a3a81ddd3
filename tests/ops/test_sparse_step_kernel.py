"""The decoding kernel with a sparse cache: blocks compete for the slots before the launch, which sees them as keys."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_kit import DEVICE, GPU, Case, faithful_interpreter, make_case, poisoned_memory
from step_kit import check, late, run, triton
from torch import Tensor

from lolcats.config.attention import AttentionConfig
from lolcats.ops import HybridState, hybrid_attention
from lolcats.ops.hybrid_attention import initial_state
from lolcats.ops.hybrid_attention.kernels import decode as module
from lolcats.ops.hybrid_attention.sparse_cache import cached

__all__ = ["faithful_interpreter", "poisoned_memory"]  # fixtures of all tests here

SPECS = {
    "cache-5": AttentionConfig("terraced", 4, sparse_cache=5, cache_by="leverage"),
    "cache-4-recall-sinks-1": AttentionConfig("terraced", 3, sinks=1, sparse_cache=4, cache_by="recall"),
    "cache-3-sinks-4-one-block": AttentionConfig(
        "terraced", 6, window_blocks=1, sinks=4, sparse_cache=3, cache_by="leverage", feature_map="t2r"
    ),
    "cache-3-sinks-1-linear_length_cap-9": AttentionConfig(
        "terraced", 3, sinks=1, sparse_cache=3, cache_by="leverage", linear_length_cap=9
    ),
    # Two tiles of slots, of which the second stays empty.
    "cache-70-sinks-1": AttentionConfig("terraced", 3, sinks=1, sparse_cache=70, cache_by="leverage"),
}
CACHE_PARTS = ("key_moment", "cache_k", "cache_v")
LARGE = AttentionConfig("terraced", 64, sinks=1, sparse_cache=128, cache_by="leverage")


def informed(case: Case, *, state: HybridState, mask: Tensor | None = None, **options):
    """As the engine calls it: the host knows whether any sequence begins a block."""
    leaves_B = case.spec.block_leaves(state.position)
    block_evicted = bool((leaves_B if mask is None else leaves_B & mask[:, 0]).any())
    return triton(case, state=state, mask=mask, block_evicted=block_evicted, **options)


@pytest.mark.parametrize("name", sorted(SPECS))
def test_specs(name):
    """Two sequences whose blocks begin at different steps; every other spec with a state per query head."""
    share = ("kv_head", "query_head")[sorted(SPECS).index(name) % 2]
    check(make_case(SPECS[name], 21, batch=2, share_state=share), mask=late(2, 21), attend=informed)


@pytest.mark.parametrize("share_state", ["kv_head", "query_head"])
def test_groups(share_state):
    """Three query heads for each key/value head, whose slots are its own; sizes that are no powers of two."""
    sizes = {"heads": 6, "kv_heads": 2, "head_dim": 20, "columns": 10, "share_state": share_state}
    check(make_case(SPECS["cache-4-recall-sinks-1"], 14, **sizes))


def test_several_sequences_of_a_program(monkeypatch):
    monkeypatch.setattr(module, "ENOUGH_PROGRAMS", 1)
    assert module.sequences_of_a_program(3, 1, 2) == 2
    check(make_case(SPECS["cache-5"], 16, batch=3), mask=late(3, 16), attend=informed)


def test_softcap_and_sink_logits():
    case = make_case(SPECS["cache-5"], 14)
    case.params = case.params._replace(sink_logits=torch.tensor([0.5, -1.0], device=DEVICE))
    check(case, softcap=0.7)


@pytest.mark.skipif(not GPU, reason="slow through the interpreter")
@pytest.mark.parametrize("cache_by", ["leverage", "recall"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_large(dtype, cache_by):
    spec = replace(LARGE, cache_by=cache_by)
    case = make_case(spec, 530, batch=3, heads=9, kv_heads=3, head_dim=64, columns=32, dtype=dtype)
    factor_T = torch.logspace(0, 1, 530)[torch.randperm(530)].to(DEVICE)  # scores that are apart
    case.k, case.v = ((x * factor_T[:, None]).to(dtype) for x in (case.k, case.v))
    check(case, mask=late(3, 530), attend=informed)


@torch.no_grad()
def test_a_fold_for_one_sequence_leaves_the_others_alone():
    """The second sequence gets no token, though a block of it would begin too."""
    case = make_case(SPECS["cache-5"], 12, batch=2)
    _, state = run(case)
    before = state.clone()
    mask = torch.tensor([[True], [False]], device=DEVICE)
    y, after = triton(case.part(0, 1), state=state, mask=mask)
    assert after is not None
    assert not y[1].any()
    for name, tensor in after.tensors().items():
        assert torch.equal(tensor[1], before.tensors()[name][1]), name
        assert tensor.numel() == 0 or not torch.equal(tensor[0], before.tensors()[name][0]), name


@torch.no_grad()
@pytest.mark.parametrize("tokens", [12, 14], ids=["fold", "no fold"])
def test_inplace_and_not(tokens):
    """In place the state's own tensors change, the slots' too; otherwise nothing does."""
    case = make_case(SPECS["cache-5"], tokens)
    _, state = run(case)
    before = state.clone()
    now = case.part(0, 1)
    y, after = hybrid_attention(now.q, now.k, now.v, case.spec, case.params, state=state, backend="triton")
    assert after is not None
    for name, tensor in state.tensors().items():
        assert torch.equal(tensor, before.tensors()[name]), name
    y_inplace, same = triton(now, state=state)
    assert same is not None
    assert torch.equal(y, y_inplace)
    for name, tensor in same.tensors().items():
        assert tensor.data_ptr() == state.tensors()[name].data_ptr(), name
        assert torch.equal(tensor, after.tensors()[name]), name


@torch.no_grad()
def test_empty_slots_are_not_read():
    case = make_case(SPECS["cache-70-sinks-1"], 14)
    _, state = run(case)
    filled = int(cached(case.spec, state.position))
    assert 0 < filled < 70
    poisoned = state.clone()
    poisoned.cache_k[:, :, filled:] = torch.nan
    poisoned.cache_v[:, :, filled:] = torch.nan
    expected, _ = triton(case.part(0, 1), state=state, block_evicted=False)
    found, _ = triton(case.part(0, 1), state=poisoned, block_evicted=False)
    assert torch.equal(found, expected)
    poisoned.cache_v[:, :, filled - 1] = torch.nan  # what the comparison would find
    found, _ = triton(case.part(0, 1), state=poisoned, block_evicted=False)
    assert found.isnan().any()


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
def test_cuda_graphs():
    """Two captured steps, with a fold and without, replayed as the host says, are the step."""
    case = make_case(SPECS["cache-5"], 40, batch=3, dtype=torch.bfloat16)
    mask = late(3, 40)
    expected, after = run(case, mask=mask)
    state = initial_state(case.spec, case.params, case.k)
    inputs = case.part(0, 1).map(torch.clone)
    inputs.params = case.params
    now = torch.zeros_like(mask[:, :1])
    graphs: dict[bool, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
    for block_evicted in (True, False):
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad():
            triton(inputs, state=state.clone(), mask=now, block_evicted=block_evicted)  # compiles
        with torch.no_grad(), torch.cuda.graph(graph):
            y, _ = triton(inputs, state=state, mask=now, block_evicted=block_evicted)
        graphs[block_evicted] = graph, y
    outputs = []
    for t in range(40):
        for mine, new in zip((inputs.q, inputs.k, inputs.v), (case.q, case.k, case.v), strict=True):
            mine.copy_(new[:, :, t : t + 1])
        now.copy_(mask[:, t : t + 1])
        graph, y = graphs[bool((case.spec.block_leaves(state.position) & now[:, 0]).any())]
        graph.replay()
        outputs.append(y.clone())
    assert torch.equal(torch.cat(outputs, dim=2), expected)
    for name, tensor in state.tensors().items():
        assert torch.equal(tensor, after.tensors()[name]), name


def wrong_no_fold(case: Case, **options):
    """Blocks vanish when they leave the window."""
    return triton(case, block_evicted=False, **options)


def wrong_heads(case: Case, *, state: HybridState, **options):
    """Slots of the other key/value head."""
    result = triton(case, state=state, **options)
    state.cache_v.copy_(state.cache_v.flip(1))
    return result


def wrong_double(case: Case, *, state: HybridState, **options):
    """The kernel adds the block to the state, too."""
    leaves_B = case.spec.block_leaves(state.position)
    no_cache = {name: tensor[:, :, :0] for name, tensor in state.tensors().items() if name in CACHE_PARTS}
    summed = replace(state.clone(), **no_cache)
    triton(replace(case, spec=replace(case.spec, sparse_cache=0)), state=summed, **options)
    result = triton(case, state=state, **options)
    state.S.copy_(torch.where(leaves_B[:, None, None, None], summed.S, state.S))
    return result


@pytest.mark.parametrize("fault", [wrong_no_fold, wrong_heads, wrong_double])
def test_faults_are_found(fault):
    case = make_case(SPECS["cache-5"], 14, heads=4, kv_heads=2)
    with pytest.raises(AssertionError, match="relative RMS error"):
        check(case, attend=fault)
