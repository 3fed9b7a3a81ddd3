"""The cache of a linearized layer inside a transformers `Cache`: one fixed-size state instead of keys and values."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
)

from lolcats.modeling.compat import is_placeholder
from lolcats.ops import HybridState

# Keyword under which an attention module hands its cache layer to the attention function.
CACHE_LAYER = "lolcats_cache_layer"


def recurrent_layers(config: PreTrainedConfig) -> list[int]:
    """Indices of a base model's layers without softmax attention: linear attention, convolutions, state spaces, MLPs.

    They stay as they are. transformers keeps their states, if they have any, in cache layers of another kind.
    """
    text_config = config.get_text_config()
    sharing = dict(enumerate(getattr(text_config, "kv_sharing_modes", None) or ()))
    layers = DynamicCache(config=text_config).layers
    return [
        index
        for index, layer in enumerate(layers)
        if not isinstance(layer, CacheLayerMixin) and not (is_placeholder(layer) and sharing.get(index))
    ]


class Held(NamedTuple):
    """Keys and values [B, G, K, D], the new ones last; the others as `softmax_attention` takes them. With `length` or
    `position` the layer's mask does not count."""

    keys: Tensor
    values: Tensor
    length: Tensor | None = None
    position: Tensor | None = None
    in_order: bool = False


class AttentionCacheLayer(CacheLayerMixin):
    """A cache layer to which the attention function adds the new tokens: `update` only hands them through.

    Attributes:
        packs: whether `append` itself packs what is kept in 8 bits.
    """

    packs = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def offload(self) -> None:
        """Nothing to do: what is kept is small, of constant size, and needed right after `update`."""

    def prefetch(self) -> None:
        """Nothing to do, see `offload`."""

    def crop(self, tokens_to_remove: Any) -> None:
        raise ValueError(
            "crop(): linear states cannot forget tokens. Keep a copy.deepcopy() of the cache to return to; call"
            " generate() without prompt_lookup_num_tokens and assistant_model"
        )

    @abstractmethod
    def append(
        self, k_BGTD: Tensor, v_BGTD: Tensor, window: int | None, sinks: int | None, mask: Tensor | None
    ) -> Held:
        """Add keys and values of heads with softmax attention; returns all that the new queries may see.

        Args:
            window, sinks: see `softmax_attention`; beyond them nothing is kept.
            mask: [B, past + T] bool, False for padding; None: there is none.
        """


class HybridCacheLayer(AttentionCacheLayer):
    """Holds the `HybridState` of a layer's linear heads, and keys and values of its exact ones.

    The attention function folds new keys and values into the state and then calls `advance`. Padding counts as tokens
    here, as in other cache layers; not in the state.

    Args:
        is_sliding: what the replaced layer said; transformers looks up masks by it.
        is_compileable: whether it was the layer of a static cache, for which `generate` compiles decoding.

    Attributes:
        exact: the exact heads' cache layer; None: there are none, or no tokens yet.
    """

    def __init__(self, is_sliding: bool = False, is_compileable: bool = False) -> None:
        super().__init__()
        self.is_sliding = is_sliding
        self.is_compileable = is_compileable
        self.state: HybridState | None = None
        self.exact: Any = None
        self.tokens = 0

    def __copy__(self) -> HybridCacheLayer:
        return copy.deepcopy(self)  # steps write into the state

    def advance(self, state: HybridState | None, tokens: int) -> None:
        """Take the state after `tokens` more tokens."""
        self.state, self.is_initialized = state, True
        self.tokens += tokens

    def append(
        self, k_BGTD: Tensor, v_BGTD: Tensor, window: int | None, sinks: int | None, mask: Tensor | None
    ) -> Held:
        if self.exact is None:
            self.exact = growing_layer(window) if sinks is None else BoundedLayer()
        if isinstance(self.exact, BoundedLayer):
            return self.exact.append(k_BGTD, v_BGTD, window, sinks, mask)
        return Held(*self.exact.update(k_BGTD, v_BGTD))

    def get_seq_length(self) -> int:
        return self.tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.tokens + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.state, self.exact, self.tokens, self.is_initialized = None, None, 0, False

    def _change_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.state is not None:
            self.state = self.state.map(change)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._change_rows(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))
        if self.exact is not None:
            self.exact.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change_rows(lambda tensor: tensor.repeat_interleave(repeats, 0))
        if self.exact is not None:
            self.exact.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._change_rows(lambda tensor: tensor[indices.to(tensor.device)])
        if self.exact is not None:
            self.exact.batch_select_indices(indices)


