"""Which layers should keep softmax attention: what each one is worth, and what more of them buy.

The layers of a trained model switch between linear and softmax attention without training, so one model
answers for all choices. (Scores from one layer at a time: compare arXiv:2512.20569, which also trains for
each layer. arXiv:2410.10254 keeps the first half of the layers in its hybrid models.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lolcats.data import PackedDataset
from lolcats.errors import UserError
from lolcats.evaluation.perplexity import dataset_perplexity
from lolcats.modeling.model import LolcatsForCausalLM
from lolcats.ops.hybrid_attention import initial_state

WAYS = {
    "restored": "all layers linear but this one: how much its softmax attention lowers the loss",
    "linearized": "all layers softmax but this one: how much its linear attention raises the loss",
}


class Losses:
    """Loss (nats per token) of a model with softmax attention in some of its linearized layers.

    Args:
        known: losses measured before, by `key`; new ones are added.
        on_measure: called after each new measurement.
    """

    def __init__(
        self,
        model: LolcatsForCausalLM,
        dataset: PackedDataset,
        *,
        batch_size: int = 1,
        known: dict[str, float] | None = None,
        on_measure: Callable[[], None] = lambda: None,
    ) -> None:
        self.model, self.dataset, self.batch_size = model, dataset, batch_size
        self.known = {} if known is None else known
        self.on_measure = on_measure
        self.layers = [index for index, _ in model.linear_layers()]

    def __call__(self, softmax: Iterable[int]) -> float:
        chosen = set(softmax)
        key = self.key(chosen)
        if key not in self.known:
            with softmax_in(self.model, chosen):
                self.known[key] = dataset_perplexity(self.model, self.dataset, batch_size=self.batch_size)["loss"]
            self.on_measure()
        return self.known[key]

    @staticmethod
    def key(softmax: Iterable[int]) -> str:
        return ",".join(map(str, sorted(softmax)))


@contextmanager
def softmax_in(model: LolcatsForCausalLM, layers: Iterable[int]) -> Iterator[None]:
    """Within the block these of the linearized layers compute softmax attention, the others linear."""
    chosen = set(layers)
    with model.attention_mode("linear"):
        for index, module in model.linear_layers():
            if index in chosen:
                module.mode = "softmax"
        yield


def rank_layers(losses: Losses, way: str) -> list[dict[str, Any]]:
    """The linearized layers, the one whose softmax attention is worth most first.

    Returns:
        For each layer: layer, loss with this one changed, and worth, the difference in nats per token.
    """
    layers = set(losses.layers)
    base = losses(() if way == "restored" else layers)
    rows = []
    for layer in losses.layers:
        loss = losses({layer} if way == "restored" else layers - {layer})
        rows.append({"layer": layer, "loss": loss, "worth": base - loss if way == "restored" else loss - base})
    return sorted(rows, key=lambda row: (-row["worth"], row["layer"]))


def curve(losses: Losses, order: list[int], counts: Iterable[int], context: int) -> list[dict[str, Any]]:
    """Loss and memory with the first n layers of `order` in softmax attention, for each n of `counts`."""
    rows = []
    for count in counts:
        chosen = order[:count]
        size = sequence_bytes(losses.model, chosen, context)
        rows.append({"layers": count, "softmax": sorted(chosen), "loss": losses(chosen), "bytes": size})
    return rows


def sequence_bytes(model: LolcatsForCausalLM, softmax: Iterable[int], context: int) -> int:
    """Memory of one sequence after `context` tokens with softmax attention in these of the linearized layers.

    States of fixed size, and growing keys and values in the model's type. Layers that were never linearized
    count as all others of the model do.
    """
    chosen, total = set(softmax), 0
    config = model.config.text_config
    heads = config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    total += len(model.softmax_layers()) * 2 * heads * head_dim * context * model.dtype.itemsize
    for index, module in model.linear_layers():
        if index in chosen:
            total += 2 * module.num_kv_heads * module.head_dim * context * model.dtype.itemsize
        else:
            like = torch.empty(1, module.num_kv_heads, 0, module.head_dim, dtype=model.dtype, device="meta")
            total += initial_state(module.spec, module.params(), like).nbytes
    return total


def check_budget(losses: Losses, budget: int | None) -> None:
    """Raises UserError if so many layers cannot be chosen."""
    if budget is not None and not 0 < budget < len(losses.layers):
        raise UserError(
            f"--budget {budget}: the model has {len(losses.layers)} linearized layers; choose 1 to"
            f" {len(losses.layers) - 1} of them to keep softmax attention"
        )
