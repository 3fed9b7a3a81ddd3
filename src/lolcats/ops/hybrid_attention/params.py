"""What a layer gives to hybrid attention, and the suffixes that tell tensors' shapes.

Shape suffixes used throughout: B batch, H query heads, G key/value heads, R = H / G query heads per
key/value head, S state heads (G or H), T tokens, D head_dim, P columns of the projection, F features.
The function itself is described in `lolcats.config.attention`.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

# Keeps the quotient defined where every feature product underflows or is exactly zero (ReLU features).
DENOMINATOR_FLOOR = 1e-12


class Scoring(NamedTuple):
    """How a layer of the base model makes the scores of softmax attention.

    Attributes:
        sink_logits: [H] or None; an extra score without a value in every row (GPT-OSS).
        scale: factor of the scores; None: 1 / sqrt(D).
        softcap: scores become softcap * tanh(score / softcap) (Gemma 2); None: there is none.
    """

    sink_logits: Tensor | None = None
    scale: float | None = None
    softcap: float | None = None

    @property
    def needs_scores(self) -> bool:
        """Whether they are more than scaled products: fused attention takes no others."""
        return self.softcap is not None or self.sink_logits is not None

    def scale_of(self, q: Tensor) -> float:
        """The factor of the scores of these queries."""
        return q.shape[-1] ** -0.5 if self.scale is None else self.scale


class HybridParams(NamedTuple):
    """The learnable tensors of one layer, and its `Scoring`.

    Attributes:
        window_factor: [H]; gamma, the factor of the window's terms, is its sigmoid.
        q_weight: [H, D, P] projection of the query feature map, or None without a linear part.
        k_weight: [S, D, P] projection of the key feature map. S = G shares one state among the R query
            heads of a group; S = H keeps one state per query head.
        q_bias, k_bias: [H, P], [S, P] or None.
    """

    window_factor: Tensor
    q_weight: Tensor | None = None
    k_weight: Tensor | None = None
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    sink_logits: Tensor | None = None
    scale: float | None = None
    softcap: float | None = None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """In the order of their fields."""
        return self[:6]

    @property
    def gamma(self) -> Tensor:
        return self.window_factor.sigmoid()

    def scale_of(self, q: Tensor) -> float:
        return Scoring(scale=self.scale).scale_of(q)
