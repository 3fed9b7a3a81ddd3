"""The kernel that chooses which tokens a sparse cache retains, against the loop over blocks in torch."""

from __future__ import annotations

import pytest
import torch
from kernel_kit import DEVICE, Case, make_case, needs_gpu
from torch import Tensor

from lolcats.config.attention import AttentionConfig
from lolcats.ops import HybridState, hybrid_attention
from lolcats.ops.hybrid_attention.api import initial_state
from lolcats.ops.hybrid_attention.kernels import eviction
from lolcats.ops.hybrid_attention.sparse_chunked import choose, sparse_chunked

CONFIG = AttentionConfig("terraced", 4, sinks=1, sparse_cache=5)
# Relative RMS error: float32, sums of some hundred products.
TOLERANCE = 1e-5


class Candidates:
    """Random candidates of sequences that are at different places, with scores of which no two are nearer than 1e-4.

    Args:
        slots, block, blocks: C, L and N.
        before: tokens of each sequence that have left the window already, or, below 0, that leave nothing at first.
    """

    def __init__(self, slots: int, block: int, blocks: int, head_dim: int, before: tuple[int, ...] = (0,)) -> None:
        generator = torch.Generator().manual_seed(slots)
        kv_heads, count = 2, slots + blocks * block
        self.slots = slots
        left_BN = torch.tensor(before)[:, None] + block * torch.arange(blocks)
        # One sink is never a candidate.
        filled_BNC = torch.arange(slots) < left_BN[..., None] - 1
        real_BNL = (left_BN[..., None] >= 0) & (left_BN[..., None] + torch.arange(block) > 0)
        self.filled_BC = filled_BNC[:, 0]
        self.exists_BNJ = torch.cat([filled_BNC & real_BNL[..., -1:], real_BNL], dim=2)
        shape = (len(before), kv_heads, blocks)
        length_M = torch.logspace(0, 1, count)[torch.randperm(count, generator=generator)]
        k_BGMD = torch.randn(*shape[:2], count, head_dim, generator=generator)
        self.k_BGMD = k_BGMD / k_BGMD.norm(dim=-1, keepdim=True) * length_M[:, None]
        self.mean_BGND = 1e-5 * torch.randn(*shape, head_dim, generator=generator)
        scale_BGN11 = 1.0 + torch.rand(*shape, 1, 1, generator=generator)
        self.whiten_BGNDD = scale_BGN11 * (
            torch.eye(head_dim) + 1e-5 * torch.randn(*shape, head_dim, head_dim, generator=generator).tril()
        )
        for name, x in vars(self).items():
            if isinstance(x, Tensor):
                setattr(self, name, x.to(DEVICE))

    def poisoned(self) -> Candidates:
        """With NaN in place of all keys that do not exist at any time."""
        exists_BM = torch.cat([self.filled_BC, self.exists_BNJ[..., self.slots :].flatten(1)], dim=1)
        self.k_BGMD = self.k_BGMD.masked_fill(~exists_BM[:, None, :, None], torch.nan)
        return self

    def in_torch(self) -> tuple[Tensor, ...]:
        return choose(self.k_BGMD, self.mean_BGND, self.whiten_BGNDD, self.exists_BNJ, self.slots)

    def in_kernel(self) -> tuple[Tensor, ...]:
        return eviction.choose_op(self.k_BGMD, self.mean_BGND, self.whiten_BGNDD, self.exists_BNJ, self.slots)


def assert_same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for name, mine, right in zip(("slots", "evicted", "folds"), found, expected, strict=True):
        assert mine.dtype == right.dtype, name
        assert torch.equal(mine, right), f"{name} differ"


@pytest.mark.parametrize(
    "sizes",
    [
        {"slots": 5, "block": 4, "blocks": 6, "head_dim": 16, "before": (0, 9, -8)},
        {"slots": 3, "block": 7, "blocks": 3, "head_dim": 20, "before": (0, 2)},
        {"slots": 70, "block": 3, "blocks": 3, "head_dim": 16, "before": (60, 100)},
        {"slots": 130, "block": 8, "blocks": 2, "head_dim": 100, "before": (126, 0)},
    ],
    ids=lambda sizes: "-".join(str(size) for size in list(sizes.values())[:4]),
)
def test_the_same_tokens_stay(sizes):
    candidates = Candidates(**sizes)
    assert_same(candidates.in_kernel(), candidates.in_torch())


@needs_gpu
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize(("slots", "block"), [(128, 64), (64, 64), (500, 100), (960, 64)])
def test_large(slots, block, head_dim):
    candidates = Candidates(slots, block, 40, head_dim, before=(0, 1000, -200))
    assert_same(candidates.in_kernel(), candidates.in_torch())


def test_who_does_not_exist_does_not_matter():
    candidates = Candidates(6, 4, 5, 16, before=(0, 3, -8))
    expected = candidates.in_torch()
    assert_same(candidates.poisoned().in_kernel(), expected)


def test_of_equal_scores_the_older_stays():
    """Whole numbers, of which the scores are exact."""
    candidates = Candidates(6, 5, 5, 16, before=(0, 11))
    generator = torch.Generator().manual_seed(0)
    candidates.k_BGMD = torch.randint(0, 2, candidates.k_BGMD.shape, generator=generator).float().to(DEVICE)
    candidates.k_BGMD[..., 3:] = 0.0  # scores 0 to 3
    candidates.mean_BGND = torch.zeros_like(candidates.mean_BGND)
    candidates.whiten_BGNDD = torch.eye(16, device=DEVICE).expand_as(candidates.whiten_BGNDD)
    assert_same(candidates.in_kernel(), candidates.in_torch())


