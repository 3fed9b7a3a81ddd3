"""Stage 1, attention transfer: feature maps and window factors learn to reproduce softmax attention.

One forward pass of the frozen model serves teacher and student: every layer's softmax output goes on to the
next layer, and the layer's student is trained on the spot from the same queries, keys and values. Memory
holds one layer's graph, and the language-model head never runs. (arXiv:2410.10254, algorithm 1.)
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from lolcats.config import TransferSection
from lolcats.data import PackedDataset
from lolcats.evaluation.perplexity import batches_of, dataset_perplexity
from lolcats.modeling.call import AttentionCall
from lolcats.modeling.decoder import decoder_part
from lolcats.modeling.model import LolcatsForCausalLM
from lolcats.parallel.group import SINGLE, Group
from lolcats.parallel.sharding import is_sharded
from lolcats.training.device import to_device
from lolcats.training.graphs import GraphedStep, graphs_wanted


class TransferStage:
    """The `Stage` of attention transfer; see `lolcats.training.stage`.

    Args:
        only: the linearized layers to train; None: all.
        group: the processes that share the evaluations.
        report: receives a sentence if CUDA graphs are wanted and not possible.
    """

    name = "transfer"
    lr_factors: dict[str, float] = {}

    def __init__(
        self,
        model: LolcatsForCausalLM,
        config: TransferSection,
        validation: PackedDataset,
        *,
        only: Collection[int] | None = None,
        group: Group = SINGLE,
        report: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.model, self.config, self.validation, self.group = model, config, validation, group
        self.metric = config.select_by
        self.layers: dict[int, nn.Module] = {
            index: module for index, module in model.linear_layers() if only is None or index in only
        }
        self.decoder = self._make_decoder()
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
        self.device = parameters[0].device
        graphs = graphs_wanted(
            config.cuda_graphs,
            self._computing(),
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
        result = self._step(batch, scale)
        return {"loss": result["loss"], "layer_losses": dict(zip(sorted(self.layers), result["layers"], strict=True))}

    def evaluate(self) -> dict[str, Any]:
        totals: dict[int, Tensor] = {}
        size = self.config.micro_batch_size
        for indices, counts in self.group.share(batches_of(self.validation, size)):
            losses = self._validate(self.validation.batch(indices))
            for index, loss in losses.items():
                totals[index] = totals.get(index, torch.zeros_like(loss)) + loss * (len(indices) if counts else 0)
        sums = self.group.total([float(totals[index]) for index in sorted(totals)])
        per_layer = {index: total / len(self.validation) for index, total in zip(sorted(totals), sums, strict=True)}
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
            measured = dataset_perplexity(self.model, self.validation, batch_size=size, group=self.group)
            result["perplexity"] = measured["perplexity"]
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

    def _make_decoder(self) -> nn.Module:
        """The decoder up to the last trained layer, as nobody needs what follows; all of it where layers are placed."""
        decoder = self.model.get_decoder()
        if is_sharded(self.model) or "forward" in vars(decoder):  # FSDP's or accelerate's hooks see whole passes
            return decoder
        return decoder_part(self.model, 0, max(self.layers) + 1)

    def _computing(self) -> nn.Module:
        """The module whose parameters a pass uses."""
        return self.model

    def _step(self, batch: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
        return self.step(self._inputs(batch), scale=scale)

    def _validate(self, batch: dict[str, Tensor]) -> dict[int, Tensor]:
        return self._run(self._inputs(batch), gradient_scale=None)

    def _inputs(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return to_device({name: tensor for name, tensor in batch.items() if name != "labels"}, self.device)

    def _forward(self, inputs: dict[str, Tensor], call: AttentionCall) -> None:
        self.decoder(**inputs, use_cache=False, attention_call=call)

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
                loss = layer_loss(self.config, module, q.detach(), k.detach(), v.detach(), y_softmax.detach(), call)
                if gradient_scale is not None:
                    (loss * (gradient_scale / self.layers_in_block[self.block_of_layer[layer_idx]])).backward()
            losses[layer_idx] = loss.detach()

        with torch.no_grad():
            self._forward(inputs, AttentionCall(mode="softmax", observe=observe))
        return losses


def layer_loss(
    config: TransferSection, module: Any, q: Tensor, k: Tensor, v: Tensor, y_softmax: Tensor, call: dict[str, Any]
) -> Tensor:
    """Distance between a layer's linear attention and its softmax attention: a float32 scalar; padding does not count.

    Args:
        module: the layer's `HybridAttention`; others as its observer gets them.
    """
    call = dict(call)
    sliding_window = call.pop("sliding_window", None)
    loss = q.new_zeros((), dtype=torch.float32)
    if config.mse_factor:
        loss = loss + config.mse_factor * module.output_mse(q, k, v, y_softmax, **call)
    if config.xent_factor:
        xent = module.weights_cross_entropy(q, k, **call, sliding_window=sliding_window)
        loss = loss + config.xent_factor * xent
    return loss
