"""The state: what it holds, that calls leave it alone unless told, that its size is constant."""

from __future__ import annotations

from dataclasses import replace

import hybrid_wrong
import pytest
import torch
from hybrid_cases import IMPLEMENTATIONS, SHARES, SPECS, chunked, make_case, random_mask
from hybrid_checks import check_given_state_untouched

from lolcats.config.attention import AttentionConfig
from lolcats.ops import HybridState, hybrid_attention, initial_state
from lolcats.ops.hybrid_attention.state import push_tokens, ring_positions


@pytest.mark.parametrize("share_state", SHARES)
@pytest.mark.parametrize("name", list(SPECS))
def test_size_does_not_depend_on_length(name: str, share_state: str) -> None:
    sizes = set()
    for tokens in (1, 63, 300):
        case = make_case(SPECS[name], tokens, repeats=3, share_state=share_state)
        state = case.run(chunked, return_state=True)[1]
        assert state is not None
        sizes.add(state.nbytes)
    assert len(sizes) == 1
    assert sizes == {initial_state(case.spec, case.params, case.k).nbytes}


@pytest.mark.parametrize(("share_state", "state_heads"), [("kv_head", 2), ("query_head", 6)])
def test_shapes_types_and_bytes(share_state: str, state_heads: int) -> None:
    spec = AttentionConfig("terraced", 16, window_blocks=3, sinks=5, sparse_cache=7)
    case = make_case(spec, 100, batch=3, repeats=3, share_state=share_state, dtype=torch.float32)
    case.q, case.k, case.v = case.q.bfloat16(), case.k.bfloat16(), case.v.bfloat16()
    state = case.run(chunked, return_state=True)[1]
    assert state is not None
    assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state.tensors().items()} == {
        "S": ((3, state_heads, 8, 8), torch.float32),
        "z": ((3, state_heads, 8), torch.float32),
        "key_moment": ((3, 2, 0, 8), torch.float32),
        "k": ((3, 2, 48, 8), torch.bfloat16),
        "v": ((3, 2, 48, 8), torch.bfloat16),
        "sink_k": ((3, 2, 5, 8), torch.bfloat16),
        "sink_v": ((3, 2, 5, 8), torch.bfloat16),
        "cache_k": ((3, 2, 7, 8), torch.bfloat16),
        "cache_v": ((3, 2, 7, 8), torch.bfloat16),
        "position": ((3,), torch.int64),
    }
    assert state.nbytes == 3 * (4 * state_heads * 8 * 9 + 2 * 2 * 2 * (48 + 5 + 7) * 8 + 8)
    by_leverage = HybridState.zeros(replace(spec, cache_by="leverage"), 3, 2, state_heads, 8, case.k)
    assert by_leverage.key_moment.shape == (3, 2, 9, 8)
    assert by_leverage.nbytes == state.nbytes + 3 * 4 * 2 * 9 * 8


@pytest.mark.parametrize("name", ["sliding-4", "terraced-4", "terraced-16-one-block-sinks-2"])
def test_ring_and_sinks_hold_the_tokens_they_say(name: str) -> None:
    case = make_case(SPECS[name], 61)
    state = case.run(chunked, return_state=True)[1]
    assert state is not None
    for slot, position in enumerate(ring_positions(state.position, case.spec.capacity)[0].tolist()):
        assert position % case.spec.capacity == slot
        assert 61 - case.spec.capacity <= position < 61
        assert torch.equal(state.k[:, :, slot], case.k[:, :, position])
        assert torch.equal(state.v[:, :, slot], case.v[:, :, position])
    assert torch.equal(state.sink_k, case.k[:, :, : case.spec.sinks])
    assert torch.equal(state.sink_v, case.v[:, :, : case.spec.sinks])


