"""Products of few rows, as in decoding: linear layers with the same input together, and by kernels of this package.

Reading the weights is what such a product costs, and several small products reach less of the memory's bandwidth than
one large one.
"""

from __future__ import annotations

import inspect
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from lolcats.modeling.model import LolcatsForCausalLM
from lolcats.ops.hybrid_attention.kernels.support import HAS_TRITON


class Together(NamedTuple):
    """Linear layers of one module that read the same input.

    Attributes:
        most_rows: up to how many the layers compute together; cuBLAS gains nothing beyond, measured on an H200 with
            the shapes of Llama 3 8B.
    """

    names: tuple[str, ...]
    most_rows: int


ATTENTION = Together(("q_proj", "k_proj", "v_proj"), 512)
GATED = Together(("gate_proj", "up_proj"), 64)
# Activations of gated MLPs that are computed from one product, by the names of transformers' and PyTorch's modules.
ACTIVATIONS = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
}


@contextmanager
def few_row_products(model: LolcatsForCausalLM) -> Iterator[None]:
    """Within the block, where no gradient is needed, `model` computes products of few rows as this module says.

    Weights that are multiplied together become views of one tensor and stay so: the parameters are the same objects
    with the same values, and nothing is in memory twice. Saving works as before, but transformers copies such weights
    for it. Quantised and shared weights, LoRA's layers, and layers that something else has changed are left alone.
    """
    forwards: dict[nn.Module, Callable[..., Any]] = {}
    uses = Counter(id(x) for _, x in model.named_parameters(remove_duplicate=False))
    decoder = model.get_decoder()
    for module in decoder.modules():
        if _fit(layers := _layers(module, ATTENTION), uses):
            group = _Group(layers, ATTENTION)
            forwards |= {layer: partial(group.forward, index) for index, layer in enumerate(layers)}
        if _is_gated(module) and _fit(layers := _layers(module, GATED), uses):
            forwards[module] = partial(_gated_mlp, module, _Group(layers, GATED), module.forward)
    for layer in (*decoder.modules(), model.get_output_embeddings()):
        if _is_plain(layer):
            forwards.setdefault(layer, partial(_forward, layer))
    if model.device.type == "cuda":
        torch.cuda.empty_cache()  # in pieces of single weights, too small for those of several
    with other_forwards(forwards):
        yield


