"""Specs and random inputs for the tests of the hybrid attention, and how results are compared."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from lolcats.config.attention import AttentionConfig
from lolcats.ops import HybridParams, HybridState, hybrid_attention
from lolcats.ops.hybrid_attention.feature_maps import get_feature_map

# Anything that is called like `hybrid_attention`.
Attend = Callable[..., tuple[Tensor, HybridState | None]]

reference: Attend = partial(hybrid_attention, backend="reference")
chunked: Attend = partial(hybrid_attention, backend="chunked")  # single tokens with a state: step.py
IMPLEMENTATIONS = {"reference": reference, "chunked": chunked}

# Every branch of the operator: chunks of one block, of several blocks, blocks larger than the smallest
# chunk, sinks within and beyond the window, each part alone, every feature map, length caps.
SPECS = {
    "sliding-1": AttentionConfig("sliding", 1),
    "sliding-70-sinks-3": AttentionConfig("sliding", 70, sinks=3),
    "sliding-8-no-linear-sinks-2": AttentionConfig("sliding", 8, sinks=2, feature_map=None),
    "terraced-4": AttentionConfig("terraced", 4),
    "terraced-64": AttentionConfig("terraced", 64),
    "terraced-16-one-block-sinks-2": AttentionConfig("terraced", 16, window_blocks=1, sinks=2),
    "terraced-48-three-blocks": AttentionConfig("terraced", 48, window_blocks=3),
    "terraced-100": AttentionConfig("terraced", 100),
    "terraced-5-sinks-70-elu": AttentionConfig("terraced", 5, sinks=70, feature_map="elu"),
    "terraced-16-t2r": AttentionConfig("terraced", 16, feature_map="t2r"),
    "terraced-8-no-linear": AttentionConfig("terraced", 8, feature_map=None),
    "linear": AttentionConfig("sliding", 0),
    "linear-t2r": AttentionConfig("terraced", 0, feature_map="t2r"),
    "cap-9-sliding-4": AttentionConfig("sliding", 4, linear_length_cap=9),
    "cap-70-sinks-3": AttentionConfig("terraced", 16, sinks=3, linear_length_cap=70),
    "cap-5-linear-elu-sinks-2": AttentionConfig("sliding", 0, sinks=2, feature_map="elu", linear_length_cap=5),
}
# ReLU features without a window: denominators near zero amplify rounding without bound, so float64 only.
FLOAT32_SPECS = [name for name in SPECS if name != "linear-t2r"]
GROUPS = ((2, 1), (1, 3), (2, 3), (1, 4))  # (key/value heads, query heads per key/value head)
SHARES = ("kv_head", "query_head")

# Relative to the largest expected entry. float64: sums of up to 500 products, eps 2e-16, with room for the
# division. float32: the same with eps 6e-8; gradients pass through two quotients more and are
# compared relative to 1 at least: without a linear part that of gamma is zero, a sum of terms that cancel.
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5}
GRADIENT_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}


@dataclass
class Case:
    """One set of inputs: q [B, H, T, D], k and v [B, G, T, D]."""

    spec: AttentionConfig
    q: Tensor
    k: Tensor
    v: Tensor
    params: HybridParams

    @property
    def tokens(self) -> int:
        return self.q.shape[2]

    @property
    def batch(self) -> int:
        return self.q.shape[0]

    def run(self, attend: Attend, scale=None, softcap=None, **options) -> tuple[Tensor, HybridState | None]:
        params = self.params._replace(scale=scale, softcap=softcap)
        return attend(self.q, self.k, self.v, self.spec, params, **options)

    def part(self, begin: int | None, end: int | None) -> Case:
        """Tokens [begin, end)."""
        cut = slice(begin, end)
        return replace(self, q=self.q[:, :, cut], k=self.k[:, :, cut], v=self.v[:, :, cut])

    def rows(self, index: Tensor | list[int]) -> Case:
        """Sequences of the batch."""
        return replace(self, q=self.q[index], k=self.k[index], v=self.v[index])

    def map(self, function: Callable[[Tensor], Tensor]) -> Case:
        """Apply `function` to every tensor."""
        params = HybridParams(*(None if tensor is None else function(tensor) for tensor in self.params.tensors))
        return Case(self.spec, function(self.q), function(self.k), function(self.v), params)

    def tensors(self) -> dict[str, Tensor]:
        named = {"q": self.q, "k": self.k, "v": self.v, **self.params._asdict()}
        return {name: tensor for name, tensor in named.items() if tensor is not None}


def make_case(
    spec: AttentionConfig,
    tokens: int,
    *,
    batch: int = 2,
    kv_heads: int = 2,
    repeats: int = 1,
    head_dim: int = 8,
    columns: int = 4,
    share_state: str = "kv_head",
    sink_logits: bool = False,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Case:
    """Random inputs; the same numbers for every dtype."""
    generator = torch.Generator().manual_seed(seed)
    heads = kv_heads * repeats
    state_heads = kv_heads if share_state == "kv_head" else heads

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    q, k, v = (normal(batch, count, tokens, head_dim) for count in (heads, kv_heads, kv_heads))
    gamma = (0.1 + 0.8 * torch.rand(heads, generator=generator, dtype=torch.float64)).to(dtype)
    params = HybridParams(gamma, sink_logits=normal(heads) if sink_logits else None)
    if spec.feature_map is not None:
        params = params._replace(
            q_weight=normal(heads, head_dim, columns), k_weight=normal(state_heads, head_dim, columns)
        )
        if get_feature_map(spec.feature_map).has_bias:
            params = params._replace(q_bias=normal(heads, columns), k_bias=normal(state_heads, columns))
    return Case(spec, q, k, v, params)


def random_mask(batch: int, tokens: int, kind: str, seed: int) -> Tensor:
    """[batch, tokens] bool. The first row is full; the others lose a random number of tokens."""
    chance = random.Random(seed)
    mask = torch.ones(batch, tokens, dtype=torch.bool)
    for row in mask[1:]:
        lost = chance.randint(0, tokens)
        if kind == "left":
            row[:lost] = False
        elif kind == "right":
            row[tokens - lost :] = False
        else:
            row[chance.sample(range(tokens), lost)] = False
    return mask


def packed(case: Case, mask: Tensor) -> tuple[Case, Tensor]:
    """The tokens of every row that the mask [B, T] takes, in one row, and the borders between them."""
    q, k, v = (x.transpose(1, 2)[mask].transpose(0, 1)[None] for x in (case.q, case.k, case.v))
    return replace(case, q=q, k=k, v=v), pad(mask.sum(1).cumsum(0), (1, 0)).int()


def unpacked(y_1HND: Tensor, mask: Tensor) -> Tensor:
    """[B, H, T, D]: the inverse, with zeros elsewhere."""
    y_BTHD = y_1HND.new_zeros(*mask.shape, *y_1HND.transpose(1, 2).shape[2:])
    y_BTHD[mask] = y_1HND[0].transpose(0, 1)
    return y_BTHD.transpose(1, 2)


def step_some(attend: Attend, token: Case, state: HybridState, real_B: Tensor, **options) -> tuple[Tensor, HybridState]:
    """One token of some sequences; the others do not exist for this call."""
    position = torch.where(real_B, state.position, -1)
    y, after = token.run(attend, state=replace(state, position=position), return_state=True, **options)
    assert after is not None
    return y, replace(after, position=torch.where(real_B, after.position, state.position))


def random_pieces(tokens: int, seed: int) -> list[int]:
    """Sizes that sum to `tokens`: single tokens, short and long chunks."""
    chance = random.Random(seed)
    sizes = []
    while sum(sizes) < tokens:
        sizes.append(min(chance.choice([1, 1, 2, 5, 30, 64, 130]), tokens - sum(sizes)))
    return sizes


def assert_near(actual: Tensor, expected: Tensor, tolerance: float, what: str, *, floor: float = 1e-3) -> None:
    """Largest difference, relative to the largest expected entry, or to `floor` if that is larger."""
    assert actual.shape == expected.shape, f"{what}: shape {[*actual.shape]}, expected {[*expected.shape]}"
    if expected.numel() == 0:
        return
    assert torch.isfinite(actual).all(), f"{what}: not finite"
    scale = max(expected.abs().max().item(), floor)
    error = (actual.to(expected.dtype) - expected).abs().max().item() / scale
    assert error <= tolerance, f"{what}: relative error {error:.1e}, allowed {tolerance:.1e}"


def assert_states_near(actual: HybridState, expected: HybridState, tolerance: float, what: str) -> None:
    for name, tensor in expected.tensors().items():
        assert_near(actual.tensors()[name].double(), tensor.double(), tolerance, f"{what}, state.{name}")
