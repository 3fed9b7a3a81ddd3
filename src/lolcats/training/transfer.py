"""Stage 1, attention transfer: feature maps and window factors learn to reproduce softmax attention.

One forward pass of the frozen model serves teacher and student: every layer's softmax output goes on to the
next layer, and the layer's student is trained on the spot from the same queries, keys and values. Memory
holds one layer's graph, and the language-model head never runs. (arXiv:2410.10254, algorithm 1.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import nn

from lolcats.config import TransferSection
from lolcats.data import PackedDataset
from lolcats.evaluation.perplexity import dataset_perplexity
from lolcats.modeling.model import LolcatsForCausalLM


class TransferStage:
    """The `Stage` of attention transfer; see `lolcats.training.loop`."""

    name = "transfer"

    def __init__(self, model: LolcatsForCausalLM, config: TransferSection, validation: PackedDataset) -> None:
        self.model, self.config, self.validation = model, config, validation
        self.metric = config.select_by
        self.layers: dict[int, nn.Module] = dict(model.linear_layers())
        indices = sorted(self.layers)
        size = config.block_layers or len(indices)
        self.block_of_layer = {layer: order // size for order, layer in enumerate(indices)}
        self.layers_in_block = [0] * (max(self.block_of_layer.values()) + 1)
        for block in self.block_of_layer.values():
            self.layers_in_block[block] += 1
        model.requires_grad_(False)
        for module in self.layers.values():
            module.requires_grad_(True)

    def blocks(self) -> list[dict[str, nn.Parameter]]:
        blocks: list[dict[str, nn.Parameter]] = [{} for _ in self.layers_in_block]
        for index, module in self.layers.items():
            for name, parameter in module.named_parameters():
                blocks[self.block_of_layer[index]][f"layers.{index}.{name}"] = parameter
        return blocks

    def micro_step(self, batch: dict[str, Tensor], scale: float) -> dict[str, Any]:
        losses = self._run(batch, gradient_scale=scale)
        return {"loss": torch.stack(list(losses.values())).mean(), "layer_losses": losses}

    def evaluate(self) -> dict[str, Any]:
        totals: dict[int, Tensor] = {}
        size = self.config.micro_batch_size
        for begin in range(0, len(self.validation), size):
            indices = list(range(begin, min(begin + size, len(self.validation))))
            for index, loss in self._run(self.validation.batch(indices), gradient_scale=None).items():
                totals[index] = totals.get(index, torch.zeros_like(loss)) + loss * len(indices)
        per_layer = {index: float(total) / len(self.validation) for index, total in sorted(totals.items())}
        per_block = [0.0] * len(self.layers_in_block)
        for index, value in per_layer.items():
            block = self.block_of_layer[index]
            per_block[block] += value / self.layers_in_block[block]
        result: dict[str, Any] = {
            "loss": sum(per_layer.values()) / len(per_layer),
            "block_metrics": per_block,
            "layer_losses": per_layer,
        }
        if self.metric == "perplexity":
            with self.model.attention_mode("linear"):
                result["perplexity"] = dataset_perplexity(self.model, self.validation, batch_size=size)["perplexity"]
        return result

    def state(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for block in self.blocks() for name, parameter in block.items()}

    @torch.no_grad()
    def load_state(self, tensors: dict[str, Tensor]) -> None:
        for name, parameter in ((n, p) for block in self.blocks() for n, p in block.items()):
            parameter.copy_(tensors[name])

    def _run(self, batch: dict[str, Tensor], gradient_scale: float | None) -> dict[int, Tensor]:
        """One pass over a batch: every layer's loss, with its gradients if a scale is given."""
        losses: dict[int, Tensor] = {}

        def observe(
            module: nn.Module,
            layer_idx: int,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            y_softmax: Tensor,
            call: dict[str, Any],
        ) -> None:
            with torch.set_grad_enabled(gradient_scale is not None):
                loss = self._layer_loss(module, q.detach(), k.detach(), v.detach(), y_softmax.detach(), call)
                if gradient_scale is not None:
                    (loss * (gradient_scale / self.layers_in_block[self.block_of_layer[layer_idx]])).backward()
            losses[layer_idx] = loss.detach()

        inputs = {name: tensor.to(self.model.device) for name, tensor in batch.items() if name != "labels"}
        with self.model.attention_mode("softmax"), self.model.observe(observe), torch.no_grad():
            self.model.get_decoder()(**inputs, use_cache=False)
        return losses

    def _layer_loss(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, y_softmax: Tensor, call: dict[str, Any]
    ) -> Tensor:
        """Loss of one layer. Padding does not count."""
        call = dict(call)
        sliding_window = call.pop("sliding_window", None)
        loss = q.new_zeros((), dtype=torch.float32)
        if self.config.mse_factor:
            y, _ = module(q, k, v, **call)
            error_BHT = (y.float() - y_softmax.float()).square().mean(-1)
            real_BT = _real_tokens(call)
            if real_BT is None:
                mse = error_BHT.mean()
            else:
                mse = (error_BHT * real_BT[:, None]).sum() / (real_BT.sum() * error_BHT.shape[1])
            loss = loss + self.config.mse_factor * mse
        if self.config.xent_factor:
            xent, _ = module(q, k, v, **call, task="weights_cross_entropy", sliding_window=sliding_window)
            loss = loss + self.config.xent_factor * xent
        return loss


def _real_tokens(call: dict[str, Any]) -> Tensor | None:
    """[B, T] bool, False for padding; None: no padding."""
    if call.get("mask") is not None:
        return call["mask"].bool()
    if call.get("segment_ids") is not None:
        return call["segment_ids"] >= 0
    return None