@contextmanager
def gated_mlps(model: LolcatsForCausalLM) -> Iterator[None]:
    """Within the block, where no gradient is needed, gated MLPs of `model` activate and multiply in one launch."""

    def forward(mlp: Any, plain: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return plain(x)
        return mlp.down_proj(_activated(mlp, mlp.gate_proj(x), mlp.up_proj(x)))

    mlps = filter(_is_gated, model.get_decoder().modules())
    with other_forwards({mlp: partial(forward, mlp, mlp.forward) for mlp in mlps}):
        yield


@contextmanager
def other_forwards(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Within the block these modules run other forward functions."""
    before = {module: vars(module)["forward"] for module in forwards if "forward" in vars(module)}
    try:
        for module, forward in forwards.items():
            vars(module)["forward"] = forward
        yield
    finally:
        for module in forwards:
            vars(module).pop("forward", None)
        for module, forward in before.items():
            vars(module)["forward"] = forward


class _Group:
    """The first of some layers computes the results of all, the others hand out theirs for the same input.

    Results live no longer than the input, and are handed out once.
    """

    def __init__(self, layers: Sequence[nn.Linear], together: Together) -> None:
        self.layers, self.together = layers, together
        self.sizes = [layer.out_features for layer in layers]
        self.kept: tuple[weakref.ref[Tensor], dict[int, Tensor]] | None = None  # in one piece: threads may share it
        for parameters in ([layer.weight for layer in layers], [layer.bias for layer in layers]):
            if parameters[0] is not None and _joined(parameters) is None:
                whole = torch.cat([parameter.data for parameter in parameters])
                for parameter, part in zip(parameters, whole.split(self.sizes), strict=True):
                    parameter.data = part

    def forward(self, index: int, x: Tensor) -> Tensor:
        if index == 0:
            self.kept = None
            given = self.weights(x)
            if given is not None:
                results = dict(enumerate(product(x, *given).split(self.sizes, -1)))
                self.kept = weakref.ref(x, lambda _: results.clear()), results
                return results.pop(0)
        kept = self.kept
        if kept is not None and kept[0]() is x and index in kept[1]:
            return kept[1].pop(index)
        return _forward(self.layers[index], x)

    def weights(self, x: Tensor) -> tuple[Tensor, Tensor | None] | None:
        """Weights and biases of all layers, one behind another; None where each computes its own."""
        rows = x.numel() // x.shape[-1]
        if torch.is_grad_enabled() or not 0 < rows <= self.together.most_rows:
            return None
        weight_NK = _joined([layer.weight for layer in self.layers])
        has_bias = self.layers[0].bias is not None
        bias_N = _joined([layer.bias for layer in self.layers]) if has_bias else None
        if weight_NK is None or (has_bias and bias_N is None):  # something has moved them
            return None
        return weight_NK, bias_N


def _gated_mlp(mlp: Any, group: _Group, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """down_proj(activation(gate_proj(x)) * up_proj(x)); `forward` does the same for many rows."""
    activation = ACTIVATIONS[type(mlp.act_fn).__name__]
    given = group.weights(x)
    if given is None:
        return forward(x)
    if _few(x, given[0], gated=True):
        from lolcats.ops.few_rows_kernel import few_rows  # imports Triton

        y_MN = few_rows(x.reshape(-1, x.shape[-1]), *given, activation)
        return mlp.down_proj(y_MN.view(*x.shape[:-1], -1))
    gate, up = product(x, *given).chunk(2, -1)
    return mlp.down_proj(_activated(mlp, gate, up))


def _activated(mlp: Any, gate: Tensor, up: Tensor) -> Tensor:
    """activation(gate) * up, in one launch where there is a kernel."""
    if HAS_TRITON and _somewhere(gate):
        from lolcats.ops.gated_activation_kernel import gated_activation  # imports Triton

        return gated_activation(gate, up, ACTIVATIONS[type(mlp.act_fn).__name__])
    return mlp.act_fn(gate) * up


def product(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """`linear`, by a kernel of this package for one row and, of large layers, for a few; the kernels have no gradient.

    Args:
        x: [..., K].
    """
    if x.numel() == x.shape[-1] and _has_kernel(x, weight_NK):
        from lolcats.ops.matrix_vector_kernel import matrix_vector  # imports Triton

        return matrix_vector(x.reshape(-1), weight_NK, bias_N).view(*x.shape[:-1], -1)
    if _few(x, weight_NK):
        from lolcats.ops.few_rows_kernel import few_rows  # imports Triton

        return few_rows(x.reshape(-1, x.shape[-1]), weight_NK, bias_N).view(*x.shape[:-1], -1)
    return linear(x, weight_NK, bias_N)


def _few(x: Tensor, weight_NK: Tensor, gated: bool = False) -> bool:
    """Whether the kernel for a few rows takes this."""
    if not _has_kernel(x, weight_NK):
        return False
    from lolcats.ops.few_rows_kernel import takes_product  # imports Triton

    return takes_product(x.numel() // x.shape[-1], weight_NK, gated)


def _has_kernel(x: Tensor, weight_NK: Tensor) -> bool:
    alike = x.dtype == weight_NK.dtype and x.dtype in (torch.bfloat16, torch.float16) and x.device == weight_NK.device
    return HAS_TRITON and _somewhere(x) and alike and weight_NK.is_contiguous()


def _somewhere(x: Tensor) -> bool:
    """Whether Triton's kernels run where the tensor is."""
    return x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    return (linear if torch.is_grad_enabled() else product)(x, layer.weight, layer.bias)


def _layers(module: nn.Module, together: Together) -> list[Any]:
    return [getattr(module, name, None) for name in together.names]


def _is_gated(module: nn.Module) -> bool:
    """Whether a module computes what `_gated_mlp` does: its class mentions these four and nothing else."""
    known = type(getattr(module, "act_fn", None)).__name__ in ACTIVATIONS
    return known and mentions(module) == {"gate_proj", "up_proj", "down_proj", "act_fn"}


def mentions(module: nn.Module) -> set[str]:
    """The names of attributes and globals in the forward function of a module's class."""
    return {*getattr(getattr(written(type(module).forward), "__code__", None), "co_names", ())}


def written(function: Any) -> Any:
    """A forward function as a model's source file has it, without the wrappers that transformers puts around it.

    From 5.24 on these take its arguments by their older names too.
    """

    def is_other(wrapper: Any) -> bool:
        return not getattr(wrapper, "__globals__", {}).get("__name__", "").startswith("transformers.")

    return inspect.unwrap(function, stop=is_other)


def _is_plain(layer: Any) -> bool:
    """Whether this is a linear layer whose weights are an ordinary matrix, and which nothing has changed."""
    return type(layer) is nn.Linear and type(layer.weight.data) is Tensor and "forward" not in vars(layer)


def _fit(layers: Sequence[Any], uses: Counter[int]) -> bool:
    """Whether the layers' weights can lie in one tensor."""
    if not all(_is_plain(layer) for layer in layers):
        return False
    weights = [layer.weight for layer in layers]
    biases = [layer.bias for layer in layers if layer.bias is not None]
    kinds = {(x.dtype, x.device, x.requires_grad) for x in (*weights, *biases)}
    return (
        len(kinds) == len({weight.shape[1] for weight in weights}) == 1
        and not weights[0].is_meta
        and len(biases) in (0, len(layers))
        and all(uses[id(x)] == 1 for x in (*weights, *biases))
    )


def _joined(parts: Sequence[Tensor]) -> Tensor | None:
    """One view of tensors that lie one behind another in the same memory; None if they do not."""
    first = parts[0].detach()
    memory, end = first.untyped_storage().data_ptr(), first.storage_offset()
    for part in parts:
        if part.untyped_storage().data_ptr() != memory or part.storage_offset() != end or not part.is_contiguous():
            return None
        end += part.numel()
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())
