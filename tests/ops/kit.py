"""What the operator's tests share: random cases, runs with gradients, comparison with the reference in float64."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lolcats.config.attention import AttentionConfig
from lolcats.ops import HybridParams, HybridState, hybrid_attention, initial_state
from lolcats.ops.hybrid_attention.feature_maps import FEATURE_MAPS

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
# Relative RMS error. float64: sums of some hundred products. float32: the same, on a GPU of three tf32 products each
# (2^-21); bfloat16: its own rounding is 1.1e-3, and gradients pass through about ten of them.
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5 if GPU else 1e-5, torch.bfloat16: 5e-3, torch.float16: 5e-3}
# What counts as zero, per entry: inputs and incoming gradients are of size one. That of window_factor is a difference
# of sums over all rows that cancel where little is linear. Those of q and k are exactly zero where a window holds a
# single key; the difference of two equal terms of size one left 2.3e-7 on a GPU, four times float32's rounding.
ZERO = {"gradient of window_factor": 0.2} | (dict.fromkeys(("gradient of q", "gradient of k"), 3e-2) if GPU else {})

# Every branch of the operator: chunks of one block, of several blocks, blocks larger than the smallest chunk, sinks
# within and beyond the window, each part alone, every feature map, length caps.
CONFIGS = (
    "sliding 1", "sliding 70 sinks=3", "sliding 8 sinks=2 map=None", "terraced 4", "terraced 64",
    "terraced 16 blocks=1 sinks=2", "terraced 48 blocks=3", "terraced 100", "terraced 5 sinks=70 map=t2r",
    "terraced 16 map=t2r", "terraced 8 map=None", "sliding 0", "terraced 0 map=t2r", "sliding 4 cap=9",
    "terraced 16 sinks=3 cap=70", "sliding 0 sinks=2 cap=5",
)  # fmt: skip

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")


def config_of(text: str) -> AttentionConfig:
    """Of a window, its size and more, as in `terraced 48 blocks=3 sinks=2 map=t2r cap=9`."""
    window, size, *words = text.split()
    names = {"blocks": "window_blocks", "sinks": "sinks", "map": "feature_map", "cap": "linear_length_cap"}
    pairs = (word.split("=") for word in words)
    given = {names[name]: int(x) if x.isdigit() else None if x == "None" else x for name, x in pairs}
    return AttentionConfig(window, int(size), **given)


@dataclass
class Case:
    config: AttentionConfig
    q: Tensor  # [B, H, T, D], as projections leave it: [B, T, H, D] in memory
    k: Tensor
    v: Tensor
    params: HybridParams

    @property
    def tokens(self) -> int:
        return self.q.shape[2]

    def map(self, function: Callable[[Tensor], Tensor]) -> Case:
        params = HybridParams(*(None if x is None else function(x) for x in self.params.tensors))
        return self.with_qkv(function, params=params)

    def with_qkv(self, function: Callable[[Tensor], Tensor], **others: Any) -> Case:
        return replace(self, q=function(self.q), k=function(self.k), v=function(self.v), **others)

    def leaves(self) -> dict[str, Tensor]:
        named = {"q": self.q, "k": self.k, "v": self.v, **self.params._asdict()}
        return {name: x for name, x in named.items() if x is not None}

    def part(self, begin: int, end: int | None) -> Case:
        return self.with_qkv(lambda x: x[:, :, begin:end])

    def run(
        self, backend: str, scale: float | None = None, softcap: float | None = None, **options: Any
    ) -> tuple[Tensor, HybridState | None]:
        params = self.params._replace(scale=scale, softcap=softcap)
        return hybrid_attention(self.q, self.k, self.v, self.config, params, backend=backend, **options)


def make_case(
    config: str | AttentionConfig,
    tokens: int,
    *,
    batch: int = 1,
    heads: int = 2,
    kv_heads: int = 1,
    head_dim: int = 16,
    columns: int = 8,
    share: str = "kv_head",
    dtype: torch.dtype = torch.float32,
    sink_logits: bool = False,
) -> Case:
    """Random inputs. With `share` there is one linear state per key/value head, or per query head."""
    config = config_of(config) if isinstance(config, str) else config
    generator = torch.Generator().manual_seed(tokens)

    def normal(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator).to(of).to(DEVICE)

    def activation(count: int) -> Tensor:
        return normal(batch, tokens, count, head_dim).transpose(1, 2)

    wide = torch.promote_types(dtype, torch.float32)
    params = HybridParams(torch.logit(0.2 + 0.6 * torch.rand(heads, generator=generator)).to(wide).to(DEVICE))
    if config.feature_map is not None:
        owners = (heads, kv_heads if share == "kv_head" else heads)
        # Values that bfloat16 holds exactly: rounding the weights is not the kernels' error.
        weights = [(normal(n, head_dim, columns) / head_dim**0.5).to(torch.bfloat16).to(wide) for n in owners]
        params = params._replace(q_weight=weights[0], k_weight=weights[1])
        if FEATURE_MAPS[config.feature_map].has_bias:
            biases = [normal(n, columns, of=torch.bfloat16).to(wide) for n in owners]
            params = params._replace(q_bias=biases[0], k_bias=biases[1])
    if sink_logits:  # seldom, and mostly, the largest of a query's scores
        params = params._replace(sink_logits=torch.linspace(-1, 3, heads).to(dtype).to(DEVICE))
    return Case(config, activation(heads), activation(kv_heads), activation(kv_heads), params)


def varied(turn: int) -> dict[str, Any]:
    """Another batch, group size, sharing and width for every turn, in float64."""
    kv_heads, repeats = ((2, 1), (1, 3), (2, 3), (1, 4))[turn % 4]
    sizes = {"batch": 1 + turn % 3, "heads": kv_heads * repeats, "kv_heads": kv_heads, "head_dim": (2, 5, 8)[turn % 3]}
    sizes |= {"columns": (3, 4)[turn % 2], "share": ("kv_head", "query_head")[turn // 2 % 2]}
    return sizes | {"sink_logits": turn % 5 == 0, "dtype": torch.float64}


def borders(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()


def packed(case: Case, mask: Tensor) -> tuple[Case, Tensor]:
    """The tokens of every row that the mask [B, T] takes, in one row, and the borders between them."""
    return case.with_qkv(lambda x: x.transpose(1, 2)[mask].transpose(0, 1)[None]), borders(*mask.sum(1).tolist())


def unpacked(y_1HND: Tensor, mask: Tensor) -> Tensor:
    """[B, H, T, D]: the inverse, with zeros elsewhere."""
    y_BTHD = y_1HND.new_zeros(*mask.shape, *y_1HND.transpose(1, 2).shape[2:])
    y_BTHD[mask] = y_1HND[0].transpose(0, 1)
    return y_BTHD.transpose(1, 2)


def random_pieces(tokens: int, seed: int) -> list[int]:
    """Sizes that sum to `tokens`: single tokens, short and long chunks."""
    chance, sizes = random.Random(seed), []
    while sum(sizes) < tokens:
        sizes.append(min(chance.choice([1, 1, 2, 5, 30, 64, 130]), tokens - sum(sizes)))
    return sizes


def alone(
    case: Case, cu_seqlens: Tensor, *, before: Case | None = None, lengths: tuple[int, ...] = (), **options: Any
) -> tuple[Tensor, HybridState]:
    """Packed sequences by their definition: every one whole in a call of the reference; behind them zeros.

    before, lengths: the tokens that come before, packed likewise, whose outputs are left out.
    """
    outputs, states = [], []
    past = borders(*lengths).tolist() if before else [0] * len(cu_seqlens)
    for n, (begin, end) in enumerate(pairwise(cu_seqlens.tolist())):
        whole = case.part(begin, end)
        if before is not None:
            early = before.part(past[n], past[n + 1])
            joined = [torch.cat([x, y], 2) for x, y in ((early.q, whole.q), (early.k, whole.k), (early.v, whole.v))]
            whole = replace(whole, **dict(zip("qkv", joined, strict=True)))
        y, after = whole.run("reference", **options | {"return_state": True})
        assert after is not None
        outputs.append(y[:, :, past[n + 1] - past[n] :])
        states.append(after)
    outputs.append(torch.zeros_like(case.q[:, :, int(cu_seqlens[-1]) :]))
    return torch.cat(outputs, dim=2), HybridState(*map(torch.cat, zip(*states, strict=True)))


def tokens_before(case: Case, lengths: tuple[int, ...]) -> Case:
    """`lengths` tokens, one sequence after the other, of the case's heads and with its parameters."""
    heads, kv_heads, head_dim = case.q.shape[1], case.k.shape[1], case.q.shape[3]
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "dtype": case.q.dtype}
    return replace(make_case(case.config, sum(lengths), **sizes), params=case.params)


