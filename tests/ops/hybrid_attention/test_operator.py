"""Every implementation against the equation written as loops, on every kind of call."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import pytest
import torch
from hybrid_cases import (
    FLOAT32_SPECS,
    GROUPS,
    IMPLEMENTATIONS,
    SHARES,
    SPECS,
    TOLERANCE,
    Case,
    assert_near,
    assert_states_near,
    chunked,
    make_case,
    packed,
    random_mask,
    random_pieces,
    reference,
    step_some,
)
from hybrid_checks import (
    check_equation,
    check_given_state_untouched,
    check_no_drift,
    check_packed,
    check_prefix,
    check_same_as_reference,
    check_shared_state,
    check_softmax_limit,
    check_split,
    run_in_pieces,
)

from lolcats.config.attention import AttentionConfig
from lolcats.ops import HybridParams, HybridState, hybrid_attention, initial_state
from lolcats.ops.hybrid_attention.feature_maps import FEATURE_MAPS

chunked_module = import_module("lolcats.ops.hybrid_attention.chunked")
NAMES = list(SPECS)
BACKENDS = list(IMPLEMENTATIONS)
WINDOWS = {
    "sliding-1": AttentionConfig("sliding", 1),
    "sliding-5-sinks-2": AttentionConfig("sliding", 5, sinks=2),
    "linear": AttentionConfig("sliding", 0),
    "linear-sinks-2": AttentionConfig("terraced", 0, sinks=2),
    "terraced-1": AttentionConfig("terraced", 1),
    "one-block": AttentionConfig("terraced", 4, window_blocks=1),
    "three-blocks-sinks-1": AttentionConfig("terraced", 3, window_blocks=3, sinks=1),
    "terraced-4-sinks-11": AttentionConfig("terraced", 4, sinks=11),
    "cap-5": AttentionConfig("terraced", 2, sinks=1, linear_length_cap=5),
}
# A window that holds the whole sequence, up to its last token.
WIDE = [
    (AttentionConfig("sliding", 40), 40),
    (AttentionConfig("sliding", 90, sinks=3), 70),
    (AttentionConfig("terraced", 20), 40),
    (AttentionConfig("terraced", 8, window_blocks=3, sinks=1), 24),
    (AttentionConfig("terraced", 64, feature_map=None), 100),
    (AttentionConfig("sliding", 1, sinks=30), 31),
]


def varied(name: str, tokens: int, **options) -> Case:
    """Another group size, sharing, width and seed for every spec and length."""
    turn = NAMES.index(name) + tokens
    kv_heads, repeats = GROUPS[turn % len(GROUPS)]
    shape = {"batch": 1 + turn % 3, "kv_heads": kv_heads, "repeats": repeats, "head_dim": (2, 5, 8)[turn % 3]}
    shape |= {"columns": (3, 4)[turn % 2], "share_state": SHARES[turn // 2 % 2], "sink_logits": turn % 5 == 0}
    return make_case(SPECS[name], tokens, seed=turn, **(shape | options))


def state_after(case: Case, prefix: int, seed: int = 0) -> HybridState | None:
    """A state with another position in every sequence, around `prefix` tokens."""
    kv_heads, head_dim = case.k.shape[1], case.k.shape[3]
    before = make_case(case.spec, prefix, batch=case.batch, kv_heads=kv_heads, head_dim=head_dim, dtype=case.k.dtype)
    q = before.q.repeat_interleave(case.q.shape[1] // kv_heads, 1)
    mask = random_mask(case.batch, prefix, "right", seed)
    row, cu_seqlens = packed(replace(before, q=q, params=case.params), mask)
    return row.run(reference, cu_seqlens=cu_seqlens, return_state=True)[1]


# --- the equation ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"scale": 0.3, "softcap": 1.5}], ids=str)
@pytest.mark.parametrize("feature_map", [*FEATURE_MAPS, None])
@pytest.mark.parametrize("window", WINDOWS)
def test_reference_is_the_equation(window, feature_map, options):
    if feature_map is None and (WINDOWS[window].window_size == 0 or set(window.split("-")) & {"cache", "cap"}):
        pytest.skip("needs a linear part")
    spec = replace(WINDOWS[window], feature_map=feature_map)
    for tokens in (1, 5, 15):
        sizes = {"batch": 1, "kv_heads": 1, "repeats": 2, "head_dim": 3, "columns": 3}
        check_equation(reference, make_case(spec, tokens, sink_logits=bool(options), **sizes), **options)


@pytest.mark.parametrize("share_state", SHARES)
@pytest.mark.parametrize(("kv_heads", "repeats"), GROUPS)
def test_groups_are_the_equation(kv_heads, repeats, share_state):
    sizes = {"kv_heads": kv_heads, "repeats": repeats, "share_state": share_state, "head_dim": 3, "columns": 2}
    spec = AttentionConfig("terraced", 4, feature_map="t2r")
    for attend in IMPLEMENTATIONS.values():
        check_equation(attend, make_case(spec, 14, **sizes))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_window_for_all_is_softmax_attention(backend):
    for spec, tokens in WIDE:
        for options in ({}, {"softcap": 2.0, "scale": 0.7}):
            check_softmax_limit(IMPLEMENTATIONS[backend], make_case(spec, tokens, repeats=3), **options)
            case = make_case(spec, tokens, repeats=3, share_state="query_head", sink_logits=True)
            check_softmax_limit(IMPLEMENTATIONS[backend], case, **options)


# --- chunked is the reference, gradients and states too ----------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 63, 150])
@pytest.mark.parametrize("name", NAMES)
def test_chunked_is_the_reference(name, tokens):
    case = varied(name, tokens)
    check_same_as_reference(chunked, case, return_state=True)
    check_same_as_reference(chunked, case, state=state_after(case, 90), return_state=True)


@pytest.mark.parametrize("name", FLOAT32_SPECS)
def test_chunked_in_float32(name):
    check_same_as_reference(chunked, varied(name, 97, head_dim=8, dtype=torch.float32))


@pytest.mark.parametrize("seed", range(12))
def test_random_shapes_on_a_fine_grid(monkeypatch, seed):
    """Small chunks: many of them, aligned in all ways, at little cost."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*choices):
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    monkeypatch.setattr(chunked_module, "MIN_CHUNK_TOKENS", draw(1, 2, 3, 8))
    window = draw("sliding", "terraced"), draw(0, 1, 2, 3, 5, 9), draw(1, 2, 3, 4), draw(0, 0, 1, 6)
    spec = AttentionConfig(*window, feature_map=draw(*FEATURE_MAPS))
    kv_heads, repeats = draw(*GROUPS)
    sizes = {"head_dim": draw(1, 3, 6), "columns": draw(1, 2, 5), "share_state": draw(*SHARES), "seed": seed}
    case = make_case(spec, draw(7, 20, 41), batch=3, kv_heads=kv_heads, repeats=repeats, sink_logits=seed % 2, **sizes)
    for state in (None, state_after(case, draw(1, 8, 13), seed)):
        check_same_as_reference(chunked, case, state=state, return_state=True, softcap=draw(None, 1.5))


