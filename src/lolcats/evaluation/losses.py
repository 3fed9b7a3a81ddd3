"""Losses of predicting tokens, for perplexity and for log-likelihoods."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import cross_entropy


def token_losses(logits_MV: Tensor, target_M: Tensor, reduction: str = "none") -> list[Tensor]:
    """-log p of the targets (nats) for one piece of 2048 positions after another: each [<= 2048], or with "sum" [].

    In float32 whatever the model's type is: bfloat16 would tie answers that differ. In pieces, because float32 logits
    of all positions would fill memory.
    """
    pieces = zip(logits_MV.split(2048), target_M.split(2048), strict=True)
    return [cross_entropy(logits.float(), targets, reduction=reduction) for logits, targets in pieces]
