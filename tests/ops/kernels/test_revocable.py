"""A few tokens with a state, of which the last ones are taken back: the plain implementation and the kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from kernel_kit import DEVICE, Case, assert_near, decode, exact, make_case, needs_gpu
from torch import Tensor

from lolcats.config.attention import AttentionConfig
from lolcats.ops import HybridState
from lolcats.ops.hybrid_attention.api import initial_state

CONFIGS = {
    "terraced-4-two-blocks-sinks-2-cap-9": AttentionConfig("terraced", 4, sinks=2, linear_length_cap=9),
    "terraced-5-three-blocks": AttentionConfig("terraced", 5, 3),
    "terraced-3-t2r-sinks-7": AttentionConfig("terraced", 3, sinks=7, feature_map="t2r"),
    "terraced-4-no-linear": AttentionConfig("terraced", 4, feature_map=None),
    "terraced-8-one-block-elu": AttentionConfig("terraced", 8, 1, feature_map="elu"),
}
Accept = Callable[[HybridState, Tensor, int], None]


def accept(state: HybridState, taken_B: Tensor, tokens: int) -> None:
    """The first `taken_B` of so many tokens stay."""
    state.position += taken_B


@torch.no_grad()
def play(
    case: Case, backend: str, most: int, seed: int = 0, accept: Accept = accept, room: bool = True, **options
) -> tuple[Tensor, HybridState]:
    """Outputs [B, H, T, D] and the last state of sequences in rounds of 1 to `most` tokens, of which the first ones, in
    each row another number or none, are the sequence's, and the others anything."""
    generator = torch.Generator().manual_seed(seed)
    batch, total = case.q.shape[0], case.q.shape[2]
    row_B1 = torch.arange(batch, device=DEVICE)[:, None]
    at_B = torch.zeros(batch, dtype=torch.int64, device=DEVICE)
    state, y_BHTD = initial_state(case.config, case.params, case.k), torch.full_like(case.q, torch.nan)
    while bool((at_B < total).any()):
        tokens = int(torch.randint(1, most + 1, (1,), generator=generator))
        step_T = torch.arange(tokens, device=DEVICE)
        right_B = torch.randint(0, tokens + 1, (batch,), generator=generator).to(DEVICE).clamp(max=total - at_B)
        length_B = torch.where(right_B > 0, torch.full_like(at_B, tokens).clamp(max=total - at_B), 0)
        place_BT = (at_B[:, None] + step_T).clamp(max=total - 1)
        inputs = []
        for x_BHTD in (case.q, case.k, case.v):
            new_BTHD = x_BHTD.transpose(1, 2)[row_B1, place_BT]
            wrong_BTHD = torch.randn(new_BTHD.shape, generator=generator).to(new_BTHD)
            inputs.append(
                torch.where((step_T < right_B[:, None])[..., None, None], new_BTHD, wrong_BTHD).transpose(1, 2)
            )
        now = replace(case, q=inputs[0], k=inputs[1], v=inputs[2])
        y, after = now.run(backend, state=state, length_B=length_B, revocable=True, inplace=True, **options)
        assert after is not None
        state = after
        taken_B = torch.minimum(right_B, case.config.room_at(at_B)) if room else right_B
        for row, (at, taken) in enumerate(zip(at_B.tolist(), taken_B.tolist(), strict=True)):
            y_BHTD[row, :, at : at + taken] = y[row, :, :taken]
        accept(state, taken_B, tokens)
        at_B += taken_B
    return y_BHTD, state


def check_play(case: Case, backend: str, most: int, softcap: float | None = None, **options) -> None:
    """As the reference in float64 on the whole sequences; and single steps go on from the state."""
    cut = case.q.shape[2] - 5
    y, state = play(case.part(0, cut), backend, most, softcap=softcap, **options)
    expected, _ = exact(case).run("reference", softcap=softcap)
    _, right = exact(case.part(0, cut)).run("reference", return_state=True, softcap=softcap)
    assert right is not None
    found = {"y": y, "S": state.joined().S.clone(), "z": state.z.clone()}
    assert torch.equal(state.position, right.position)
    found["later"], _ = decode(
        case.part(cut, None),
        step=lambda now, **rest: now.run("auto", inplace=True, **rest),
        state=state,
        softcap=softcap,
    )
    wanted = {"y": expected[:, :, :cut], "S": right.S, "z": right.z, "later": expected[:, :, cut:]}
    assert_near(found, wanted, case.q.dtype)


BACKENDS = ["reference", "triton"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CONFIGS)
def test_appended_and_taken_back(name, backend):
    """Rows at places of their own, a state per query head in every other configuration."""
    share = ("kv_head", "query_head")[[*CONFIGS].index(name) % 2]
    case = make_case(CONFIGS[name], 29, batch=3, share=share)
    check_play(case, backend, most=6)