def test_gradients_are_those_of_the_function_as_computed(monkeypatch):
    monkeypatch.setattr(chunked_module, "MIN_CHUNK_TOKENS", 2)
    spec = AttentionConfig("sliding", 2, sinks=1, linear_length_cap=3)
    case = make_case(spec, 7, batch=1, kv_heads=1, repeats=2, head_dim=2, columns=2, sink_logits=True)
    names = [name for name, tensor in case.params._asdict().items() if tensor is not None]

    def function(q, k, v, *rest):
        params = case.params._replace(**dict(zip(names, rest, strict=True)))
        y, after = chunked(q, k, v, spec, params, return_state=True)
        return y, after.S, after.z

    inputs = [case.q, case.k, case.v, *(getattr(case.params, name) for name in names)]
    assert torch.autograd.gradcheck(function, [tensor.detach().clone().requires_grad_() for tensor in inputs])


@pytest.mark.parametrize("name", ["terraced-64", "terraced-16-t2r", "linear"])
def test_one_state_per_group_equals_repeated_keys(name):
    for attend in IMPLEMENTATIONS.values():
        check_shared_state(attend, make_case(SPECS[name], 90, repeats=3))


@pytest.mark.parametrize("name", ["sliding-70-sinks-3", "terraced-64", "linear"])
def test_half_precision_is_computed_in_float32(name):
    """Only the output is rounded to the activations' type; sums stay float32, the ring keeps the type."""
    half = make_case(SPECS[name], 150, dtype=torch.float32)
    half.q, half.k, half.v = half.q.bfloat16(), half.k.bfloat16(), half.v.bfloat16()
    y, state = half.run(chunked, return_state=True)
    expected, _ = half.map(torch.Tensor.double).run(reference)
    assert (y.dtype, state.S.dtype, state.z.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    assert (state.k.dtype, state.sink_v.dtype) == (torch.bfloat16, torch.bfloat16)
    torch.testing.assert_close(y.double(), expected, rtol=2**-8, atol=1e-5)  # half a unit in the last place
    full = half.map(torch.Tensor.float)
    plain, _ = full.run(chunked)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (full.q @ full.q.mT).dtype == torch.bfloat16  # autocast is on
        assert torch.equal(full.run(chunked)[0], plain)


# --- any split, padding, packing ---------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_any_split_is_the_whole(name, backend):
    """Chunks and single tokens, of sequences at different positions, from the first token or from a state."""
    seed = NAMES.index(name)
    case = varied(name, 160, batch=3)
    sizes = random_pieces(160, seed)
    check_split(IMPLEMENTATIONS[backend], case, sizes)
    kind = ("left", "right", "holes")[seed % 3]
    check_split(IMPLEMENTATIONS[backend], case, sizes, mask=random_mask(3, 160, kind, seed))


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_decoding_is_the_whole(name):
    """Token by token, in place, as all callers do it; other calls leave the state they were given."""
    case = varied(name, 60, batch=3)
    mask = random_mask(3, 60, "holes", 5)
    expected, expected_state = run_in_pieces(reference, case, [60], mask=mask)
    state = initial_state(case.spec, case.params, case.k)
    outputs = []
    for t in range(60):
        token, real, before = case.part(t, t + 1), mask[:, t], state
        with torch.inference_mode():
            copied, after = step_some(hybrid_attention, token, state.clone(), real)
        y, state = step_some(hybrid_attention, token, state, real)
        assert state.S is before.S
        assert torch.equal(y, copied)
        for (part, found), right in zip(after.tensors().items(), state.tensors().values(), strict=True):
            assert torch.equal(found, right), part
        outputs.append(y)
    assert_near(torch.cat(outputs, dim=2), expected, TOLERANCE[torch.float64], "decoded")
    assert_states_near(state, expected_state, TOLERANCE[torch.float64], "decoded")
    assert state.nbytes == initial_state(case.spec, case.params, case.k).nbytes
    check_given_state_untouched(chunked, case)


@pytest.mark.parametrize("name", ["terraced-4", "cap-70-sinks-3", "linear"])
@torch.no_grad()
def test_long_inputs_are_cut_into_pieces(monkeypatch, name):
    case = varied(name, 210, batch=3)
    expected_y, expected = case.run(reference, return_state=True)
    monkeypatch.setattr(chunked_module, "PIECE_TOKENS", 64)
    y, after = case.run(chunked, return_state=True)
    assert_near(y, expected_y, TOLERANCE[torch.float64], "pieces")
    assert_near(case.run(chunked)[0], expected_y, TOLERANCE[torch.float64], "pieces, without the state")
    assert_states_near(after, expected, TOLERANCE[torch.float64], "pieces")


def test_decoding_does_not_depend_on_the_default_device():
    q, k, v = (torch.randn(1, heads, 1, 8) for heads in (2, 1, 1))
    config = AttentionConfig(window_size=5, sinks=1, feature_map=None)
    params = HybridParams(torch.full((2,), 0.5))
    state = initial_state(config, params, k)
    with torch.no_grad():
        with torch.device("meta"):
            y, _ = hybrid_attention(q, k, v, config, params, state=state, return_state=True)
        expected, _ = hybrid_attention(q, k, v, config, params, state=state, return_state=True)
    torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
def test_appended_and_later_tokens_change_nothing(name, backend):
    prefixes = [1, 30, 63, 64, 65, 81]
    check_prefix(IMPLEMENTATIONS[backend], make_case(SPECS[name], 82, batch=1, repeats=3), prefixes)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
def test_packed_sequences_get_what_they_get_alone(name, backend):
    case = make_case(SPECS[name], 230, batch=1, kv_heads=1, repeats=2, head_dim=4)
    check_packed(IMPLEMENTATIONS[backend], case, [90, 0, 1, 63, 65])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
def test_sequences_by_their_borders(name, backend):
    """Two calls, the second from the states of the first; behind the sequences there is padding."""
    together: HybridState | None = None
    alone: list[HybridState | None] = [None] * 4
    for seed, sizes in enumerate([[5, 0, 61, 20], [30, 1, 0, 50]]):
        part = make_case(SPECS[name], 90, batch=1, repeats=2, head_dim=4, seed=seed)
        cu_seqlens = torch.tensor([0, *sizes]).cumsum(0)
        y, together = part.run(IMPLEMENTATIONS[backend], cu_seqlens=cu_seqlens.int(), state=together, return_state=True)
        assert not y[:, :, cu_seqlens[-1] :].any()
        for n, (begin, end) in enumerate(zip(cu_seqlens.tolist(), cu_seqlens[1:].tolist(), strict=False)):
            if begin < end:
                expected, alone[n] = part.part(begin, end).run(reference, state=alone[n], return_state=True)
                assert_near(y[:, :, begin:end], expected, 1e-12, f"sequence {n}")
            if (right := alone[n]) is not None:
                assert_states_near(together.select(torch.tensor([n])), right, 1e-12, f"sequence {n}")


# --- long runs ---------------------------------------------------------------------------------------------------


def long_case(spec: AttentionConfig) -> Case:
    """Parameters in float32, activations in bf16; values with a mean, so that outputs do not shrink."""
    case = make_case(spec, 2000, batch=1, kv_heads=1, repeats=2, dtype=torch.float32)
    case.q, case.k, case.v = case.q.bfloat16(), case.k.bfloat16(), (1.0 + case.v).bfloat16()
    return case


@pytest.mark.parametrize("spec", [AttentionConfig("terraced", 16), AttentionConfig("sliding", 16, sinks=2)], ids=str)
def test_errors_do_not_grow_in_2000_steps(spec):
    check_no_drift(chunked, long_case(spec))