def exact(x: Any) -> Any:
    """A case in float64."""
    return None if x is None else x.map(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)


def results(
    case: Case,
    backend: str,
    *,
    before: Case | None = None,
    lengths: tuple[int, ...] = (),
    gradients: bool = True,
    through_states: bool = True,
    **options: Any,
) -> dict[str, Tensor]:
    """Output, state, and the gradient of a random function of them for everything that goes in.

    before, lengths: as `alone`; the state after them is that of `chunked`.
    through_states: whether the function has states in it.
    """
    case = case.map(lambda x: x.detach().clone().requires_grad_(gradients))
    leaves = case.leaves()
    if before is not None:
        leaf = before.with_qkv(lambda x: x.detach().clone().requires_grad_(gradients), params=case.params)
        before, leaves = leaf, leaves | {f"earlier {name}": getattr(leaf, name) for name in "qkv"}
    if backend == "reference":
        mask = torch.ones(case.q.shape[::2], dtype=torch.bool, device=DEVICE)
        row, cu_seqlens = (case, options.pop("cu_seqlens")) if "cu_seqlens" in options else packed(case, mask)
        y, after = alone(row, cu_seqlens, before=before, lengths=lengths, **options)
        y = y if row is case else unpacked(y, mask)
    else:
        state = None
        if before is not None:
            _, state = before.run("chunked", cu_seqlens=borders(*lengths), return_state=True)
        y, after = case.run(backend, state=state, **options)
    found = {"output": y}
    if after is not None and options.get("return_state"):
        found |= {f"after.{name}": x for name, x in after._asdict().items()}
    if gradients:
        generator = torch.Generator().manual_seed(1)
        loss = torch.zeros((), device=y.device)
        for name, x in found.items():
            if x.is_floating_point() and x.numel() > 0 and (through_states or name == "output"):
                incoming = torch.randn(x.shape, generator=generator).to(torch.bfloat16).to(x)
                loss = loss + (x * incoming).sum()
        given = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        for (name, leaf), gradient in zip(leaves.items(), given, strict=True):
            found[f"gradient of {name}"] = torch.zeros_like(leaf) if gradient is None else gradient
    return {name: x.detach() for name, x in found.items()}


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype) -> None:
    for name, right in expected.items():
        if right.numel() == 0:
            continue
        assert found[name].shape == right.shape, name
        zero = ZERO.get(name, 1e-2) * right.numel() ** 0.5 if name != "loss" else 0.0
        error = (found[name].double() - right).norm() / right.double().norm().clamp_min(zero)
        # written so that NaN fails
        assert error <= TOLERANCE[dtype], f"{name}: relative RMS error {error:.1e}"


