"""The choice of exact heads: gates between softmax and hybrid attention, learned together for all KV heads.

Recall sits in few heads that work as a chain, so that trying heads one at a time does not find them. Each KV head's
output is gate * softmax + (1 - gate) * hybrid attention; the gates start at 1 and minimise the divergence from the
softmax model where something is to be found again in a text, plus a penalty on their mean. The heads with the largest
gates become exact; an average over the latest steps orders those that all end at 1, or at 0. (After DuoAttention,
arXiv:2410.10819, whose other side of a gate is a window alone.) Some heads matter in longer texts than gates can be
trained on: those next to the border are compared there, each left out in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from lolcats.config import GatesSection
from lolcats.data import PackedDataset
from lolcats.evaluation.perplexity import batches_of
from lolcats.modeling.attention import SOFTMAX, AttentionCall
from lolcats.modeling.model import LolcatsForCausalLM
from lolcats.parallel.group import SINGLE, Group
from lolcats.parallel.sharding import gathered
from lolcats.training.device import checkpoint_activations, keep_activations, to_device
from lolcats.training.finetune import ROWS, label_rows
from lolcats.training.graphs import Graphs, graphs_wanted
from lolcats.training.head import find_head, head_inputs, part_size, weighted_losses

Head = tuple[int, int]
"""Layer and KV head."""
FAR, FAR_TEXTS = 4, 8
"""Times the length of the gates' texts, and number, of these longer ones."""
AVERAGE_STEPS = 100
"""Steps over which gates are averaged: the time constant of an exponential average."""


