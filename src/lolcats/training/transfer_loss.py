"""The loss of one layer in attention transfer: where it is measured, and in what unit.

Shape suffixes as in `lolcats.ops.hybrid_attention.spec`, and C channels: H * D of the heads side by side, or the
model's width after the output projection.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from lolcats.config import TransferSection
from lolcats.errors import UserError
from lolcats.modeling.model import LolcatsForCausalLM
from lolcats.ops.hybrid_attention.output_mse import real_tokens
from lolcats.training.lora import projection_names

SMALLEST_VARIANCE = 1e-12
"""Keeps the loss defined for a layer whose output is the same for all tokens."""


class LayerLoss:
    """Distance between a layer's linear attention and its softmax attention.

    With `loss_scale="variance"` it must see the layers' outputs within `measuring` first. These are the frozen
    teacher's, so that one measurement serves the whole stage, and the loss does not depend on how a batch is
    divided into micro-batches and among processes.

    Raises:
        UserError: `loss_at` does not fit the model.
    """

    def __init__(self, model: LolcatsForCausalLM, config: TransferSection) -> None:
        self.config = config
        self.projections = output_projections(model) if config.loss_at == "projection" else {}
        self.variances: dict[nn.Module, Tensor] = {}
        self._measured: dict[nn.Module, _Moments] | None = None

    @property
    def lacks_variances(self) -> bool:
        return self.config.loss_scale == "variance" and not self.variances

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Within the block, calls collect the outputs' variances instead of comparing; their result is 0."""
        self._measured = {}
        try:
            yield
            self.variances = {module: moments.variance() for module, moments in self._measured.items()}
        finally:
            self._measured = None

    def __call__(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, y_softmax: Tensor, call: dict[str, Any]
    ) -> Tensor:
        """The loss, a float32 scalar; padding does not count.

        Args:
            module: the layer's `HybridAttention`; others as its observer gets them.
        """
        call = dict(call)
        sliding_window = call.pop("sliding_window", None)
        loss = q.new_zeros((), dtype=torch.float32)
        if self._measured is not None:
            output_BTC = self._projected(module, _side_by_side(y_softmax))
            real_BT = real_tokens(call.get("mask"), call.get("segment_ids"))
            self._measured.setdefault(module, _Moments()).add(output_BTC, real_BT)
            return loss
        if self.config.mse_factor:
            loss = loss + self.config.mse_factor * self._output_error(module, q, k, v, y_softmax, call)
        if self.config.xent_factor:
            xent, _ = module(q, k, v, **call, task="weights_cross_entropy", sliding_window=sliding_window)
            loss = loss + self.config.xent_factor * xent
        return loss

    def _output_error(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, y_softmax: Tensor, call: dict[str, Any]
    ) -> Tensor:
        if module not in self.projections:
            error, _ = module(q, k, v, **call, task="output_mse", target=y_softmax)
        else:
            y_BHTD, _ = module(q, k, v, **call)
            difference_BTC = _side_by_side(y_BHTD.float() - y_softmax.float()).to(y_softmax.dtype)
            error_BT = self._projected(module, difference_BTC).float().square().mean(-1)
            real_BT = real_tokens(call.get("mask"), call.get("segment_ids"))
            error = error_BT.mean() if real_BT is None else (error_BT * real_BT).sum() / real_BT.sum()
        if self.config.loss_scale == "variance":
            error = error / self.variances[module]
        return error

    def _projected(self, module: nn.Module, output_BTC: Tensor) -> Tensor:
        """[B, T, C] where the loss is measured; without the projection's bias, which drops out of differences."""
        projection = self.projections.get(module)
        return output_BTC if projection is None else linear(output_BTC, projection.weight)


class _Moments:
    """Variance over tokens from batches of any size, in double precision."""

    def __init__(self) -> None:
        self.tokens = 0
        self.sums_2C: list[Tensor] = []

    def add(self, output_BTC: Tensor, real_BT: Tensor | None) -> None:
        output_NC = (output_BTC.flatten(0, 1) if real_BT is None else output_BTC[real_BT]).double()
        self.tokens += len(output_NC)
        self.sums_2C.append(torch.stack([output_NC.sum(0), output_NC.square().sum(0)]))

    def variance(self) -> Tensor:
        """The mean over channels, float32: the squared error of an output that is the same for all tokens."""
        mean_C, mean_square_C = torch.stack(self.sums_2C).sum(0) / self.tokens
        return (mean_square_C - mean_C.square()).mean().clamp_min(SMALLEST_VARIANCE).float()


def output_projections(model: LolcatsForCausalLM) -> dict[nn.Module, nn.Linear]:
    """`HybridAttention` -> output projection of the same layer, which gets the attention's outputs unchanged.

    Raises:
        UserError: there is none, its weights are quantised, or something lies before it (a gate, a norm).
    """
    projections: dict[nn.Module, nn.Linear] = {}
    for name in projection_names(model, ["o"], setting="transfer.loss_at"):
        projection = model.get_submodule(name)
        if type(projection) is not nn.Linear:
            raise UserError(
                f"transfer.loss_at=projection needs plain weights; {name} is {type(projection).__name__}. Use"
                " loss_at=heads, or load the model unquantised"
            )
        attention: Any = model.get_submodule(name.rpartition(".")[0])
        projections[attention.linear_attention] = projection
    changed = _layers_that_change_outputs(model, projections)
    if changed:
        raise UserError(
            f"transfer.loss_at=projection: layers {changed} change the attention's outputs before the output"
            " projection, so that an error cannot be carried through it; use loss_at=heads"
        )
    return projections


def _layers_that_change_outputs(model: LolcatsForCausalLM, projections: dict[nn.Module, nn.Linear]) -> list[int]:
    """Layers whose projection gets something else than the heads' outputs; tried on two tokens."""
    outputs: dict[nn.Linear, Tensor] = {}
    layer_of: dict[nn.Linear, int] = {}
    unchanged = set()

    def observe(module: nn.Module, layer_idx: int, y_softmax: Tensor, **others: Any) -> None:
        layer_of[projections[module]] = layer_idx
        outputs[projections[module]] = _side_by_side(y_softmax)

    def compare(projection: Any, args: tuple) -> None:
        output_BTC = outputs.get(projection)
        if output_BTC is not None and args[0].shape == output_BTC.shape and torch.equal(args[0], output_BTC):
            unchanged.add(projection)

    hooks = [projection.register_forward_pre_hook(compare) for projection in projections.values()]
    try:
        with model.attention_mode("softmax"), model.observe(observe), torch.no_grad():
            model.get_decoder()(input_ids=torch.arange(2, device=model.device)[None], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return sorted(layer for projection, layer in layer_of.items() if projection not in unchanged)


def _side_by_side(y_BHTD: Tensor) -> Tensor:
    """[B, T, C] the heads' outputs as the output projection gets them."""
    return y_BHTD.transpose(1, 2).flatten(2)
