"""The parameters that linearizing adds to one attention layer, and which of its heads they are for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import initialization as init

from lolcats.config.attention import AttentionConfig, LayerHeads
from lolcats.ops import HybridParams, HybridState, Scoring, hybrid_attention, output_mse, weights_cross_entropy
from lolcats.ops.hybrid_attention.api import supports
from lolcats.ops.hybrid_attention.feature_maps import FEATURE_MAPS


class HeadSplit:
    """Exact and linear heads of one layer: taking them apart and putting them together again.

    The weights keep the order of the base model, in which heads of one kind mostly stand together; so a few slices
    are joined here, and any family's projections can stay as they are. Tensors are [B, H, T, D] of query heads or
    [B, G, T, D] of KV heads; a KV head g has the query heads g * H / G and on.
    """

    def __init__(self, num_kv_heads: int, exact: Sequence[int] = ()) -> None:
        self.exact = tuple(exact)
        self.linear = tuple(head for head in range(num_kv_heads) if head not in self.exact)
        self.num_kv_heads = num_kv_heads
        kinds = groupby(range(num_kv_heads), key=lambda head: head in self.exact)
        self._runs = [len(list(heads)) for _, heads in kinds]  # of heads of one kind, which take turns
        self._exact = slice(0 if 0 in self.exact else 1, None, 2)
        self._linear = slice(1 - self._exact.start, None, 2)

    def split(self, x: Tensor, dim: int = 1) -> tuple[Tensor, Tensor]:
        """The exact and the linear heads' parts of `x`, which has all heads in `dim`."""
        pieces = _pieces(x, self._runs, self.num_kv_heads, dim)
        return _joined(pieces[self._exact], dim), _joined(pieces[self._linear], dim)

    def take_linear(self, x: Tensor, dim: int = 1) -> Tensor:
        """The linear heads' part of `x`."""
        return _joined(_pieces(x, self._runs, self.num_kv_heads, dim)[self._linear], dim)

    def join(self, exact: Tensor, linear: Tensor) -> Tensor:
        """All heads in their order, from what both kinds computed [B, *, T, D]."""
        pieces = [exact] * len(self._runs)
        for kind, x, heads in ((self._exact, exact, self.exact), (self._linear, linear, self.linear)):
            pieces[kind] = _pieces(x, self._runs[kind], len(heads), 1)
        return torch.cat(pieces, 1)


def _pieces(x: Tensor, runs: list[int], heads: int, dim: int) -> tuple[Tensor, ...]:
    """`x`, which has `heads` KV heads in `dim`, taken apart into runs of heads."""
    if len(runs) == 1:
        return (x,)
    size = x.shape[dim] // heads
    # one split, whose backward is one concatenation, and not a slice for each piece
    return tuple(torch.split_with_sizes(x, [count * size for count in runs], dim))


def _joined(pieces: tuple[Tensor, ...], dim: int) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


