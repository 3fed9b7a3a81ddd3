"""Stage 1, attention transfer: feature maps and window factors learn to reproduce softmax attention.

One forward pass of the frozen model serves teacher and student: every layer's softmax output feeds the
next layer, and the layer's student is trained on the spot from the same queries, keys and values. Memory
holds one layer's graph, and the language-model head never runs. (arXiv:2410.10254, algorithm 1.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lolcats.config import TransferSection
from lolcats.data import PackedDataset
from lolcats.evaluation.perplexity import batches_of, dataset_perplexity
from lolcats.modeling.attention import SOFTMAX, AttentionCall, Observed
from lolcats.modeling.decoder import HIDDEN, decoder_layers, run_layers
from lolcats.modeling.model import LolcatsForCausalLM
from lolcats.parallel.group import SINGLE, Group
from lolcats.parallel.sharding import is_sharded
from lolcats.training.device import to_device
from lolcats.training.graphs import Graphs, graphs_wanted

SEQUENCES = "sequences"
"""Key, in a batch, of the numbers [B] of its sequences."""


HiddenSink = Callable[[str, np.ndarray, Tensor], None]
"""Takes the hidden states [B, T, hidden] after some layers, of the sequences [B] of "train" or "validation"."""


class TransferStage:
    """The `Stage` of attention transfer; see `lolcats.training.stage`.

    Args:
        layers: numbers of the decoder layers to train and to run; batches hold `HIDDEN` unless they are the first.
            None: all.
        sink: takes the hidden states after these layers, which do not depend on training; batches hold `SEQUENCES`.
        group: the processes that share the evaluations.
        report: receives a sentence if CUDA graphs are wanted and not possible.
    """

    name = "transfer"
    by_labels = False
    lr_factors: dict[str, float] = {}

    def __init__(
        self,
        model: LolcatsForCausalLM,
        config: TransferSection,
        validation: PackedDataset,
        *,
        layers: range | None = None,
        sink: HiddenSink | None = None,
        group: Group = SINGLE,
        report: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.model, self.config, self.validation, self.group = model, config, validation, group
        self.metric: str = config.select_by
        self.sink = sink
        found = (item for item in model.linear_layers() if layers is None or item[0] in layers)
        self.layers: dict[int, nn.Module] = dict(sorted(found))
        # FSDP's or accelerate's hooks must see whole passes; else nothing after the last trained layer is run
        if not is_sharded(model) and "forward" not in vars(model.get_decoder()):
            layers = layers or range(max(self.layers) + 1)
        self.run = layers
        size = config.block_layers or len(self.layers)
        self.block_of_layer = {layer: order // size for order, layer in enumerate(self.layers)}
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
            nn.ModuleList(decoder_layers(model)[1][layers.start : layers.stop]) if layers else model,
            report,
        )
        self.graphs = Graphs(parameters, enabled=graphs, report=report)

    def blocks(self) -> list[dict[str, nn.Parameter]]:
        blocks: list[dict[str, nn.Parameter]] = [{} for _ in self.layers_in_block]
        for index, module in self.layers.items():
            for name, parameter in module.named_parameters():
                blocks[self.block_of_layer[index]][f"layers.{index}.{name}"] = parameter
        return blocks

    def micro_step(self, batch: dict[str, Tensor], scale: float) -> dict[str, Any]:
        result = self.graphs(self._losses, self._inputs(batch), scale=scale)
        self._put("train", batch, result.get(HIDDEN))
        return {"loss": result["loss"], "layer_losses": dict(zip(self.layers, result["layers"], strict=True))}

    def evaluate(self) -> dict[str, Any]:
        size = self.config.micro_batch_size
        self.model.eval()

        def measure(indices: list[int]) -> tuple[Tensor, int]:
            batch = self.validation.batch(indices)
            found = self.graphs(self._losses, self._inputs(batch), scale=None)
            self._put("validation", batch, found.get(HIDDEN))
            return found["layers"][:, None] * len(indices), len(indices)

        totals, count = self.group.sums(batches_of(self.validation, size), measure)
        per_layer = {index: total / count for index, total in zip(self.layers, totals, strict=True)}
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
            how: dict[str, Any] = {"batch_size": size, "group": self.group, "graphs": self.graphs}
            result["perplexity"] = dataset_perplexity(self.model, self.validation, **how)["perplexity"]
        return result

    @torch.no_grad()
    def forward(self, split: str, batch: dict[str, Tensor]) -> None:
        """A forward pass for the sink alone."""
        self._put(split, batch, self._hidden_states(self._inputs(batch), SOFTMAX))

    def _put(self, split: str, batch: dict[str, Tensor], hidden_BTD: Tensor | None) -> None:
        if self.sink is not None and hidden_BTD is not None:
            self.sink(split, batch[SEQUENCES].numpy(), hidden_BTD)

    def _inputs(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        unused = {"labels", SEQUENCES, *(["input_ids"] if HIDDEN in batch else [])}
        return to_device({name: tensor for name, tensor in batch.items() if name not in unused}, self.device)

    def _hidden_states(self, inputs: dict[str, Tensor], call: AttentionCall) -> Tensor | None:
        """After the last layer that is run; None if that is the model's last one."""
        if self.run is not None:
            return run_layers(self.model, self.run, inputs, call)
        self.model.get_decoder()(**inputs, use_cache=False, attention_call=call)
        return None

    def _losses(self, inputs: dict[str, Tensor], scale: float | None) -> dict[str, Tensor]:
        """The losses of all layers [L], in order, and their mean; gradients add up, if there is a scale."""
        losses: dict[int, Tensor] = {}

        def observe(seen: Observed) -> None:
            if seen.module is None:
                return
            with torch.set_grad_enabled(scale is not None):
                loss = layer_loss(self.config, seen)
                if scale is not None:
                    block = self.block_of_layer[seen.layer_idx]
                    (loss * (scale / self.layers_in_block[block])).backward()
            losses[seen.layer_idx] = loss.detach()

        with torch.no_grad():
            hidden_BTD = self._hidden_states(inputs, AttentionCall(mode="softmax", observe=observe))
        losses_L = torch.stack([losses[index] for index in self.layers])
        result = {"loss": losses_L.mean(), "layers": losses_L}
        return result if self.sink is None or hidden_BTD is None else result | {HIDDEN: hidden_BTD}


def layer_loss(config: TransferSection, seen: Observed) -> Tensor:
    """Distance between a layer's linear and its softmax attention: a float32 scalar. Rows have no padding."""
    module, _, q, k, v, y_softmax, scoring, (window, *_) = seen
    loss = q.new_zeros((), dtype=torch.float32)
    if config.mse_factor:
        loss = loss + config.mse_factor * module.output_mse(q, k, v, y_softmax, scoring)
    if config.xent_factor:
        loss = loss + config.xent_factor * module.weights_cross_entropy(q, k, scoring, window)
    return loss
