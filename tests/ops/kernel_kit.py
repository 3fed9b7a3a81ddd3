"""What the tests of the Triton kernels share: where they run, random inputs, the comparison with the reference,
a faithful interpreter.

Import it before any module that imports Triton.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)
GPU = torch.cuda.is_available()
os.environ.setdefault("LOLCATS_AUTOTUNE", "0")
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"

from triton.runtime import interpreter  # noqa: E402

from lolcats.config.attention import AttentionConfig  # noqa: E402
from lolcats.ops import HybridParams, HybridState, hybrid_attention  # noqa: E402
from lolcats.ops.hybrid_attention.feature_maps import get_feature_map  # noqa: E402

DEVICE = "cuda" if GPU else "cpu"
# Relative RMS error. float32: sums of some hundred products, on a GPU of three tf32 products each (2^-21); bfloat16:
# its own rounding is 1.1e-3, and gradients pass through about ten of them.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 5e-3}
# What counts as zero, per entry: inputs and incoming gradients are of size one. The gradient of gamma is a difference
# of sums over all rows that cancel where little is linear. That of q is exactly zero where a window holds a single key;
# the difference of two equal terms of size one left 1.8e-7 on a GPU, three times float32's rounding.
ZERO = {"gamma": 1.0} | ({"q": 3e-2} if GPU else {})


def on_gpu(*values: object) -> object:
    """A test's case that the interpreter, which is slow, leaves to a GPU: it runs another of the kind."""
    return pytest.param(*values, marks=pytest.mark.skipif(not GPU, reason="slow through the interpreter"))


@dataclass
class Case:
    spec: AttentionConfig
    q: Tensor  # [B, H, T, D], as projections leave it: [B, T, H, D] in memory
    k: Tensor
    v: Tensor
    params: HybridParams

    def map(self, function: Callable[[Tensor], Tensor]) -> Case:
        params = HybridParams(*(None if x is None else function(x) for x in self.params))
        return Case(self.spec, function(self.q), function(self.k), function(self.v), params)

    def tensors(self) -> dict[str, Tensor]:
        named = {"q": self.q, "k": self.k, "v": self.v, **self.params._asdict()}
        return {name: x for name, x in named.items() if x is not None}

    def part(self, begin: int, end: int | None) -> Case:
        cut = slice(begin, end)
        return replace(self, q=self.q[:, :, cut], k=self.k[:, :, cut], v=self.v[:, :, cut])


def make_case(
    spec: AttentionConfig,
    tokens: int,
    *,
    batch: int = 1,
    heads: int = 2,
    kv_heads: int = 1,
    head_dim: int = 16,
    columns: int = 8,
    share_state: str = "kv_head",
    dtype: torch.dtype = torch.float32,
) -> Case:
    generator = torch.Generator().manual_seed(tokens)

    def normal(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator).to(of).to(DEVICE)

    def activation(count: int) -> Tensor:
        return normal(batch, tokens, count, head_dim).transpose(1, 2)

    params = HybridParams(0.2 + 0.6 * torch.rand(heads, generator=generator).to(DEVICE))
    if spec.feature_map is not None:
        owners = (heads, kv_heads if share_state == "kv_head" else heads)
        # Values that bfloat16 holds exactly: rounding the weights is not the kernels' error.
        weights = [(normal(n, head_dim, columns) / head_dim**0.5).to(torch.bfloat16).float() for n in owners]
        params = params._replace(q_weight=weights[0], k_weight=weights[1])
        if get_feature_map(spec.feature_map).has_bias:
            biases = [normal(n, columns, of=torch.bfloat16).float() for n in owners]
            params = params._replace(q_bias=biases[0], k_bias=biases[1])
    return Case(spec, activation(heads), activation(kv_heads), activation(kv_heads), params)


def results(case: Case, backend: str, state: HybridState | None, options: dict) -> dict[str, Tensor]:
    """Output, state, and the gradient of a random function of them for everything that goes in."""
    case = case.map(lambda x: x.detach().clone().requires_grad_())
    leaves = case.tensors()
    if state is not None:
        state = state.map(lambda x: x.detach().clone().requires_grad_(x.is_floating_point()))
        leaves |= {f"state.{name}": x for name, x in state.tensors().items() if x.requires_grad and x.numel() > 0}
    y, after = hybrid_attention(case.q, case.k, case.v, case.spec, case.params, state=state, backend=backend, **options)
    found = {"output": y}
    if after is not None:
        found |= {f"after.{name}": x for name, x in after.tensors().items()}
    generator = torch.Generator().manual_seed(1)
    loss = torch.zeros((), device=y.device)
    for x in found.values():
        if x.is_floating_point() and x.numel() > 0:
            incoming = torch.randn(x.shape, generator=generator).to(torch.bfloat16).to(x)
            loss = loss + (x * incoming).sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
        found[f"gradient of {name}"] = torch.zeros_like(leaf) if gradient is None else gradient
    return {name: x.detach() for name, x in found.items()}


def check(case: Case, *, wrong: Case | None = None, state: HybridState | None = None, **options) -> None:
    """The kernels' results are those of the reference in float64. `wrong`: what the kernels get instead."""
    exact_state = None if state is None else state.map(lambda x: x.double() if x.is_floating_point() else x)
    expected = results(case.map(Tensor.double), "reference", exact_state, options)
    found = results(wrong or case, "triton", state, options)
    for name, right in expected.items():
        if right.numel() == 0:
            continue
        assert found[name].shape == right.shape, name
        zero = ZERO.get(name.removeprefix("gradient of "), 1e-2) * right.numel() ** 0.5
        error = (found[name].double() - right).norm() / right.double().norm().clamp_min(zero)
        # written so that NaN fails
        assert error <= TOLERANCE[case.q.dtype], f"{name}: relative RMS error {error:.1e}"


def round_to_bfloat16(x, *_):
    """float32 bits to bfloat16 bits, to nearest even, as GPUs do; the interpreter would cut the bits off."""
    bits = x.view("uint32").astype("uint64")
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("uint16")


@pytest.fixture(autouse=True)
def faithful_interpreter(monkeypatch):
    """Two faults of Triton's interpreter: how it rounds, and scalars that NumPy 2.4 no longer converts."""
    if GPU:
        return
    convert, patch_tensor = interpreter._convert_float, interpreter._patch_lang_tensor

    def convert_float(x, source, target, rounding):
        if source.name == "fp32" and target.name == "bf16":
            return round_to_bfloat16(x)
        return convert(x, source, target, rounding)

    def patch(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_convert_float", convert_float)
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """Memory that nothing wrote is NaN, a large integer or True."""

    def poisoned(make):
        def wrapper(*arguments, **options):
            x = make(*arguments, **options)
            if x.is_floating_point():
                return x.fill_(float("nan"))
            return x.fill_(True if x.dtype == torch.bool else torch.iinfo(x.dtype).max)

        wrapper.unpoisoned = make
        return wrapper

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