@pytest.mark.parametrize("tokens", [1, 3, 8, 61])
@pytest.mark.parametrize("name", ["linear-elu-sinks-2", "sliding-4", "terraced-4", "terraced-16-one-block-sinks-2"])
def test_first_tokens_go_where_later_ones_would(name: str, tokens: int) -> None:
    case = make_case(SPECS[name], tokens)
    empty = initial_state(case.spec, case.params, case.k)
    quick = push_tokens(empty, case.spec, case.k, case.v, None, fresh=True)
    careful = push_tokens(empty, case.spec, case.k, case.v, None)
    for (field, found), expected in zip(quick.tensors().items(), careful.tensors().values(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, msg=field)
        # The state outlives the call; a view of all keys would keep them in memory.
        assert found.untyped_storage().nbytes() == expected.untyped_storage().nbytes(), field


def test_ring_positions_before_any_token_are_negative() -> None:
    assert (ring_positions(torch.zeros(2, dtype=torch.int64), 5) < 0).all()
    assert ring_positions(torch.tensor([7]), 5).tolist() == [[5, 6, 2, 3, 4]]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", list(SPECS))
def test_in_place_gives_the_same(name: str, masked: bool) -> None:
    case = make_case(SPECS[name], 40, batch=3, repeats=2)
    mask = random_mask(3, 40, "holes", 5) if masked else torch.ones(3, 40, dtype=torch.bool)
    with torch.no_grad():
        first = case.part(0, 9).run(chunked, mask=mask[:, :9], return_state=True)[1]
        assert first is not None
        copied, written = first, first.clone()
        for t in range(9, 40):
            token, real = case.part(t, t + 1), mask[:, t : t + 1]
            y, copied = token.run(chunked, state=copied, mask=real, return_state=True)
            y_inplace, after = token.run(chunked, state=written, mask=real, return_state=True, inplace=True)
            assert torch.equal(y, y_inplace)
            assert after is written
        assert copied is not None
        for name, tensor in copied.tensors().items():
            assert torch.equal(written.tensors()[name], tensor), name


@pytest.mark.parametrize("name", list(SPECS))
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("backend", list(IMPLEMENTATIONS))
def test_the_given_state_is_left_alone(backend: str, grad: bool, name: str) -> None:
    with torch.set_grad_enabled(grad):
        # 65 tokens: the single token afterwards starts a block and folds one.
        check_given_state_untouched(IMPLEMENTATIONS[backend], make_case(SPECS[name], 65))


def test_catches_writing_into_the_given_state() -> None:
    with torch.no_grad(), pytest.raises(AssertionError, match=r"the given state\.\w+ changed"):
        check_given_state_untouched(hybrid_wrong.writes_into_the_given_state, make_case(SPECS["sliding-4"], 65))


def test_select_repeats_and_reorders_sequences() -> None:
    """Beam search: the selected states go on as their originals."""
    case = make_case(SPECS["terraced-16-one-block-sinks-2"], 50, batch=3)
    mask = random_mask(3, 40, "left", 2)
    index = torch.tensor([2, 0, 0, 1])
    with torch.no_grad():
        state = case.part(0, 40).run(chunked, mask=mask, return_state=True)[1]
        assert state is not None
        y, _ = case.part(40, 50).run(chunked, state=state)
        picked, _ = case.rows(index).part(40, 50).run(chunked, state=state.select(index))
    assert state.select(index).position.tolist() == state.position[index].tolist()
    torch.testing.assert_close(picked, y[index], rtol=1e-12, atol=1e-12)


def test_clone_and_select_share_no_memory() -> None:
    state = make_case(SPECS["sliding-4"], 30).run(chunked, return_state=True)[1]
    assert state is not None
    before = state.clone()
    for copy in (state.clone(), state.select(torch.tensor([0, 1]))):
        for tensor in copy.tensors().values():
            tensor.fill_(7)
    for name, tensor in before.tensors().items():
        assert torch.equal(state.tensors()[name], tensor)


def test_the_initial_state_is_empty() -> None:
    case = make_case(SPECS["terraced-16-one-block-sinks-2"], 20)
    state = initial_state(case.spec, case.params, case.k)
    assert not any(tensor.any() for tensor in state.tensors().values())
    y, _ = case.run(hybrid_attention)
    from_state, _ = case.run(hybrid_attention, state=state)
    torch.testing.assert_close(from_state, y, rtol=1e-12, atol=1e-12)


def test_no_state_unless_asked_for() -> None:
    case = make_case(SPECS["terraced-4"], 20)
    for attend in IMPLEMENTATIONS.values():
        assert case.run(attend)[1] is None