class GateStage:
    """The `Stage` of the gates; see `lolcats.training.stage`. Only they are trained."""

    name = "gates"
    metric = "loss"
    by_labels = True
    lr_factors: dict[str, float] = {}

    def __init__(
        self,
        model: LolcatsForCausalLM,
        config: GatesSection,
        validation: PackedDataset,
        *,
        group: Group = SINGLE,
        report: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.model, self.config, self.validation, self.group = model, config, validation, group
        model.requires_grad_(False)
        self.gates = {
            layer.index: nn.Parameter(torch.ones(layer.num_kv_heads, device=model.device))
            for layer in model.config.linear_layers
        }
        # Kept beside the gates in checkpoints and with the best weights; they have no gradient.
        self.averages = {
            index: nn.Parameter(gate.detach().clone(), requires_grad=False) for index, gate in self.gates.items()
        }
        self.head = find_head(model)
        self.part = part_size(model.config.text_config.vocab_size)
        if config.gradient_checkpointing:
            checkpoint_activations(model, preserve_rng_state=False)
        graphs = graphs_wanted(config.cuda_graphs, model, report)
        self.graphs = Graphs(list(self.gates.values()), enabled=graphs, report=report)

    def blocks(self) -> list[dict[str, nn.Parameter]]:
        gates = {f"layers.{index}.gates": gate for index, gate in self.gates.items()}
        return [gates | {f"layers.{index}.averages": average for index, average in self.averages.items()}]

    def micro_step(self, batch: dict[str, Tensor], scale: float) -> dict[str, Any]:
        self._clamp()
        with torch.no_grad():
            if next(iter(self.gates.values())).grad is None:  # the first micro-batch of an update
                torch._foreach_lerp_(list(self.averages.values()), list(self.gates.values()), 1 / AVERAGE_STEPS)
        self.model.train(self.config.gradient_checkpointing)  # which transformers does in training alone
        return dict(self.graphs(self._gradient_step, self._inputs(batch, scale)))

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any]:
        self.model.eval()
        self._clamp()

        def measure(indices: list[int]) -> tuple[Tensor, int]:
            with gathered(self.head.module):
                found = self.graphs(self._losses, self._inputs(self.validation.batch(indices)))
            labels = self.validation.labels(indices)
            return found["divergence"].reshape(1, 1) * labels, labels

        (total,), count = self.group.sums(batches_of(self.validation, self.config.micro_batch_size), measure)
        mean = float(torch.cat(list(self.gates.values())).mean())
        return {"loss": total / count + self.config.penalty * mean, "divergence": total / count, "mean_gate": mean}

    @torch.no_grad()
    def _clamp(self) -> None:
        """Bring gates back into [0, 1], in place: torch 2.15's clamp has no gradient at a bound, where they start."""
        for gate in self.gates.values():
            gate.clamp_(0, 1)

    def close(self) -> None:
        """Training is over: activations of the model are no longer recomputed."""
        if self.config.gradient_checkpointing:
            keep_activations(self.model)

    def values(self) -> dict[int, list[float]]:
        """The averaged gates of each layer's KV heads."""
        return {index: average.tolist() for index, average in self.averages.items()}

    @torch.no_grad()
    def costs(self, kept: list[Head], left_out: list[Head], texts: PackedDataset) -> list[float]:
        """Mean divergence in nats over the labels of texts, when `kept` have softmax attention but for one.

        Returns:
            One number for each of `left_out`, which are among `kept`.
        """
        self.model.eval()
        masks = [
            {
                index: gate.new_tensor([(index, head) in {*kept} - {out} for head in range(len(gate))])
                for index, gate in self.gates.items()
            }
            for out in left_out
        ]

        def measure(indices: list[int]) -> tuple[Tensor, int]:
            inputs, labels = self._inputs(texts.batch(indices)), texts.labels(indices)
            with gathered(self.head.module):
                teacher_LD = self._features(inputs, SOFTMAX)
                found = [self._divergence(inputs, teacher_LD, gates) for gates in masks]
            return torch.stack(found)[:, None] * labels, labels

        totals, count = self.group.sums(batches_of(texts, 1), measure)
        return [total / count for total in totals]

    def _inputs(self, batch: dict[str, Tensor], scale: float = 1.0) -> dict[str, Tensor]:
        """On the device; `scale` too, which differs by the labels of a batch and would be a constant of a graph."""
        rows = label_rows(batch["labels"], padded=self.graphs.enabled, by_labels=True)
        inputs = {"input_ids": batch["input_ids"], "scale": torch.tensor(scale), **rows}
        return to_device(inputs, self.model.device)

    def _gradient_step(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        with gathered(self.head.module):  # which the backward pass uses again
            losses = self._losses(inputs)
            loss = losses["divergence"] + self.config.penalty * losses["mean_gate"]
            (loss * inputs["scale"]).backward()
        return {"loss": loss.detach()} | {name: value.detach() for name, value in losses.items()}

    def _losses(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Mean divergence in nats over the labels of a batch, and the mean gate."""
        with torch.no_grad():
            teacher_LD = self._features(inputs, SOFTMAX)
        divergence = self._divergence(inputs, teacher_LD, self.gates)
        return {"divergence": divergence, "mean_gate": torch.cat(list(self.gates.values())).mean()}

    def _features(self, inputs: dict[str, Tensor], call: AttentionCall) -> Tensor:
        return head_inputs(self.model, self.head, {"input_ids": inputs["input_ids"]}, inputs[ROWS[0]], call)

    def _divergence(self, inputs: dict[str, Tensor], teacher_LD: Tensor, gates: Mapping[int, Tensor]) -> Tensor:
        _, label_L, weight_L = (inputs[name] for name in ROWS)
        rows = self._features(inputs, AttentionCall(gates=gates)), teacher_LD, label_L, weight_L
        return weighted_losses(*rows, self.head, share=1, part=self.part)[0]


def by_gate(gates: dict[int, list[float]]) -> list[Head]:
    """All heads as (layer, head), those with the largest gates first; of equal ones those of earlier layers."""
    heads = sorted((-gate, index, head) for index, row in gates.items() for head, gate in enumerate(row))
    return [(index, head) for _, index, head in heads]


def border(count: int) -> int:
    """Heads on either side of the border of `count` exact ones that longer texts compare: a quarter, at most eight."""
    return min(8, max(1, round(count / 4)))


def far_length(section: GatesSection, positions: int) -> int:
    """Tokens of the longer texts that settle who is next to the border; 0: the model reaches less than twice as far."""
    length = min(FAR * section.sequence_length, positions)
    return length if length >= 2 * section.fitting_length(positions) else 0


def settle(
    ranked: list[Head], count: int, costs: Callable[[list[Head], list[Head]], list[float]]
) -> tuple[list[Head], dict[Head, float]]:
    """`ranked`, but those next to the border of the first `count` by what each costs, most first; and the costs.

    Args:
        costs: as `GateStage.costs`, without its texts.
    """
    near = border(count)
    start, end = max(0, count - near), count + near
    found = dict(zip(ranked[start:end], costs(ranked[:end], ranked[start:end]), strict=True))
    return [*ranked[:start], *sorted(found, key=lambda head: -found[head]), *ranked[end:]], found


def heads_picture(values: dict[int, list[float]], chosen: dict[int, list[int]], name: str = "gates") -> Table:
    """Layers as rows, KV heads as columns: each head's gate or score, those of exact heads in brackets."""
    table = Table(title=f"{name} of the KV heads; [exact]", title_justify="left", box=None, padding=(0, 1))
    table.add_column("layer", justify="right")
    for head in range(max(map(len, values.values()))):
        table.add_column(str(head), justify="right")
    for index, row in values.items():
        exact = chosen.get(index, [])
        cells = (Text(f"[{value:.2f}]" if head in exact else f"{value:.2f} ") for head, value in enumerate(row))
        table.add_row(str(index), *cells)
    return table