@pytest.mark.parametrize(
    ("tokens", "most", "softcap", "sizes"),
    [
        (33, 9, 2.0, {"heads": 6, "kv_heads": 2, "head_dim": 20, "columns": 10, "sink_logits": True}),
        pytest.param(
            *(19, 3, None, {"heads": 3, "kv_heads": 3, "dtype": torch.bfloat16, "head_dim": 32, "columns": 16}),
            marks=pytest.mark.slow,
        ),
        (33, 9, None, {"heads": 12, "kv_heads": 1, "dtype": torch.bfloat16}),  # in tiles of two tokens
    ],
)
def test_kernels_of_other_sizes(tokens, most, softcap, sizes):
    config = AttentionConfig("terraced", 8, sinks=2, linear_length_cap=9)
    check_play(make_case(config, tokens, batch=2, **sizes), "triton", most, softcap)


def wrong_position(state: HybridState, taken_B: Tensor, tokens: int) -> None:
    """Rejected tokens stay."""
    state.position += torch.where(taken_B > 0, tokens, 0)


def wrong_slot(state: HybridState, taken_B: Tensor, tokens: int) -> None:
    """A rejected token's key in the place of an accepted one."""
    accept(state, taken_B, tokens)
    state.k.copy_(state.k.roll(1, 2))


def wrong_sums(state: HybridState, taken_B: Tensor, tokens: int) -> None:
    """What a block adds to S is added again."""
    accept(state, taken_B, tokens)
    state.S *= 1.05


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fault", [wrong_position, wrong_slot, wrong_sums, "no room"])
def test_wrong_rounds_are_found(fault, backend):
    """No room: tokens of the next block are accepted, for which the ring has no place yet."""
    how = {"room": False} if fault == "no room" else {"accept": fault}
    case = make_case(CONFIGS["terraced-5-three-blocks"], 35, batch=2)
    with pytest.raises(AssertionError):
        check_play(case, backend, 4, **how)


@torch.no_grad()
def test_inplace_and_not():
    """In place the state's own tensors get the tokens; otherwise nothing changes."""
    case = make_case(CONFIGS["terraced-5-three-blocks"], 9)
    for backend in BACKENDS:
        _, state = case.part(0, 6).run("reference", return_state=True)
        assert state is not None
        before = state.clone()
        y, after = case.part(6, 9).run(backend, state=state, revocable=True)
        assert after is not None
        assert all(torch.equal(x, before.tensors()[name]) for name, x in state.tensors().items())
        y_inplace, same = case.part(6, 9).run(backend, state=state, revocable=True, inplace=True)
        assert same is not None
        assert torch.equal(y, y_inplace)
        for name, x in same.tensors().items():
            assert x.data_ptr() == state.tensors()[name].data_ptr(), name
            assert torch.equal(x, after.tensors()[name]), name
        assert int(same.position) == 6


def test_what_takes_no_token_back():
    case = make_case(AttentionConfig("sliding", 4), 3)
    state = initial_state(case.config, case.params, case.k)
    with torch.no_grad(), pytest.raises(ValueError, match="a sliding window of window_size=4 tokens takes none back"):
        case.run("auto", state=state, revocable=True)
    case = make_case(CONFIGS["terraced-5-three-blocks"], 17)
    with torch.no_grad(), pytest.raises(ValueError, match="expected a state"):
        case.run("auto", revocable=True)
    with torch.no_grad(), pytest.raises(ValueError, match="There are 17 tokens; a step takes up to 16"):
        case.run("triton", state=initial_state(case.config, case.params, case.k), revocable=True)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "batch"),
    [(9, 3, 64, 1), (9, 3, 64, 16), (32, 8, 128, 2), (32, 8, 128, 64), (8, 8, 80, 3), (14, 1, 128, 40)],
)
def test_large(heads, kv_heads, head_dim, batch, dtype):
    for window_size, sinks in ((64, 0), (32, 4)):
        config = AttentionConfig("terraced", window_size, sinks=sinks, linear_length_cap=100)
        sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "columns": head_dim // 2, "dtype": dtype}
        check_play(make_case(config, 200, batch=batch, **sizes), "triton", most=9)


@needs_gpu
@torch.no_grad()
def test_cuda_graphs():
    """A captured check, replayed, is the check."""
    case = make_case(AttentionConfig("terraced", 16, sinks=2), 60, batch=3, dtype=torch.bfloat16, head_dim=64)
    eager, captured = (initial_state(case.config, case.params, case.k) for _ in range(2))
    inputs = replace(case.part(0, 5).map(torch.clone), params=case.params)
    length_B = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    options = {"revocable": True, "inplace": True, "length_B": length_B}
    _, captured = inputs.run("triton", state=captured, **options)  # compiles
    _, eager = inputs.run("triton", state=eager, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, _ = inputs.run("triton", state=captured, **options)
    at = 0
    while at < 55:
        taken = min(1 + at % 5, int(case.config.room_at(at)))
        now = case.part(at, at + 5)
        for mine, new in zip((inputs.q, inputs.k, inputs.v), (now.q, now.k, now.v), strict=True):
            mine.copy_(new)
        length_B.copy_(torch.tensor([5, 0, 4]))
        graph.replay()
        expected, eager = now.run("triton", state=eager, **options)
        assert torch.equal(y, expected)
        for state in (eager, captured):
            state.position += torch.tensor([taken, 0, min(taken, 4)], device=DEVICE)
        for name, x in captured.tensors().items():
            assert torch.equal(x, eager.tensors()[name]), name
        at += taken
