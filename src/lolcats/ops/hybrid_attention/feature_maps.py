"""Feature maps phi: a projection per head followed by an activation.

A new map is one small class, an entry in `FEATURE_MAPS`, and its name in `AttentionConfig.feature_map`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class FeatureMap(ABC):
    """phi(x) = activation(x W + b); stateless, the weights are passed in.

    Attributes:
        multiple: features per column of the projection (2 if the map keeps both signs).
        has_bias: whether the map learns a bias per column.
    """

    multiple: int = 1
    has_bias: bool = False

    def default_dim(self, head_dim: int) -> int:
        """Columns of the projection that give `head_dim` features."""
        return max(head_dim // self.multiple, 1)

    @abstractmethod
    def activation(self, x_P: Tensor) -> Tensor:
        """[..., P] -> [..., P * multiple], all entries >= 0."""

    def __call__(self, x_HTD: Tensor, weight_HDP: Tensor, bias_HP: Tensor | None = None) -> Tensor:
        """[..., H, T, D] -> [..., H, T, F] with F = P * multiple."""
        projected_HTP = x_HTD @ weight_HDP
        if bias_HP is not None:
            projected_HTP = projected_HTP + bias_HP[:, None, :]
        return self.activation(projected_HTP)


class Hedgehog(FeatureMap):
    """Softmax over the columns of xW and of -xW, side by side (arXiv:2402.04347)."""

    multiple = 2

    def activation(self, x_P: Tensor) -> Tensor:
        return torch.cat([x_P.softmax(-1), (-x_P).softmax(-1)], dim=-1)


class T2R(FeatureMap):
    """ReLU with a bias per column (Transformer-to-RNN, arXiv:2103.13076)."""

    has_bias = True

    def activation(self, x_P: Tensor) -> Tensor:
        return x_P.relu()


FEATURE_MAPS: dict[str, FeatureMap] = {"hedgehog": Hedgehog(), "t2r": T2R()}
"""By the names of `AttentionConfig.feature_map`."""


def get_feature_map(name: str) -> FeatureMap:
    """The map of that name, or ValueError naming the known ones."""
    if name not in FEATURE_MAPS:
        raise ValueError(f"unknown feature map {name!r}; known: {', '.join(FEATURE_MAPS)}")
    return FEATURE_MAPS[name]
