"""Feature maps phi, registered by name: a projection per head followed by an activation.

A new map is one small class with the decorator `@register("name")`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

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


_REGISTRY: dict[str, FeatureMap] = {}


def register(name: str) -> Callable[[type[FeatureMap]], type[FeatureMap]]:
    """Class decorator: make a `FeatureMap` available as `name`."""

    def add(cls: type[FeatureMap]) -> type[FeatureMap]:
        if name in _REGISTRY:
            raise ValueError(f"feature map {name!r} is already registered by {type(_REGISTRY[name]).__name__}")
        _REGISTRY[name] = cls()
        return cls

    return add


def get_feature_map(name: str) -> FeatureMap:
    """The registered map, or ValueError naming the known ones."""
    if name not in _REGISTRY:
        raise ValueError(f"unknown feature map {name!r}; known: {', '.join(sorted(_REGISTRY))}")
    return _REGISTRY[name]


def feature_map_names() -> list[str]:
    return sorted(_REGISTRY)


@register("hedgehog")
class Hedgehog(FeatureMap):
    """Softmax over the columns of xW and of -xW, side by side (arXiv:2402.04347)."""

    multiple = 2

    def activation(self, x_P: Tensor) -> Tensor:
        return torch.cat([x_P.softmax(-1), (-x_P).softmax(-1)], dim=-1)


@register("hedgehog_bias")
class HedgehogBias(Hedgehog):
    """Hedgehog with a bias per column, which starts at zero: how often a feature is active is learned apart from
    what activates it. As many features, and a state of the same size."""

    has_bias = True


@register("t2r")
class T2R(FeatureMap):
    """ReLU with a bias per column (Transformer-to-RNN, arXiv:2103.13076)."""

    has_bias = True

    def activation(self, x_P: Tensor) -> Tensor:
        return x_P.relu()


@register("elu")
class Elu(FeatureMap):
    """1 + ELU (arXiv:2006.16236), here after a learnable projection."""

    def activation(self, x_P: Tensor) -> Tensor:
        return torch.nn.functional.elu(x_P) + 1.0


@register("exp")
class Exp(FeatureMap):
    """Hedgehog without the normalisation over features: exponentials shifted by their maximum."""

    multiple = 2

    def activation(self, x_P: Tensor) -> Tensor:
        top_1 = x_P.amax(-1, keepdim=True)
        bottom_1 = x_P.amin(-1, keepdim=True)
        return torch.cat([(x_P - top_1).exp(), (bottom_1 - x_P).exp()], dim=-1)
