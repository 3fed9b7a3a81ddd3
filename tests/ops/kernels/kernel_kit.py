"""What the kernels' tests share: random inputs, layouts of batches, comparison with `reference`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lolcats.config.attention import AttentionConfig
from lolcats.ops import HybridParams, HybridState, hybrid_attention, output_mse
from lolcats.ops.hybrid_attention.api import initial_state
from lolcats.ops.hybrid_attention.feature_maps import get_feature_map

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
# Relative RMS error. float32: sums of some hundred products, on a GPU of three tf32 products each (2^-21); bfloat16:
# its own rounding is 1.1e-3, and gradients pass through about ten of them.
TOLERANCE = {torch.float32: 2e-5 if GPU else 1e-5, torch.bfloat16: 5e-3, torch.float16: 5e-3}
# What counts as zero, per entry: inputs and incoming gradients are of size one. The gradient of gamma is a difference
# of sums over all rows that cancel where little is linear. That of q is exactly zero where a window holds a single key;
# the difference of two equal terms of size one left 1.8e-7 on a GPU, three times float32's rounding.
ZERO = {"gradient of gamma": 1.0} | ({"gradient of q": 3e-2} if GPU else {})

Attend = Callable[..., tuple[Tensor, HybridState | None]]


def needs_gpu(test: Callable) -> Callable:
    """Decorator of a test that the interpreter, which is slow, leaves to a GPU: it runs another of the kind."""
    return pytest.mark.gpu(pytest.mark.skipif(not GPU, reason="slow through the interpreter")(test))


@dataclass
class Case:
    config: AttentionConfig
    q: Tensor  # [B, H, T, D], as projections leave it: [B, T, H, D] in memory
    k: Tensor
    v: Tensor
    params: HybridParams

    def map(self, function: Callable[[Tensor], Tensor]) -> Case:
        params = HybridParams(*(None if x is None else function(x) for x in self.params.tensors))
        return Case(self.config, function(self.q), function(self.k), function(self.v), params)

    def leaves(self) -> dict[str, Tensor]:
        named = {"q": self.q, "k": self.k, "v": self.v, **self.params._asdict()}
        return {name: x for name, x in named.items() if x is not None}

    def part(self, begin: int, end: int | None) -> Case:
        cut = slice(begin, end)
        return replace(self, q=self.q[:, :, cut], k=self.k[:, :, cut], v=self.v[:, :, cut])

    def with_config(self, **settings: Any) -> Case:
        return replace(self, config=replace(self.config, **settings))

    def with_nan_where(self, padding_BT: Tensor) -> Case:
        q, k, v = (x.masked_fill(padding_BT[:, None, :, None], float("nan")) for x in (self.q, self.k, self.v))
        return replace(self, q=q, k=k, v=v)

    def run(self, backend: str, softcap: float | None = None, **options: Any) -> tuple[Tensor, HybridState | None]:
        params = self.params._replace(softcap=softcap)
        return hybrid_attention(self.q, self.k, self.v, self.config, params, backend=backend, **options)


def make_case(
    config: AttentionConfig,
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
    generator = torch.Generator().manual_seed(tokens)

    def normal(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator).to(of).to(DEVICE)

    def activation(count: int) -> Tensor:
        return normal(batch, tokens, count, head_dim).transpose(1, 2)

    params = HybridParams(0.2 + 0.6 * torch.rand(heads, generator=generator).to(DEVICE))
    if config.feature_map is not None:
        owners = (heads, kv_heads if share == "kv_head" else heads)
        # Values that bfloat16 holds exactly: rounding the weights is not the kernels' error.
        weights = [(normal(n, head_dim, columns) / head_dim**0.5).to(torch.bfloat16).float() for n in owners]
        params = params._replace(q_weight=weights[0], k_weight=weights[1])
        if get_feature_map(config.feature_map).has_bias:
            biases = [normal(n, columns, of=torch.bfloat16).float() for n in owners]
            params = params._replace(q_bias=biases[0], k_bias=biases[1])
    if sink_logits:  # seldom, and mostly, the largest of a query's scores
        params = params._replace(sink_logits=torch.linspace(-1, 3, heads).to(dtype).to(DEVICE))
    return Case(config, activation(heads), activation(kv_heads), activation(kv_heads), params)


def borders(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()


def layout(name: str) -> tuple[int, int, dict[str, Any], Tensor]:
    """Batch, tokens, options of `hybrid_attention`, and which tokens are padding, bool [B, T]."""
    state: dict[str, Any] = {"return_state": True}
    if name == "borders":  # of lengths around a chunk's, one without a token; padding behind them
        return 1, 150, {"cu_seqlens": borders(1, 63, 0, 66, 3), **state}, torch.arange(150, device=DEVICE)[None] >= 133
    if name == "rows":
        return 3, 80, state, torch.zeros(3, 80, dtype=torch.bool, device=DEVICE)
    tokens = int(name)
    return 1, tokens, state, torch.zeros(1, tokens, dtype=torch.bool, device=DEVICE)


@torch.no_grad()
def state_after(case: Case, lengths: tuple[int, ...]) -> HybridState:
    """States of sequences of `lengths` tokens, of the case's heads."""
    heads, kv_heads, head_dim = case.q.shape[1], case.k.shape[1], case.q.shape[3]
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "dtype": case.q.dtype}
    before = make_case(case.config, max(lengths), batch=len(lengths), **sizes)
    mask = torch.arange(max(lengths), device=DEVICE) < torch.tensor(lengths, device=DEVICE)[:, None]
    row, cu_seqlens = packed(replace(before, params=case.params), mask)
    state = row.run("reference", cu_seqlens=cu_seqlens, return_state=True)[1]
    assert state is not None
    return state


