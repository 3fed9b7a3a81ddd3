"""Feature maps phi(x) = activation(x W + b): a projection per head followed by an activation.

A new map is an entry in `FEATURE_MAPS`, and its name in `AttentionConfig.feature_map`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class FeatureMap(NamedTuple):
    """A feature map; the weights are passed in.

    Attributes:
        activation: [..., P] -> [..., P * multiple], all entries >= 0.
        multiple: features per column of the projection (2 if the map keeps both signs).
        has_bias: whether the map learns a bias per column.
    """

    activation: Callable[[Tensor], Tensor]
    multiple: int = 1
    has_bias: bool = False

    def default_dim(self, head_dim: int) -> int:
        """Columns of the projection that give `head_dim` features."""
        return max(head_dim // self.multiple, 1)

    def __call__(self, x_HTD: Tensor, weight_HDP: Tensor, bias_HP: Tensor | None = None) -> Tensor:
        """[..., H, T, D] -> [..., H, T, F] with F = P * multiple, in the type of x."""
        projected_HTP = x_HTD @ weight_HDP.to(x_HTD.dtype)
        if bias_HP is not None:
            projected_HTP = projected_HTP + bias_HP.to(x_HTD.dtype)[:, None, :]
        return self.activation(projected_HTP)


FEATURE_MAPS = {
    # softmax over the columns of xW and of -xW, side by side (arXiv:2402.04347)
    "hedgehog": FeatureMap(lambda x_P: torch.cat([x_P.softmax(-1), (-x_P).softmax(-1)], dim=-1), multiple=2),
    # ReLU with a bias per column (Transformer-to-RNN, arXiv:2103.13076)
    "t2r": FeatureMap(torch.relu, has_bias=True),
}
"""By the names of `AttentionConfig.feature_map`."""
