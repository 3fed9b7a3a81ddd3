"""The decoding kernel, step by step from an empty state, against `reference` in float64 on whole sequences."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_kit import DEVICE, GPU, Case, faithful_interpreter, make_case, on_gpu, poisoned_memory
from step_kit import TOLERANCE, check, late, run, triton
from torch import Tensor

from lolcats.config.attention import AttentionConfig
from lolcats.ops import HybridState, hybrid_attention
from lolcats.ops.hybrid_attention import initial_state
from lolcats.ops.hybrid_attention.kernels import decode as module
from lolcats.ops.hybrid_attention.kernels.decode import StateParts, step_op
from lolcats.ops.hybrid_attention.kernels.support import supports_step

__all__ = ["faithful_interpreter", "poisoned_memory"]  # fixtures of all tests here

# Windows small enough that a few times their capacity is quick through the interpreter; all parts of the kernel.
SPECS = {
    "terraced-8": AttentionConfig("terraced", 8),
    "terraced-5-three-blocks": AttentionConfig("terraced", 5, window_blocks=3),
    "terraced-10-one-block": AttentionConfig("terraced", 10, window_blocks=1),
    "terraced-4-t2r-sinks-10": AttentionConfig("terraced", 4, sinks=10, feature_map="t2r"),
    "terraced-4-exp-sinks-2": AttentionConfig("terraced", 4, sinks=2, feature_map="exp"),
    "terraced-20-elu": AttentionConfig("terraced", 20, window_blocks=1, feature_map="elu"),
    "sliding-8": AttentionConfig("sliding", 8),
    "sliding-1": AttentionConfig("sliding", 1),
    "sliding-7-sinks-3": AttentionConfig("sliding", 7, sinks=3),
    "sliding-9-elu": AttentionConfig("sliding", 9, feature_map="elu"),
    "linear": AttentionConfig("sliding", 0),
    "linear-exp-sinks-2": AttentionConfig("sliding", 0, sinks=2, feature_map="exp"),
    "terraced-4-no-linear": AttentionConfig("terraced", 4, feature_map=None),
    "sliding-6-no-linear-sinks-5": AttentionConfig("sliding", 6, sinks=5, feature_map=None),
    "terraced-4-sinks-2-linear_length_cap-9": AttentionConfig("terraced", 4, sinks=2, linear_length_cap=9),
    "sliding-4-linear_length_cap-9": AttentionConfig("sliding", 4, linear_length_cap=9),
}
LARGE = {
    "terraced-64": AttentionConfig("terraced", 64),
    "terraced-48-three-blocks": AttentionConfig("terraced", 48, window_blocks=3),
    "terraced-100-sinks-5": AttentionConfig("terraced", 100, sinks=5),
    "sliding-70-sinks-3": AttentionConfig("sliding", 70, sinks=3),
}


def steps_for(spec: AttentionConfig) -> int:
    return (3 if GPU else 2) * max(spec.capacity, 4) + 2


@pytest.mark.parametrize("name", [on_gpu(name) if SPECS[name].window_size > 16 else name for name in sorted(SPECS)])
def test_specs(name):
    """Two sequences at different positions; every other spec with a state per query head."""
    spec = SPECS[name]
    share = ("kv_head", "query_head")[sorted(SPECS).index(name) % 2]
    tokens = steps_for(spec)
    check(make_case(spec, tokens, batch=2, share_state=share), mask=late(2, tokens))


@pytest.mark.skipif(not GPU, reason="slow through the interpreter")
@pytest.mark.parametrize("share_state", ["kv_head", "query_head"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", sorted(LARGE))
def test_large_windows(name, dtype, share_state):
    tokens = steps_for(LARGE[name])
    case = make_case(
        LARGE[name], tokens, batch=3, heads=8, kv_heads=2, head_dim=64, columns=32, share_state=share_state, dtype=dtype
    )
    check(case, mask=late(3, tokens))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "share_state"),
    [
        (2, 2, "kv_head"),
        (6, 2, "query_head"),
        (4, 1, "kv_head"),
        *(on_gpu(*case) for case in ((2, 2, "query_head"), (6, 2, "kv_head"), (4, 1, "query_head"))),
    ],
)
def test_groups(heads, kv_heads, share_state):
    """One, three and four query heads for each key/value head; sizes that are no powers of two."""
    case = make_case(
        AttentionConfig("terraced", 3),
        *(20,),
        **{"heads": heads, "kv_heads": kv_heads, "head_dim": 20, "columns": 10, "share_state": share_state},
    )
    check(case)


@pytest.mark.parametrize(
    "spec", [AttentionConfig("terraced", 3, linear_length_cap=4), AttentionConfig("sliding", 4, sinks=2)], ids=str
)
def test_several_sequences_of_a_program(spec, monkeypatch):
    """Three query heads, two sequences a tile; the last program has one sequence."""
    monkeypatch.setattr(module, "ENOUGH_PROGRAMS", 1)
    assert module.sequences_of_a_program(3, 1, 3) == 2
    case = make_case(spec, 13, batch=3, heads=3, share_state="query_head")
    check(case, mask=late(3, 13))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["terraced-8", "sliding-7-sinks-3"])
def test_half_precision(name, dtype):
    case = make_case(SPECS[name], 26, dtype=dtype, head_dim=32, columns=16)
    check(case)


@pytest.mark.parametrize("spec", [AttentionConfig("terraced", 3), AttentionConfig("sliding", 3)], ids=str)
def test_states_in_pieces(spec):
    """128 columns: S does not fit into one tile."""
    check(make_case(spec, 9, head_dim=48, columns=100))


@pytest.mark.skipif(not GPU, reason="slow through the interpreter")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("head_dim", "columns"), [(64, 32), (80, 40), (96, 128), (128, 64), (256, 128)])
@pytest.mark.parametrize("name", ["terraced-64", "sliding-70-sinks-3"])
def test_head_dims(name, head_dim, columns, dtype):
    if dtype == torch.float32 and head_dim > 128:
        pytest.skip("float32 rows this wide have no kernel")
    case = make_case(LARGE[name], 300, batch=2, heads=8, kv_heads=2, head_dim=head_dim, columns=columns, dtype=dtype)
    check(case, mask=late(2, 300))


@pytest.mark.skipif(not GPU, reason="slow through the interpreter")
@pytest.mark.parametrize("name", ["terraced-64", "sliding-70-sinks-3"])
def test_large_batch(name):
    """Enough sequences that programs take several of them."""
    assert module.sequences_of_a_program(300, 8, 4) > 1
    tokens = steps_for(LARGE[name])
    case = make_case(LARGE[name], tokens, batch=300, heads=32, kv_heads=8, dtype=torch.bfloat16)
    check(case, mask=late(300, tokens) | (torch.arange(300, device=DEVICE) > 40)[:, None])


@pytest.mark.parametrize(
    "spec", [AttentionConfig("terraced", 3), AttentionConfig("sliding", 3, sinks=2, linear_length_cap=5)], ids=str
)
def test_softcap_and_sink_logits(spec):
    case = make_case(spec, 14)
    case.params = case.params._replace(sink_logits=torch.tensor([0.5, -1.0], device=DEVICE))
    check(case)
    check(case, softcap=0.7)
    with pytest.raises(AssertionError, match="relative RMS error"):
        check(case, softcap=0.7, attend=lambda case, softcap, **options: triton(case, **options))


@torch.no_grad()
def test_masked_sequences_keep_their_state():
    case = make_case(AttentionConfig("terraced", 2), 9, batch=2)
    _, state = run(case)
    before = state.clone()
    mask = torch.tensor([[True], [False]], device=DEVICE)
    y, after = triton(case.part(0, 1), state=state, mask=mask)
    assert after is not None
    assert not y[1].any()
    assert y[0].any()
    for name, tensor in after.tensors().items():
        assert torch.equal(tensor[1], before.tensors()[name][1]), name
    assert after.position.tolist() == [10, 9]


def test_inplace_and_not():
    """In place the state's own tensors change; otherwise nothing does. Rows in any memory layout."""
    case = make_case(AttentionConfig("sliding", 3), 8)
    _, state = run(case)
    before = state.clone()
    now = case.part(0, 1)
    with torch.no_grad():
        y, after = hybrid_attention(now.q, now.k, now.v, case.spec, case.params, state=state, backend="triton")
        assert after is not None
        for name, tensor in state.tensors().items():
            assert torch.equal(tensor, before.tensors()[name]), name
        y_inplace, same = triton(replace(now, q=now.q.contiguous(), k=now.k.expand(1, 1, 1, 16)), state=state)
    assert same is not None
    assert torch.equal(y, y_inplace)
    for name, tensor in same.tensors().items():
        assert tensor.data_ptr() == state.tensors()[name].data_ptr(), name
        assert torch.equal(tensor, after.tensors()[name]), name