class BoundedLayer(AttentionCacheLayer):
    """Keys and values of exact heads, with a window those of the last tokens and of the first.

    Attributes:
        keys, values: [B, G, K, D], in the order of their tokens.
        position: [B, K] int, where each stands in its sequence, negative where there is none; None: no row had padding.
        window, sinks: what is kept; without a window all.
    """

    def __init__(self, is_compileable: bool = False) -> None:
        super().__init__()
        self.is_sliding = False
        self.is_compileable = is_compileable
        self.reset()

    def reset(self) -> None:
        self.keys: Any = None
        self.values: Any = None
        self.position: Any = None
        self.window: int | None = 0
        self.sinks = 0
        self.length: Any = 0  # tokens without padding; [B, 1], if any row had padding
        self.tokens, self.is_initialized = 0, False

    def append(
        self, k_BGTD: Tensor, v_BGTD: Tensor, window: int | None, sinks: int | None, mask: Tensor | None
    ) -> Held:
        self.window, self.sinks = window, sinks or 0
        tokens, room = k_BGTD.shape[2], None if window is None else window + self.sinks
        position = self._positions(tokens, mask, k_BGTD.device)
        keys, values = k_BGTD, v_BGTD
        if self.keys is not None:
            keys, values = torch.cat([self.keys, keys], dim=2), torch.cat([self.values, values], dim=2)
        self.tokens, self.is_initialized = self.tokens + tokens, True
        found = stays = keys, values, position
        if room is not None and keys.shape[2] > room:
            stays = self._latest_and_first(keys, values, position, room)
        self.keys, self.values, self.position = stays
        keys, values, position = stays if tokens == 1 else found  # one token sees all that stays
        in_order = position is None
        if in_order and keys.shape[2] < self.tokens and tokens > 1:
            position = self._places(keys.shape[2], keys.device)
        return Held(keys, values, position=position, in_order=in_order)

    def _positions(self, tokens: int, mask: Tensor | None, device: torch.device) -> Tensor | None:
        """[B, K] of all tokens, the new ones counted; None: no row had padding."""
        if mask is None and not isinstance(self.length, Tensor):
            self.length += tokens
            return None
        if mask is not None and mask.dim() != 2:
            raise ValueError(
                "exact_window cannot be told apart in masks of one's own with 4 dimensions; set it to null"
            )
        old = self.position
        if old is None:
            old = self._places(0 if self.keys is None else self.keys.shape[2], device)
        if mask is None:
            position = self.length + torch.arange(tokens, device=device)
            self.length = self.length + tokens
        else:
            real_BT = mask[:, -tokens:].bool()
            count_BT = real_BT.cumsum(1)
            position = torch.where(real_BT, self.length + count_BT - 1, -1)
            self.length = self.length + count_BT[:, -1:]
        return torch.cat([old.expand(len(position), -1), position], dim=1)

    def _places(self, count: int, device: torch.device) -> Tensor:
        """[1, count], where the first and the latest of `length` tokens stand, of which `count` are here."""
        place_K = torch.arange(count, device=device)
        return torch.where(place_K < self.sinks, place_K, place_K + (self.length - count))[None]

    def _latest_and_first(
        self, keys: Tensor, values: Tensor, position: Tensor | None, room: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """What later tokens can see, `room` tokens."""
        assert self.window is not None
        if position is None:
            first, last = slice(self.sinks), slice(-self.window, None)
            keys, values = (torch.cat([x[:, :, first], x[:, :, last]], dim=2) for x in (keys, values))
            return keys, values, None
        oldest = self.length - self.window
        stays_BK = (position >= 0) & ((position < self.sinks) | (position >= oldest))
        index_BK = stays_BK.long().argsort(dim=1, descending=True, stable=True)[:, :room].sort(1).values
        position = torch.where(stays_BK, position, -1).gather(1, index_BK)
        index = index_BK[:, None, :, None]
        return keys.take_along_dim(index, 2), values.take_along_dim(index, 2), position

    def get_seq_length(self) -> int:
        return self.tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.tokens + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def _change_rows(self, function: Callable[[Tensor], Tensor]) -> None:
        if self.keys is None:
            return
        self.keys, self.values = function(self.keys), function(self.values)
        if isinstance(self.length, Tensor):
            self.length, self.position = function(self.length), function(self.position)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._change_rows(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change_rows(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._change_rows(lambda x: x[indices.to(x.device)])


class PreallocatedLayer(StaticLayer):
    """A softmax layer in a static cache: the buffers of transformers' layer, of which `update` returns the filled part.

    So attention sees the same keys as with a growing layer, and tokens beyond the end raise. Not traced by
    torch.compile, as the length grows.
    """

    def __init__(self, max_cache_len: int) -> None:
        super().__init__(max_cache_len)
        self.tokens = 0

    @torch.compiler.disable
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        tokens = self.tokens + key_states.shape[-2]
        if tokens > self.max_cache_len:
            raise ValueError(f"the static cache holds {self.max_cache_len} tokens, got {tokens}; raise max_cache_len")
        keys, values = super().update(key_states, value_states)
        self.tokens = tokens
        return keys[:, :, :tokens], values[:, :, :tokens]

    def get_seq_length(self) -> int:
        return self.tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.tokens + query_length, 0

    def reset(self) -> None:
        super().reset()
        self.tokens = 0


class BoundedSlidingLayer(DynamicSlidingWindowLayer):
    """A softmax layer with a native window in a static cache: never longer than the window. Not traced either."""

    is_compileable = True

    @torch.compiler.disable
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return super().update(key_states, value_states)


def growing_layer(sliding_window: Any) -> DynamicLayer:
    """For keys and values, as many as there are or as the window takes."""
    return DynamicLayer() if sliding_window is None else DynamicSlidingWindowLayer(sliding_window)
