"""`chunked` = `reference`: output, state and every gradient."""

from __future__ import annotations

import hybrid_wrong
import pytest
import torch
from hybrid_cases import FLOAT32_SPECS, GROUPS, SHARES, SPECS, chunked, make_case, random_mask, reference
from hybrid_checks import check_same_as_reference, check_shared_state, results_and_gradients

from lolcats.config.attention import AttentionConfig
from lolcats.ops.hybrid_attention import grid
from lolcats.ops.hybrid_attention.feature_maps import feature_map_names

LENGTHS = (1, 63, 64, 65, 150, 500)


def varied(name: str, tokens: int, **options):
    """Another group size, sharing, width and seed for every spec and length."""
    turn = list(SPECS).index(name) + 5 * LENGTHS.index(tokens) if tokens in LENGTHS else tokens
    kv_heads, repeats = GROUPS[turn % len(GROUPS)]
    return make_case(
        SPECS[name],
        tokens,
        batch=1 if tokens == 500 else 1 + turn % 3,
        kv_heads=kv_heads,
        repeats=repeats,
        head_dim=(2, 5, 8)[turn % 3],
        columns=(3, 4)[turn % 2],
        share_state=SHARES[turn // 2 % 2],
        sink_logits=turn % 5 == 0,
        seed=turn,
        **options,
    )


def state_after(case, prefix: int, seed: int):
    """A state with another position in every sequence, around `prefix` tokens."""
    before = make_case(
        case.spec,
        prefix,
        batch=case.batch,
        kv_heads=case.k.shape[1],
        head_dim=case.k.shape[3],
        dtype=case.k.dtype,
    )
    mask = random_mask(case.batch, prefix, "right", seed)
    heads = case.q.shape[1] // case.k.shape[1]
    q = before.q.repeat_interleave(heads, 1)
    params = case.params
    return reference(q, before.k, before.v, case.spec, params, mask=mask, return_state=True)[1]


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("name", list(SPECS))
def test_float64(name: str, tokens: int) -> None:
    check_same_as_reference(chunked, varied(name, tokens), return_state=True)


@pytest.mark.parametrize("tokens", [65, 150])
@pytest.mark.parametrize("name", FLOAT32_SPECS)
def test_float32(name: str, tokens: int) -> None:
    check_same_as_reference(chunked, varied(name, tokens, dtype=torch.float32), return_state=True)


@pytest.mark.parametrize("tokens", [1, 63, 150])
@pytest.mark.parametrize("name", list(SPECS))
def test_with_an_initial_state(name: str, tokens: int) -> None:
    """The gradients include those of S, z, the ring and the sinks."""
    case = varied(name, tokens)
    check_same_as_reference(chunked, case, state=state_after(case, 90, seed=tokens), return_state=True)


@pytest.mark.parametrize("kind", ["left", "right", "holes"])
@pytest.mark.parametrize("name", list(SPECS))
def test_with_a_mask(name: str, kind: str) -> None:
    case = varied(name, 100)
    mask = random_mask(case.batch, 100, kind, seed=1)
    check_same_as_reference(chunked, case, mask=mask, return_state=True)
    check_same_as_reference(chunked, case, mask=mask, state=state_after(case, 70, seed=2), return_state=True)


@pytest.mark.parametrize("name", list(SPECS))
def test_with_documents(name: str) -> None:
    case = varied(name, 100)
    ids = torch.randint(-1, 3, (case.batch, 4)).repeat_interleave(25, dim=1)
    check_same_as_reference(chunked, case, segment_ids=ids)


@pytest.mark.parametrize("name", list(SPECS))
def test_without_the_state_nothing_else_changes(name: str) -> None:
    check_same_as_reference(chunked, varied(name, 150))


@pytest.mark.parametrize("options", [{"softcap": 1.5}, {"scale": 0.3}], ids=str)
@pytest.mark.parametrize("name", ["sliding-70-sinks-3", "terraced-16-one-block-sinks-2", "terraced-64"])
def test_scale_and_softcap(name: str, options: dict) -> None:
    check_same_as_reference(chunked, varied(name, 150), return_state=True, **options)


@pytest.mark.parametrize("seed", range(12))
def test_random_shapes_on_a_fine_grid(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Small chunks: many of them, aligned in all ways, at little cost."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*choices):
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    monkeypatch.setattr(grid, "MIN_CHUNK_TOKENS", draw(1, 2, 3, 8))
    spec = AttentionConfig(
        draw("sliding", "terraced"),
        draw(0, 1, 2, 3, 5, 9),
        window_blocks=draw(1, 2, 3, 4),
        sinks=draw(0, 0, 1, 6),
        feature_map=draw(*feature_map_names()),
    )
    kv_heads, repeats = draw(*GROUPS)
    case = make_case(
        spec,
        draw(7, 20, 41),
        batch=3,
        kv_heads=kv_heads,
        repeats=repeats,
        head_dim=draw(1, 3, 6),
        columns=draw(1, 2, 5),
        share_state=draw(*SHARES),
        sink_logits=draw(True, False),
        seed=seed,
    )
    mask = random_mask(3, case.tokens, draw("left", "right", "holes"), seed)
    for state in (None, state_after(case, draw(1, 8, 13), seed)):
        check_same_as_reference(chunked, case, state=state, mask=mask, return_state=True)


@pytest.mark.parametrize(
    "spec", [AttentionConfig("sliding", 2, sinks=1, linear_length_cap=3), AttentionConfig("terraced", 2)], ids=str
)
def test_gradcheck(monkeypatch: pytest.MonkeyPatch, spec: AttentionConfig) -> None:
    """The gradient is that of the function as computed, by differences."""
    monkeypatch.setattr(grid, "MIN_CHUNK_TOKENS", 2)
    case = make_case(spec, 7, batch=1, kv_heads=1, repeats=2, head_dim=2, columns=2, sink_logits=True)
    state = state_after(case, 3, seed=0)
    assert state is not None
    names = [name for name, tensor in case.params._asdict().items() if tensor is not None]
    state_names = [name for name, tensor in state.tensors().items() if tensor.is_floating_point()]

    def function(q, k, v, *rest):
        params = case.params._replace(**dict(zip(names, rest, strict=False)))
        given = state.clone()
        for name, tensor in zip(state_names, rest[len(names) :], strict=True):
            setattr(given, name, tensor)
        y, after = chunked(q, k, v, spec, params, state=given, return_state=True)
        return y, after.S, after.z

    inputs = [case.q, case.k, case.v, *(getattr(case.params, name) for name in names)]
    inputs += [getattr(state, name) for name in state_names]
    assert torch.autograd.gradcheck(function, [tensor.detach().clone().requires_grad_() for tensor in inputs])


@pytest.mark.parametrize("backend", [reference, chunked], ids=["reference", "chunked"])
def test_the_gradient_runs_through_the_row_maximum(backend) -> None:
    """c_n cancels when only the window is left, and else changes the gradients of q, k and nothing before."""
    case = make_case(AttentionConfig("sliding", 4), 20)
    _, gradients = results_and_gradients(backend, case, None)
    _, detached = results_and_gradients(hybrid_wrong.row_maximum_detached, case, None)
    for name in ("q", "k"):
        changed = (gradients[name] - detached[name]).abs().max() / gradients[name].abs().max()
        assert changed > 0.01
    window_only = case.part(0, 4)
    _, gradients = results_and_gradients(backend, window_only, None)
    _, detached = results_and_gradients(hybrid_wrong.row_maximum_detached, window_only, None)
    torch.testing.assert_close(gradients["q"], detached["q"])


def test_catches_a_detached_row_maximum() -> None:
    case = make_case(AttentionConfig("sliding", 4), 20)
    with pytest.raises(AssertionError, match="gradient of q"):
        check_same_as_reference(hybrid_wrong.row_maximum_detached, case)


def test_catches_sums_in_bf16() -> None:
    with pytest.raises(AssertionError, match=r"reference, state\.S"):
        check_same_as_reference(hybrid_wrong.bf16_state, varied("terraced-4", 65), return_state=True)


def test_catches_tokens_that_pass_the_window_within_a_chunk() -> None:
    wrong = hybrid_wrong.chunk_drops_what_passes_the_window
    with pytest.raises(AssertionError, match=r"reference, state\.S"):
        check_same_as_reference(wrong, varied("terraced-4", 65), return_state=True)


@pytest.mark.parametrize("repeats", [1, 3, 4])
@pytest.mark.parametrize("name", ["sliding-4", "terraced-64", "terraced-16-t2r", "linear"])
@pytest.mark.parametrize("backend", [reference, chunked], ids=["reference", "chunked"])
def test_one_state_per_group_equals_repeated_keys(backend, name: str, repeats: int) -> None:
    check_shared_state(backend, make_case(SPECS[name], 150, repeats=repeats))


def test_catches_a_state_shared_by_the_wrong_heads() -> None:
    with pytest.raises(AssertionError, match="shared state, output"):
        check_shared_state(hybrid_wrong.groups_interleaved, make_case(SPECS["sliding-4"], 20, repeats=3))
    with pytest.raises(AssertionError, match="reference, output"):
        check_same_as_reference(hybrid_wrong.groups_interleaved, make_case(SPECS["sliding-4"], 20, repeats=3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["sliding-70-sinks-3", "terraced-64", "linear"])
def test_half_precision_activations_are_computed_in_float32(name: str, dtype: torch.dtype) -> None:
    """Only the output is rounded to the activations' type; sums stay float32, the ring keeps the type."""
    case = make_case(SPECS[name], 150, dtype=torch.float32)
    half = case.map(lambda tensor: tensor)
    half.q, half.k, half.v = case.q.to(dtype), case.k.to(dtype), case.v.to(dtype)
    exact = half.map(lambda tensor: tensor.double())
    y, state = half.run(chunked, return_state=True)
    expected, _ = exact.run(reference)
    assert state is not None
    assert (y.dtype, state.S.dtype, state.z.dtype) == (dtype, torch.float32, torch.float32)
    assert (state.k.dtype, state.sink_v.dtype) == (dtype, dtype)
    # Half a unit in the last place of the output (2^-9, 2^-12), and float32 sums.
    torch.testing.assert_close(y.double(), expected, rtol=torch.finfo(dtype).eps / 2, atol=1e-5)