@pytest.mark.parametrize("spec", [AttentionConfig("terraced", 4), on_gpu(AttentionConfig("sliding", 4))], ids=str)
def test_does_not_drift(spec):
    """Sums in float32 of bfloat16 activations: the error at the end is that of the start."""
    tokens = 4000 if GPU else 80
    case = make_case(spec, tokens, dtype=torch.bfloat16)
    case.v = (1.0 + case.v.float()).to(torch.bfloat16)  # with a mean, so that outputs do not shrink
    y, _ = run(case)
    exact = case.map(Tensor.double)
    expected, _ = hybrid_attention(exact.q, exact.k, exact.v, spec, exact.params, backend="chunked")
    error = ((y.double() - expected).square().mean((0, 1, 3)) / expected.square().mean((0, 1, 3))).sqrt()
    quarter = tokens // 4
    assert error[-quarter:].mean() <= 1.25 * error[quarter : 2 * quarter].mean()
    assert error.max() <= 3 * TOLERANCE[torch.bfloat16]


def arguments(case: Case) -> tuple:
    state = initial_state(case.spec, case.params, case.k)
    spec = case.spec
    return (
        *(case.q, case.k, case.v, *case.params, None, *(getattr(state, name) for name in StateParts._fields)),
        *(
            spec.window,
            spec.window_size,
            spec.window_blocks,
            spec.sinks,
            spec.feature_map,
            spec.linear_length_cap,
            0.25,
            None,
        ),
    )