def packed(case: Case, mask: Tensor) -> tuple[Case, Tensor]:
    """The tokens of every row that the mask [B, T] takes, in one row, and the borders between them."""
    q, k, v = (x.transpose(1, 2)[mask].transpose(0, 1)[None] for x in (case.q, case.k, case.v))
    return replace(case, q=q, k=k, v=v), borders(*mask.sum(1).tolist())


def exact(x: Any) -> Any:
    """A case or a state in float64."""
    return None if x is None else x.map(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)


def results(
    case: Case, backend: str, *, state: HybridState | None = None, gradients: bool = True, **options: Any
) -> dict[str, Tensor]:
    """Output, state, and the gradient of a random function of them for everything that goes in."""
    case = case.map(lambda x: x.detach().clone().requires_grad_(gradients))
    leaves = case.leaves()
    if state is not None:
        state = state.map(lambda x: x.detach().clone().requires_grad_(gradients and x.is_floating_point()))
        leaves |= {f"state.{name}": x for name, x in state.tensors().items() if x.requires_grad and x.numel() > 0}
    y, after = case.run(backend, state=state, **options)
    found = {"output": y}
    if after is not None:
        found |= {f"after.{name}": x for name, x in after.tensors().items()}
    if gradients:
        generator = torch.Generator().manual_seed(1)
        loss = torch.zeros((), device=y.device)
        for x in found.values():
            if x.is_floating_point() and x.numel() > 0:
                incoming = torch.randn(x.shape, generator=generator).to(torch.bfloat16).to(x)
                loss = loss + (x * incoming).sum()
        given = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        for (name, leaf), gradient in zip(leaves.items(), given, strict=True):
            found[f"gradient of {name}"] = torch.zeros_like(leaf) if gradient is None else gradient
    return {name: x.detach() for name, x in found.items()}


def errors(case: Case, backend: str, target: Tensor, **options: Any) -> dict[str, Tensor]:
    """`output_mse`, and the gradients of thrice of it for all parameters."""
    params = HybridParams(*(None if x is None else x.detach().clone().requires_grad_() for x in case.params.tensors))
    leaves = {name: x for name, x in params._asdict().items() if x is not None}
    params = params._replace(softcap=options.pop("softcap", None))
    loss = output_mse(case.q, case.k, case.v, target.to(case.q), case.config, params, backend=backend, **options)
    gradients = torch.autograd.grad(3.0 * loss, list(leaves.values()), allow_unused=True)
    pairs = zip(leaves.items(), gradients, strict=True)
    return {"loss": loss.detach()} | {
        f"gradient of {name}": torch.zeros_like(x) if g is None else g for (name, x), g in pairs
    }


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype) -> None:
    for name, right in expected.items():
        if right.numel() == 0:
            continue
        assert found[name].shape == right.shape, name
        zero = ZERO.get(name, 1e-2) * right.numel() ** 0.5 if name != "loss" else 0.0
        error = (found[name].double() - right).norm() / right.double().norm().clamp_min(zero)
        # written so that NaN fails
        assert error <= TOLERANCE[dtype], f"{name}: relative RMS error {error:.1e}"


def check(case: Case, *, wrong: Case | None = None, state: HybridState | None = None, **options: Any) -> None:
    """The kernels' results are those of the reference in float64. `wrong`: what the kernels get instead."""
    expected = results(exact(case), "reference", state=exact(state), **options)
    assert_near(results(wrong or case, "triton", state=state, **options), expected, case.q.dtype)


def late(batch: int, tokens: int) -> Tensor:
    """[B, T] mask: every sequence begins three steps after the one before it, and pauses once."""
    step = torch.arange(tokens, device=DEVICE)
    begin = 3 * torch.arange(batch, device=DEVICE)[:, None]
    return (step >= begin) & (step != begin + 7)


def triton_step(case: Case, **options: Any) -> tuple[Tensor, HybridState | None]:
    return case.run("triton", **options)


@torch.no_grad()
def decode(
    case: Case,
    *,
    mask: Tensor | None = None,
    step: Attend = triton_step,
    **options: Any,
) -> tuple[Tensor, HybridState]:
    """All outputs [B, H, T, D] of single steps from an empty state, and the state after them."""
    state = initial_state(case.config, case.params, case.k)
    outputs = []
    for t in range(case.q.shape[2]):
        position = state.position
        if mask is not None:
            state = replace(state, position=torch.where(mask[:, t], position, -1))
        y, after = step(case.part(t, t + 1), state=state, **options)
        assert after is not None
        state = after
        if mask is not None:
            state = replace(state, position=torch.where(mask[:, t], after.position, position))
        outputs.append(y)
    return torch.cat(outputs, dim=2), state


@torch.no_grad()
def check_decoding(case: Case, *, mask: Tensor | None = None, step: Attend = triton_step, **options: Any) -> None:
    """Every step's output and the last state are those of the reference in float64 on the whole sequences."""
    y, state = decode(case, mask=mask, step=step, **options)
    real = torch.ones(case.q.shape[::2], dtype=torch.bool, device=DEVICE) if mask is None else mask
    row, cu_seqlens = packed(exact(case), real)
    y_row, after = row.run("reference", cu_seqlens=cu_seqlens, return_state=True, **options)
    assert after is not None
    expected = y.double().zero_().transpose(1, 2)
    expected[real] = y_row[0].transpose(0, 1)
    expected = expected.transpose(1, 2)
    found = {f"output of step {t}": y[:, :, t] for t in range(y.shape[2])} | state.joined().tensors()
    right = {f"output of step {t}": expected[:, :, t] for t in range(y.shape[2])} | after.tensors()
    assert_near(found, right, case.q.dtype)
    assert torch.equal(state.position, after.position)
