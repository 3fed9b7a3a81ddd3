"""Hidden states of a student near those of its teacher."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lolcats.errors import UserError
from lolcats.modeling.model import LolcatsForCausalLM
from lolcats.parallel.sharding import decoder_layers

SMALLEST_NORM = 1e-6
"""Of a teacher's hidden state, squared: keeps the distance finite where the state is zero."""


def compared_layers(model: LolcatsForCausalLM, every: int) -> list[nn.Module]:
    """Every `every`-th decoder layer, from the `every`-th on.

    Raises:
        UserError: there are not so many.
    """
    layers = decoder_layers(model)
    if every > len(layers):
        raise UserError(
            f"adjust.align_every={every} leaves no layer to compare: the model has {len(layers)}; choose a smaller one"
        )
    return layers[every - 1 :: every]


@contextmanager
def hidden_states(layers: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """Within the block, the list gets the outputs [B, T, D] of the decoder layers as they are computed."""
    collected: list[Tensor] = []

    def take(module: nn.Module, args: tuple, output: Any) -> None:
        collected.append(output if isinstance(output, Tensor) else output[0])

    hooks = [layer.register_forward_hook(take) for layer in layers]
    try:
        yield collected
    finally:
        for hook in hooks:
            hook.remove()


def relative_distance(student: Sequence[Tensor], teacher: Sequence[Tensor]) -> Tensor:
    """Mean over layers and tokens of |student - teacher|^2 / |teacher|^2; a float32 scalar.

    Relative by token: the norms of hidden states grow with depth, and those of a text's first tokens can be
    hundreds of times those of others.

    Args:
        student, teacher: hidden states [B, T, D] of the same layers.
    """
    distances = []
    for student_BTD, teacher_BTD in zip(student, teacher, strict=True):
        distance_BT = (student_BTD.float() - teacher_BTD.float()).square().sum(-1)
        norm_BT = teacher_BTD.float().square().sum(-1).clamp_min(SMALLEST_NORM)
        distances.append((distance_BT / norm_BT).mean())
    return torch.stack(distances).mean()
