"""Stage 2, low-rank adjusting: the linearized model learns to predict the next token again.

(arXiv:2410.10254, algorithm 2.) Optionally part of the loss is the divergence from the softmax teacher's
predictions: those of the same weights with softmax attention on and the adapters off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from lolcats.config import AdjustSection
from lolcats.data import PackedDataset
from lolcats.data.packed import IGNORED
from lolcats.evaluation.perplexity import batches_of, dataset_perplexity, perplexity_of
from lolcats.modeling.attention import SOFTMAX, AttentionCall
from lolcats.modeling.model import LolcatsForCausalLM
from lolcats.parallel.group import SINGLE, Group
from lolcats.parallel.sharding import gathered
from lolcats.training.device import checkpoint_activations, to_device
from lolcats.training.graphs import Graphs, graphs_wanted
from lolcats.training.head import find_head, head_inputs, part_size, weighted_cross_entropy, weighted_losses
from lolcats.training.lora import add_lora

ROWS = ("row_L", "label_L", "weight_L")
PADDING_STEPS = 8
"""CUDA graphs have fixed shapes: padded, few numbers of labels occur, each with its graph."""


class AdjustStage:
    """The `Stage` of low-rank adjusting; see `lolcats.training.stage`."""

    name = "adjust"
    by_labels = False

    def __init__(
        self,
        model: LolcatsForCausalLM,
        config: AdjustSection,
        validation: PackedDataset,
        *,
        group: Group = SINGLE,
        report: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.config, self.validation, self.linearized, self.group = config, validation, model, group
        self.metric = "loss" if config.distill_factor else "perplexity"
        self.call = AttentionCall(mode="softmax" if config.softmax_control else "hybrid")
        model.requires_grad_(False)
        self.model = add_lora(model, config)
        for _, module in model.linear_layers():
            module.requires_grad_(config.train_feature_maps)
        parts = list(self.model.modules())
        dropout = any(isinstance(part, nn.Dropout) and part.p > 0 for part in parts)
        dropout |= any(getattr(part, "attention_dropout", 0) for part in parts)  # of attention weights
        if config.gradient_checkpointing:
            checkpoint_activations(model, preserve_rng_state=dropout)
        self.head = find_head(model)
        self.part = part_size(model.config.text_config.vocab_size)
        graphs = graphs_wanted(config.cuda_graphs, model, report, has_dropout=dropout)
        self.graphs = Graphs(list(self.blocks()[0].values()), enabled=graphs, report=report)

    def blocks(self) -> list[dict[str, nn.Parameter]]:
        return [{name: p for name, p in self.model.named_parameters() if p.requires_grad}]

    @property
    def lr_factors(self) -> dict[str, float]:
        if self.config.feature_lr is None:
            return {}
        feature_maps = {id(p) for _, module in self.linearized.linear_layers() for p in module.parameters()}
        factor = self.config.feature_lr / self.config.lr
        return {name: factor for name, parameter in self.blocks()[0].items() if id(parameter) in feature_maps}

    def micro_step(self, batch: dict[str, Tensor], scale: float) -> dict[str, Any]:
        """Mean over sequences of the mean over a sequence's labels: independent of the micro-batch size."""
        return dict(self.graphs(self._gradient_step, self._inputs(batch), scale=scale))

    def evaluate(self) -> dict[str, Any]:
        size = self.config.micro_batch_size
        self.model.eval()
        if self.config.distill_factor:
            sums, count = self.group.sums(batches_of(self.validation, size), self._distilled)
            loss, cross_entropy, divergence = sums
            return perplexity_of(cross_entropy, count) | {"loss": loss / count, "divergence": divergence / count}
        how: dict[str, Any] = {"batch_size": size, "group": self.group, "graphs": self.graphs}
        return dataset_perplexity(self.model, self.validation, attention_call=self.call, **how)

    def _distilled(self, indices: list[int]) -> tuple[Tensor, int]:
        """[3, 1] sums over the labels of some validation sequences: the loss and its parts, in nats."""
        inputs, labels = self._inputs(self.validation.batch(indices), by_labels=True), self.validation.labels(indices)
        means = self.graphs(self._means, inputs)
        return torch.stack(list(means.values()))[:, None] * labels, labels

    @torch.no_grad()
    def _means(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        with gathered(self.head.module):
            loss, parts = self._losses(inputs)
        return {"loss": loss, **parts}

    def _inputs(self, batch: dict[str, Tensor], by_labels: bool = False) -> dict[str, Tensor]:
        """The model's inputs and what `label_rows` gives, on the device."""
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        rows = label_rows(batch["labels"], padded=self.graphs.enabled, by_labels=by_labels)
        return to_device(inputs | rows, self.linearized.device)

    def _losses(self, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The weighted loss, and its two parts where it has two."""
        inputs = dict(inputs)
        row_L, label_L, weight_L = (inputs.pop(name) for name in ROWS)
        features_LD = head_inputs(self.linearized, self.head, inputs, row_L, self.call)
        if not (share := self.config.distill_factor):
            return weighted_cross_entropy(features_LD, label_L, weight_L, self.head, part=self.part), {}
        with torch.no_grad(), self.model.disable_adapter():
            teacher_LD = head_inputs(self.linearized, self.head, inputs, row_L, SOFTMAX)
        rows = features_LD, teacher_LD, label_L, weight_L
        loss, entropy, divergence = weighted_losses(*rows, self.head, share=share, part=self.part)
        return loss, {"cross_entropy": entropy, "divergence": divergence}

    def _gradient_step(self, inputs: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
        """Adds up gradients."""
        self.model.train()
        with gathered(self.head.module):
            loss, parts = self._losses(inputs)
            (loss * scale).backward()
        return {"loss": loss.detach(), **parts}


def label_rows(labels_BT: Tensor, *, padded: bool = False, by_labels: bool = False) -> dict[str, Tensor]:
    """Where there is something to predict, in a batch of unshifted labels; made on the CPU.

    Args:
        padded: round the number of rows up to a multiple of B * T / `PADDING_STEPS`, a small one to a half of it, a
            quarter, ..., with other rows of weight 0.
        by_labels: all labels weigh the same, else all sequences.

    Returns:
        row_L: distinct rows of B * T whose outputs predict a label; label_L: that label; weight_L: float32, so
        that the weighted sum is the mean over sequences of the mean over a sequence's labels, or over all labels.
    """
    labels_BT = labels_BT.cpu()
    sequences, tokens = labels_BT.shape
    next_N = pad(labels_BT[:, 1:], (0, 1), value=IGNORED).flatten()
    labelled_N = next_N != IGNORED
    row_L = labelled_N.nonzero()[:, 0]
    sequence_L = row_L // tokens
    count_B = torch.bincount(sequence_L, minlength=sequences)
    weight_L = 1.0 / (torch.full_like(row_L, len(row_L)) if by_labels else count_B[sequence_L] * sequences)
    label_L = next_N[row_L]
    if padded:
        step = -(-len(next_N) // PADDING_STEPS)
        while 2 * max(len(row_L), 1) <= step:
            step //= 2
        wanted = min(max(-(-len(row_L) // step), 1) * step, len(next_N))
        others = (~labelled_N).nonzero()[:, 0][: wanted - len(row_L)]
        row_L = torch.cat([row_L, others])
        label_L = torch.cat([label_L, torch.zeros_like(others)])
        weight_L = torch.cat([weight_L, torch.zeros(len(others))])
    return dict(zip(ROWS, (row_L, label_L, weight_L), strict=True))