def test_numbers_that_are_none_leave_an_order():
    """A key of NaN takes a slot; indices stay indices."""
    candidates = Candidates(5, 4, 4, 16, before=(9,))
    candidates.k_BGMD[:, :, 7] = torch.nan
    slots, evicted, _ = candidates.in_kernel()
    assert (slots[:, :, -1] == 7).any(-1).all()
    everyone = torch.cat([slots[:, :, -1:], *evicted[:, :, :, None].unbind(2)], dim=-1)
    assert torch.equal(everyone.sort(-1).values[0, 0, 0].cpu(), torch.arange(5 + 16))


def wrong_moments(candidates: Candidates) -> None:
    """Of the block before."""
    candidates.mean_BGND, candidates.whiten_BGNDD = candidates.mean_BGND.roll(1, 2), candidates.whiten_BGNDD.roll(1, 2)


def wrong_mean(candidates: Candidates) -> None:
    candidates.mean_BGND = torch.zeros_like(candidates.mean_BGND)


def wrong_heads(candidates: Candidates) -> None:
    candidates.k_BGMD = candidates.k_BGMD.flip(1)


def wrong_sinks(candidates: Candidates) -> None:
    """They are candidates, though they are exact already."""
    candidates.exists_BNJ = candidates.exists_BNJ.clone()
    candidates.exists_BNJ[0, 0, candidates.slots] = True


def wrong_ages(candidates: Candidates) -> None:
    """The latest tokens of a block are taken for the oldest."""
    left = candidates.k_BGMD[:, :, candidates.slots :].unflatten(2, (-1, 4)).flip(3).flatten(2, 3)
    candidates.k_BGMD = torch.cat([candidates.k_BGMD[:, :, : candidates.slots], left], dim=2)


@pytest.mark.parametrize("fault", [wrong_moments, wrong_mean, wrong_heads, wrong_sinks, wrong_ages])
def test_faults_are_found(fault):
    candidates = Candidates(5, 4, 8, 16, before=(0, 9))
    candidates.whiten_BGNDD = candidates.whiten_BGNDD @ torch.diag_embed(torch.rand(2, 2, 8, 16, device=DEVICE) + 0.1)
    candidates.mean_BGND = 1e5 * candidates.mean_BGND
    expected = candidates.in_torch()
    fault(candidates)
    with pytest.raises(AssertionError, match="differ"):
        assert_same(candidates.in_kernel(), expected)


@torch.no_grad()
def attend(case: Case, state: HybridState, length_B: Tensor, *, use_kernel: bool = True) -> tuple[Tensor, HybridState]:
    tensors = case.q, case.k, case.v, case.config, case.params
    options = {"fresh": False, "length_B": length_B, "use_kernel": use_kernel}
    return sparse_chunked(*tensors, scale=case.q.shape[-1] ** -0.5, softcap=None, state=state, **options)


@pytest.mark.parametrize("share", ["kv_head", "query_head"])
def test_whole_sequences(share):
    """Two pieces of sequences of different length, against the reference in float64."""
    case = make_case(CONFIG, 57, batch=2, heads=4, kv_heads=2, share=share)
    mask = torch.arange(57, device=DEVICE) < torch.tensor([57, 46], device=DEVICE)[:, None]
    state = initial_state(CONFIG, case.params, case.k)
    y_first, state = attend(case.part(0, 30), state, torch.tensor([30, 30], device=DEVICE))
    y_last, state = attend(case.part(30, 57), state, torch.tensor([27, 16], device=DEVICE))
    exact = case.map(Tensor.double)
    expected, after = hybrid_attention(
        *(exact.q, exact.k, exact.v, CONFIG, exact.params), mask=mask, return_state=True, backend="reference"
    )
    assert after is not None
    pairs = {name: (tensor, after.tensors()[name]) for name, tensor in state.tensors().items()}
    pairs["output"] = torch.cat([y_first, y_last], dim=2), expected
    for name, (found, right) in pairs.items():
        error = (found.double() - right.double()).norm() / right.double().norm()
        assert error <= TOLERANCE, f"{name}: relative RMS error {error:.1e}"


@pytest.fixture
def calls(monkeypatch) -> list:
    """Of the kernel."""
    found: list = []

    def count(*arguments):
        found.append(arguments)
        return original(*arguments)

    original = eviction.choose_op
    monkeypatch.setattr(eviction, "choose_op", count)
    return found


def test_who_takes_the_kernel(calls):
    """It does if asked for, float64 does not."""
    case = make_case(CONFIG, 16)
    for changed, use_kernel in (
        (case, True),
        (case, False),
        (case.map(Tensor.double), True),
    ):
        state = initial_state(changed.config, changed.params, changed.k)
        attend(changed, state, torch.tensor([16], device=DEVICE), use_kernel=use_kernel)
    assert len(calls) == 1


@needs_gpu
def test_long_texts_on_a_gpu(calls):
    """`auto` takes the kernel, `chunked` does not, and both give the same."""
    config = AttentionConfig("terraced", 64, sinks=1, sparse_cache=128)
    case = make_case(config, 5000, batch=2, heads=9, kv_heads=3, head_dim=64, columns=32, dtype=torch.bfloat16)
    factor_T = torch.logspace(0, 1, 5000)[torch.randperm(5000)].to(DEVICE)  # scores that are apart
    case.k = (case.k * factor_T[:, None]).to(torch.bfloat16)
    tensors = case.q, case.k, case.v, config, case.params
    with torch.no_grad():
        y, state = hybrid_attention(*tensors, return_state=True)
        assert len(calls) == 2  # pieces of 4096 tokens
        expected, after = hybrid_attention(*tensors, return_state=True, backend="chunked")
        assert len(calls) == 2
    assert state is not None
    assert after is not None
    assert torch.equal(state.cache_k, after.cache_k)
    torch.testing.assert_close(y, expected)
