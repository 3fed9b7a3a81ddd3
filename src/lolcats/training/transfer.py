"""Stage 1, attention transfer: feature maps and window factors learn to reproduce softmax attention.

One forward pass of the frozen model serves teacher and student: every layer's softmax output goes on to the
next layer, and the layer's student is trained on the spot from the same queries, keys and values. Memory
holds one layer's graph, and the language-model head never runs. (arXiv:2410.10254, algorithm 1.)
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch import nn

from lolcats.config import TransferSection
from lolcats.data import PackedDataset
from lolcats.evaluation.perplexity import dataset_perplexity
from lolcats.modeling.model import LolcatsForCausalLM
from lolcats.training.device import to_device
from lolcats.training.graphs import GraphedStep
from lolcats.training.graphs import graphs_wanted


class TransferStage:
    """The `Stage` of attention transfer; see `lolcats.training.loop`.

    Args:
        report: receives a sentence if CUDA graphs are wanted and not possible.
    """

    name = "transfer"

    def __init__(
        self,
        model: LolcatsForCausalLM,
        config: TransferSection,
        validation: PackedDataset,
        *,
        report: Callable[[str], None] = lambda text: None,
    ) -> None:
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
        parameters = [parameter for block in self.blocks() for parameter in block.values()]
        graphs = graphs_wanted(
            config.cuda_graphs,
            model,
            report,
            obstacles={"packed documents are kept apart": validation.document_ids is not None},
        )
        self.step = GraphedStep(self._gradient_step, parameters, enabled=graphs, report=report)

    def blocks(self) -> list[dict[str, nn.Parameter]]:
        blocks: list[dict[str, nn.Parameter]] = [{} for _ in self.layers_in_block]
        for index, module in self.layers.items():
            for name, parameter in module.named_parameters():
                blocks[self.block_of_layer[index]][f"layers.{index}.{name}"] = parameter
        return blocks

    def micro_step(self, batch: dict[str, Tensor], scale: float) -> dict[str, Any]:
        result = self.step(self._inputs(batch), scale=scale)
        return {"loss": result["loss"], "layer_losses": dict(zip(sorted(self.layers), result["layers"], strict=True))}

    def evaluate(self) -> dict[str, Any]:
        totals: dict[int, Tensor] = {}
        size = self.config.micro_batch_size
        for begin in range(0, len(self.validation), size):
            indices = list(range(begin, min(begin + size, len(self.validation))))
            losses = self._run(self._inputs(self.validation.batch(indices)), gradient_scale=None)
            for index, loss in losses.items():
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

    def close(self) -> None:
        """Training is over: give the memory of CUDA graphs back."""
        self.step.release()

    def _inputs(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return to_device({name: tensor for name, tensor in batch.items() if name != "labels"}, self.model.device)

    def _gradient_step(self, inputs: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
        """Adds up gradients; the losses of all layers, in order, and their mean."""
        losses = self._run(inputs, gradient_scale=scale)
        layers = torch.stack([losses[index] for index in sorted(losses)])
        return {"loss": layers.mean(), "layers": layers}

    def _run(self, inputs: dict[str, Tensor], gradient_scale: float | None) -> dict[int, Tensor]:
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
            if len(losses) == len(self.layers):
                raise _AllSeen

        with self.model.attention_mode("softmax"), self.model.observe(observe), torch.no_grad(), suppress(_AllSeen):
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
            mse, _ = module(q, k, v, **call, task="output_mse", target=y_softmax)
            loss = loss + self.config.mse_factor * mse
        if self.config.xent_factor:
            xent, _ = module(q, k, v, **call, task="weights_cross_entropy", sliding_window=sliding_window)
            loss = loss + self.config.xent_factor * xent
        return loss


class _AllSeen(Exception):
    """Ends a forward pass at the last linearized layer: what follows is not needed."""