class HybridAttention(nn.Module):
    """Feature maps and window factors of one layer's linear heads; its forward is their hybrid attention.

    In a forward pass of the model the parameters are used only inside `forward`, so that wrappers which place weights
    around a module's call (offloading, FSDP) work. The losses of attention transfer are methods beside it: they need
    the parameters in memory, where training always keeps them, sharded or not. They stay in float32 whatever the
    model's type.

    Attributes:
        heads: which heads are linear. `forward` gets these alone, the losses all of the layer's.
        num_heads, num_kv_heads: of the linear heads.
        window_factor: [H]; gamma = sigmoid(window_factor).
    """

    def __init__(
        self,
        config: AttentionConfig,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        exact: Sequence[int] = (),
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.heads = HeadSplit(num_kv_heads, exact)
        num_heads = num_heads // num_kv_heads * len(self.heads.linear)
        num_kv_heads = len(self.heads.linear)
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=torch.float32, device=device))

        self.window_factor = parameter(num_heads)
        for name in ("q_weight", "k_weight", "q_bias", "k_bias"):
            self.register_parameter(name, None)
        if config.feature_map is not None:
            phi = FEATURE_MAPS[config.feature_map]
            columns = config.feature_dim or phi.default_dim(head_dim)
            state_heads = num_kv_heads if config.share_state == "kv_head" else num_heads
            self.q_weight = parameter(num_heads, head_dim, columns)
            self.k_weight = parameter(state_heads, head_dim, columns)
            if phi.has_bias:
                self.q_bias = parameter(num_heads, columns)
                self.k_bias = parameter(state_heads, columns)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initial values, except of parameters that transformers has loaded: feature maps start as the identity."""
        config = self.config
        init.constant_(self.window_factor, math.log(config.window_gamma / (1.0 - config.window_gamma)))
        for weight in (self.q_weight, self.k_weight):
            if weight is not None:
                init.copy_(weight, torch.eye(*weight.shape[1:]))
        for bias in (self.q_bias, self.k_bias):
            if bias is not None:
                init.zeros_(bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> HybridAttention:
        """`.to(dtype)`, `.half()`, ...: the parameters move along but never become half precision."""

        def keep_precision(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return tensor.to(moved.device) if moved.dtype in (torch.float16, torch.bfloat16) else moved

        return super()._apply(keep_precision, recurse)

    @torch.no_grad()
    def without(self, layer: LayerHeads) -> HybridAttention:
        """These parameters for fewer linear heads: those of `layer`."""
        device = self.window_factor.device
        shape = layer.num_heads, layer.num_kv_heads, layer.head_dim
        fewer = HybridAttention(self.config, *shape, exact=layer.exact, device=device)
        among_linear = [place for place, head in enumerate(self.heads.linear) if head in layer.exact]
        kept = HeadSplit(len(self.heads.linear), among_linear)
        for name, parameter in fewer.named_parameters():
            parameter.copy_(kept.take_linear(self.get_parameter(name), 0))
            parameter.requires_grad_(self.get_parameter(name).requires_grad)
        return fewer.train(self.training)

    def params(self, scoring: Scoring = Scoring()) -> HybridParams:
        """As the operator takes them. The layer's own must be in memory, see the class."""
        maps = self.q_weight, self.k_weight, self.q_bias, self.k_bias
        return HybridParams(self.window_factor, *maps, *scoring)

    def has_step_kernel(self, dtype: torch.dtype) -> bool:
        """Whether the kernel for single tokens takes tensors of this type on the parameters' device."""
        heads = self.num_heads, self.num_kv_heads
        device = self.window_factor.device
        q_BH1D, k_BG1D = (torch.empty(1, n, 1, self.head_dim, dtype=dtype, device=device) for n in heads)
        return supports(q_BH1D, k_BG1D, k_BG1D, self.config, self.params(), step=True) is None

    def forward(
        self,
        q_BHTD: Tensor,
        k_BGTD: Tensor,
        v_BGTD: Tensor,
        scoring: Scoring = Scoring(),
        **arguments: Any,
    ) -> tuple[Tensor, HybridState | None]:
        """Hybrid attention of the linear heads; other arguments, and results, as `lolcats.ops.hybrid_attention`."""
        values = v_BGTD.shape[-1]
        wide, params = self._as_wide(v_BGTD), self.params(scoring)
        y_BHTD, state = hybrid_attention(q_BHTD, k_BGTD, wide, self.config, params, **arguments)
        return (y_BHTD if values == self.head_dim else y_BHTD[..., :values]), state

    def output_mse(
        self,
        q_BHTD: Tensor,
        k_BGTD: Tensor,
        v_BGTD: Tensor,
        target_BHTD: Tensor,
        scoring: Scoring = Scoring(),
    ) -> Tensor:
        """Mean squared error of the linear heads against `target_BHTD`, see `lolcats.ops.output_mse`.

        All tensors have all of the layer's heads.
        """
        wide = self._as_wide(v_BGTD), self._as_wide(target_BHTD)
        q, k, v, target = (self.heads.take_linear(x) for x in (q_BHTD, k_BGTD, *wide))
        mse = output_mse(q, k, v, target, self.config, self.params(self.linear_scoring(scoring)))
        return mse if v_BGTD is wide[0] else mse * (self.head_dim / v_BGTD.shape[-1])

    def weights_cross_entropy(
        self, q_BHTD: Tensor, k_BGTD: Tensor, scoring: Scoring = Scoring(), sliding_window: int | None = None
    ) -> Tensor:
        """Cross-entropy between softmax's and the linear heads' weights, see `lolcats.ops.weights_cross_entropy`.

        Queries, keys and sink logits are of all of the layer's heads.
        """
        q, k = self.heads.take_linear(q_BHTD), self.heads.take_linear(k_BGTD)
        params = self.params(self.linear_scoring(scoring))
        return weights_cross_entropy(q, k, self.config, params, sliding_window=sliding_window)

    def _as_wide(self, x_BGTX: Tensor) -> Tensor:
        """Values, or outputs, narrower than keys (MiMo): the operator takes them with zeros up to head_dim."""
        missing = self.head_dim - x_BGTX.shape[-1]
        return x_BGTX if missing == 0 else pad(x_BGTX, (0, missing))

    def linear_scoring(self, scoring: Scoring) -> Scoring:
        """The linear heads' part of the layer's scoring."""
        sinks = scoring.sink_logits
        return scoring._replace(sink_logits=None if sinks is None else self.heads.take_linear(sinks, 0))
