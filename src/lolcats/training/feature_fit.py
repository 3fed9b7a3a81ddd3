"""The start of feature maps, fitted on data: one factor of the identity per state head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lolcats.data import PackedDataset
from lolcats.evaluation.perplexity import batches_of
from lolcats.modeling.model import LolcatsForCausalLM
from lolcats.parallel.group import SINGLE, Group
from lolcats.training.device import to_device

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""What is tried, times `feature_scale`."""
SEQUENCES = 8
"""Packed sequences that it is tried on."""


@torch.no_grad()
def fit_features(
    model: LolcatsForCausalLM, data: PackedDataset, *, batch_size: int, group: Group = SINGLE
) -> dict[int, list[float]]:
    """Multiply the feature maps' weights of every linearized layer, by state head, with the best of `FACTORS`.

    The best has the smallest squared error against softmax attention on the first sequences, of all query heads
    that share the state; their weights get the same factor. No gradients, and a few passes of attention alone.

    Args:
        data: packed training sequences, without padding.
        batch_size: sequences per forward pass.
        group: processes that all call this; what the first one finds counts.

    Returns:
        layer -> the factor of each state head.
    """
    errors: dict[int, Tensor] = {}  # [factors, S]

    def observe(
        module: Any, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, y_softmax: Tensor, call: dict[str, Any]
    ) -> None:
        call = {name: value for name, value in call.items() if name != "sliding_window"}
        state_heads = module.k_weight.shape[0]
        start = module.q_weight.clone(), module.k_weight.clone()
        found = []
        for factor in FACTORS:
            module.q_weight.copy_(start[0] * factor)
            module.k_weight.copy_(start[1] * factor)
            y_BHTD, _ = module(q, k, v, **call)
            error_H = (y_BHTD.float() - y_softmax.float()).square().sum((0, 2, 3))
            found.append(error_H.unflatten(0, (state_heads, -1)).sum(1))
        module.q_weight.copy_(start[0])
        module.k_weight.copy_(start[1])
        errors[layer_idx] = errors.get(layer_idx, 0.0) + torch.stack(found)

    for indices in batches_of(data, batch_size, first=SEQUENCES):
        batch = data.batch(indices)
        inputs = to_device({name: tensor for name, tensor in batch.items() if name != "labels"}, model.device)
        with model.attention_mode("softmax"), model.observe(observe):
            model.get_decoder()(**inputs, use_cache=False)
    best = {index: [FACTORS[place] for place in error.argmin(0).tolist()] for index, error in errors.items()}
    best = group.broadcast(best)
    for index, module in model.linear_layers():
        _multiply(module, torch.tensor(best[index], device=module.k_weight.device))
    return best


def _multiply(module: Any, factor_S: Tensor) -> None:
    per_state = module.q_weight.shape[0] // module.k_weight.shape[0]
    module.k_weight.mul_(factor_S[:, None, None])
    module.q_weight.mul_(factor_S.repeat_interleave(per_state)[:, None, None])