class Row(NamedTuple):
    """Of the matrix: settings, and the tokens of every row of the batch, or of the sequences of a packed one."""

    config: str
    tokens: int | tuple[int, ...]
    before: tuple[int, ...] | None = None  # tokens that each sequence had
    sizes: dict[str, Any] = {}
    softcap: float | None = None  # with it comes another scale
    return_state: bool = True

    def inputs(self) -> tuple[Case, int, dict[str, Any]]:
        """A case, how many of its tokens are none of padding, and options of `run`."""
        tokens, sizes, options = self.tokens, self.sizes, {"return_state": self.return_state}
        if isinstance(tokens, tuple):
            options["cu_seqlens"] = borders(*tokens)
            end, tokens, sizes = sum(tokens), sum(tokens) + 17, sizes | {"batch": 1}
        else:
            end, sizes = tokens, sizes | ({"batch": len(self.before)} if self.before else {})
        case = make_case(self.config, tokens, **sizes)
        if self.before is not None:
            options |= {"before": tokens_before(case, self.before), "lengths": self.before}
        if self.softcap is not None:
            options |= {"softcap": self.softcap, "scale": 0.3}
        return case, end, options

    def __str__(self) -> str:
        parts = [self.config, str(self.tokens), *(["resumed"] if self.before else [])]
        parts += [name if x is True else str(x) for name, x in self.sizes.items() if x is not False]
        return " ".join(parts + ([] if self.softcap is None else [f"softcap={self.softcap}"]))