@pytest.mark.parametrize("sparse_cache", [0, 3])
def test_registration(monkeypatch, sparse_cache):
    """Schema, what is written, shapes without data and tracing, as torch.library checks them."""
    for name in ("empty", "empty_like"):  # tracing makes tensors without data, which cannot be poisoned
        monkeypatch.setattr(torch, name, getattr(torch, name).unpoisoned)
    case = make_case(AttentionConfig("terraced", 2, sparse_cache=sparse_cache, cache_by="leverage"), 1)
    torch.library.opcheck(step_op, arguments(case))


def test_compiles():
    """torch.compile keeps the step whole, and the state's tensors are written."""
    case = make_case(AttentionConfig("terraced", 2), 5)
    expected, state = run(case)
    compiled = torch.compile(triton, backend="aot_eager", fullgraph=True)
    y, found = run(case, attend=compiled)
    assert torch.equal(y, expected)
    for name, tensor in found.tensors().items():
        assert torch.equal(tensor, state.tensors()[name]), name


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["terraced-8", "sliding-7-sinks-3"])
def test_cuda_graph(name):
    """A captured step, replayed over several blocks, is the step; nothing waits for the device."""
    case = make_case(SPECS[name], 40, batch=3, dtype=torch.bfloat16)
    mask = late(3, 40)
    expected, after = run(case, mask=mask)
    state = initial_state(case.spec, case.params, case.k)
    inputs = case.part(0, 1).map(torch.clone)
    inputs.params = case.params
    now = torch.zeros_like(mask[:, :1])
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        triton(inputs, state=state.clone(), mask=now)  # compiles
    with torch.no_grad(), torch.cuda.graph(graph):
        y, _ = triton(inputs, state=state, mask=now)
    outputs = []
    for t in range(40):
        for mine, new in zip((inputs.q, inputs.k, inputs.v), (case.q, case.k, case.v), strict=True):
            mine.copy_(new[:, :, t : t + 1])
        now.copy_(mask[:, t : t + 1])
        graph.replay()
        outputs.append(y.clone())
    assert torch.equal(torch.cat(outputs, dim=2), expected)
    for tensor_name, tensor in state.tensors().items():
        assert torch.equal(tensor, after.tensors()[tensor_name]), tensor_name


def wrong_slot(case: Case, *, state: HybridState, **options):
    """The new key goes one slot too far."""
    result = triton(case, state=state, **options)
    state.k.copy_(state.k.roll(1, 2))
    return result


def wrong_gamma(case: Case, **options):
    return triton(replace(case, params=case.params._replace(gamma=torch.ones_like(case.params.gamma))), **options)


def wrong_position(case: Case, *, state: HybridState, **options):
    """Sequences never advance."""
    before = state.position.clone()
    result = triton(case, state=state, **options)
    state.position.copy_(before)
    return result


def wrong_heads(case: Case, **options):
    """Weights of the other query head."""
    assert case.params.q_weight is not None
    return triton(replace(case, params=case.params._replace(q_weight=case.params.q_weight.flip(0))), **options)


class LateFold:
    """Tokens reach S and z one block after they left the window."""

    def __init__(self) -> None:
        self.history: list[HybridState] = []

    def __call__(self, case: Case, *, state: HybridState, **options):
        self.history.append(state.clone())
        old = self.history[max(len(self.history) - 1 - case.spec.window_size, 0)]
        y, _ = triton(case, state=replace(state.clone(), S=old.S.clone(), z=old.z.clone()), **options)
        _, after = triton(case, state=state, **options)
        return y, after


@pytest.mark.parametrize("name", [on_gpu("terraced-8"), "sliding-7-sinks-3"])
@pytest.mark.parametrize("fault", [wrong_slot, wrong_gamma, wrong_position, wrong_heads, LateFold])
def test_faults_are_found(fault, name):
    case = make_case(SPECS[name], 26)
    with pytest.raises(AssertionError, match="relative RMS error"):
        check(case, attend=LateFold() if fault is LateFold else fault)


def wrong_horizon(case: Case, **options):
    """One token late."""
    return triton(replace(case, spec=replace(case.spec, linear_length_cap=case.spec.linear_length_cap + 1)), **options)


@pytest.mark.parametrize("name", ["terraced-4-sinks-2-linear_length_cap-9", "sliding-4-linear_length_cap-9"])
def test_a_wrong_horizon_is_found(name):
    with pytest.raises(AssertionError, match="relative RMS error"):
        check(make_case(SPECS[name], 14), attend=wrong_horizon)


def test_says_why_not():
    case = make_case(AttentionConfig("terraced", 2), 1, dtype=torch.float64)
    state = initial_state(case.spec, case.params, case.k)
    reason = supports_step(case.q, case.k, case.v, case.spec, case.params, state=state)
    assert "float64" in (reason or "")
    with torch.no_grad(), pytest.raises(ValueError, match="float64"):
        triton(case, state=state)