def check(row: Row, backend: str) -> None:
    """Outputs, states and all gradients are those of the reference in float64; padding, with NaN, has no part."""
    case, end, options = row.inputs()
    before = options.pop("before", None)
    through = backend != "triton"  # kernels have no gradients through states
    options |= {"through_states": through, "gradients": through or before is None}
    expected = results(exact(case), "reference", before=exact(before), **options)
    padding = torch.arange(case.tokens, device=DEVICE)[:, None] >= end
    noisy = case.with_qkv(lambda x: x.masked_fill(padding, float("nan")))
    assert_near(results(noisy, backend, before=before, **options), expected, case.q.dtype)


def late(batch: int, tokens: int) -> Tensor:
    """[B, T] mask: every sequence begins three steps after the one before it, and pauses once."""
    step = torch.arange(tokens, device=DEVICE)
    begin = 3 * torch.arange(batch, device=DEVICE)[:, None]
    return (step >= begin) & (step != begin + 7)


@torch.no_grad()
def decode(
    case: Case, step: Callable[..., tuple[Tensor, HybridState | None]], mask: Tensor | None = None, **options: Any
) -> tuple[Tensor, HybridState]:
    """All outputs [B, H, T, D] of single steps from an empty state, and the state after them."""
    state = initial_state(case.config, case.params, case.k)
    outputs = []
    for t in range(case.tokens):
        position = state.position
        if mask is not None:
            state = state._replace(position=torch.where(mask[:, t], position, -1))
        y, after = step(case.part(t, t + 1), state=state, **options)
        assert after is not None
        state = after
        if mask is not None:
            state = state._replace(position=torch.where(mask[:, t], after.position, position))
        outputs.append(y)
    return torch.cat(outputs, dim=2), state


def triton_step(case: Case, **options: Any) -> tuple[Tensor, HybridState | None]:
    return case.run("triton", **options)


def chunked_step(case: Case, **options: Any) -> tuple[Tensor, HybridState | None]:
    return case.run("chunked", **options)


@torch.no_grad()
def check_decoding(case: Case, step: Callable = triton_step, *, mask: Tensor | None = None, **options: Any) -> None:
    """Every step's output and the last state are those of the reference in float64 on the whole sequences."""
    y, state = decode(case, step, mask, **options)
    real = torch.ones(case.q.shape[::2], dtype=torch.bool, device=DEVICE) if mask is None else mask
    y_row, after = alone(*packed(exact(case), real), **options)
    expected = unpacked(y_row, real)
    found = {f"output of step {t}": y[:, :, t] for t in range(y.shape[2])} | state._asdict()
    right = {f"output of step {t}": expected[:, :, t] for t in range(y.shape[2])} | after._asdict()
    assert_near(found, right, case.q.dtype)
    assert torch.equal(state.position, after.position)
