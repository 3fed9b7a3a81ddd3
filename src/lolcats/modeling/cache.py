"""The layers of a transformers `Cache` for linearized models: preallocated rows, one for each sequence.

generate() uses all rows of a cache, which has as many as its batch. The engine allocates rows once, at fixed addresses,
and uses some in each pass (`Rows`).
"""

from __future__ import annotations

import copy
import inspect
from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, cache_utils
from transformers.cache_utils import CacheLayerMixin, DynamicCache

from lolcats.modeling.softmax import Visible, upload
from lolcats.ops import HybridState
from lolcats.ops.eight_bits import is_packed, pack
from lolcats.ops.hybrid_attention.api import has_kernel, supports_store_tokens

UNBOUNDED = 1 << 40  # tokens of a window that sees everything
LEAST_PLACES = 32

# What the supported releases of transformers call differently is told by what they have rather than by their number.
# Keyword under which models take their cache and return it: "cache", until 5.23 "past_key_values".
_KEYWORDS = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE = "cache" if "cache" in _KEYWORDS else "past_key_values"

# All names under which modules have taken it; GPT-NeoX's layers say layer_past.
CACHE_NAMES = (CACHE, "past_key_values", "layer_past")

# What stands in a cache for a layer that keeps nothing: one with another layer's keys, or without attention. Until 5.22
# there was none.
PLACEHOLDER: Any = getattr(cache_utils, "DummyLayer", ())


def given_cache(arguments: Mapping[str, Any]) -> Any:
    """The cache among a module's keyword arguments, under whichever name."""
    found = (arguments.get(name) for name in CACHE_NAMES)
    return next((cache for cache in found if cache is not None), None)


def shares_keys(module: nn.Module) -> bool:
    """Whether an attention module attends over the keys and values of an earlier layer (Gemma 3n and 4)."""
    return bool(getattr(module, "is_kv_shared_layer", False))


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
        if not isinstance(layer, CacheLayerMixin) and not (isinstance(layer, PLACEHOLDER) and sharing.get(index))
    ]


def longrope_border(config: PreTrainedConfig) -> int | None:
    """The position from which a batch that reaches it is rotated by other factors; None: there is none."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    kinds = [kind for kind in (rope, *rope.values()) if isinstance(kind, dict) and kind.get("rope_type") == "longrope"]
    borders = [kind.get("original_max_position_embeddings") for kind in kinds]
    return min((border for border in borders if border), default=None)


@dataclass(frozen=True)
class Rows:
    """The sequences of a pass, and the rows of a cache to which their tokens are added.

    Without `cu_seqlens` each row of the batch is a sequence, of as many tokens as the others; with them the tokens are
    one packed row.

    Attributes:
        past, end: tokens that the longest row holds before and after, padding included, or more.
        past_B: int64, tokens that each row held before, without padding; negative: it does not exist. None: all held
            `past`.
        row_B: int64, the cache's row of each sequence; None: all, in their order.
        adjacent: these rows as a slice, if nothing is packed; None: they are not adjacent.
        fresh: no row has held a token.
        cu_seqlens: int32 [sequences + 1], borders in a row of N tokens, from 0; padding may follow.
        host: on the host `cu_seqlens`, and (row, tokens) of each sequence before the pass; None: it does not know them,
            and there is one sequence, which is fresh.
        shared: what layers computed from these numbers, for others like them.
    """

    past: int
    end: int
    past_B: Tensor | None = None
    row_B: Tensor | None = None
    adjacent: slice | None = field(default_factory=lambda: slice(None))
    fresh: bool = False
    cu_seqlens: Tensor | None = None
    host: tuple[list[int], list[tuple[int, int]]] | None = None
    shared: dict[Hashable, Any] = field(default_factory=dict, init=False)

    @classmethod
    def packed(cls, held: list[tuple[int, int]], count: list[int], past: int, end: int, device: torch.device) -> Rows:
        """Of sequences that get `count` tokens more."""
        borders, (row_B, past_B) = [0, *accumulate(count)], upload(held, device).T
        fresh, cu_seqlens = not any(past for _, past in held), upload(borders, device, torch.int32)
        return cls(past, end, past_B, row_B, None, fresh, cu_seqlens, (borders, held))

    @property
    def step(self) -> bool:
        """Whether there is one token a row; states are written while layers run."""
        return self.cu_seqlens is None and self.end - self.past == 1

    def on(self, batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """`past_B` and `row_B` of `batch` rows, on a device."""
        if device not in self.shared:
            past_B = torch.full((batch,), self.past, device=device) if self.past_B is None else self.past_B
            row_B = torch.arange(len(past_B), device=device) if self.row_B is None else self.row_B
            self.shared[device] = past_B.to(device), row_B.to(device)
        return self.shared[device]


class AttentionCacheLayer(CacheLayerMixin):
    """A cache layer to which the attention function adds the new tokens: `update` only hands them through.

    Args:
        is_sliding: what the replaced layer said; transformers looks up masks by it.

    Attributes:
        tokens: of a row so far, padding included.
        is_allocated: rows and memory have their final number and size, and are some sequences' own (`Rows`).
    """

    is_allocated = False

    def __init__(self, is_sliding: bool = False) -> None:
        super().__init__()
        self.is_sliding = is_sliding
        self.reset()

    def __copy__(self) -> Any:
        return copy.deepcopy(self)  # passes write into its memory

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def offload(self) -> None:
        """Nothing to do: what is kept is small and needed right after `update`."""

    def prefetch(self) -> None:
        """Nothing to do, see `offload`."""

    def crop(self, tokens_to_remove: Any) -> None:
        raise ValueError(
            "crop(): linear states cannot forget tokens. Keep a copy.deepcopy() of the cache to return to; call"
            " generate() without prompt_lookup_num_tokens and assistant_model"
        )

    def reset(self) -> None:
        self.tokens, self.is_initialized = 0, False

    def get_seq_length(self) -> int:
        return self.tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.tokens + query_length, 0

    def get_max_length(self) -> int:
        return -1

    @abstractmethod
    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor [rows, ...] by what `change` makes of it."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.map_rows(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.map_rows(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.map_rows(lambda x: x[indices.to(x.device)])


def place_of(position: Tensor, window: int, sinks: int) -> Tensor:
    """Where the token at a position is: the first `sinks` stay, later ones follow each other in a ring of `window`."""
    return torch.where(position < sinks, position, sinks + (position - sinks) % window)


def held_places(length: int, window: int, sinks: int, device: torch.device) -> Tensor:
    """[P], where the tokens are that are held after `length` tokens, oldest first."""
    position_L = torch.arange(length)
    return place_of(position_L[(position_L < sinks) | (position_L >= length - window)], window, sinks).to(device)


class ExactCacheLayer(AttentionCacheLayer):
    """Keys and values of heads with softmax attention, which may be packed into 8 bits.

    The first `sinks` tokens of a row stay in their places, the later ones follow each other in a ring of `window`
    places: softmax needs no order. Memory grows with the tokens until it holds these, unless it was allocated.

    Attributes:
        keys, values: [rows, G, places + 1, D]; the last place takes padding.
    """

    def reset(self) -> None:
        super().reset()
        self.keys: Any = None
        self.values: Any = None
        self.window, self.sinks = UNBOUNDED, 0
        self._in_graph = False  # whether autograd may need what is in the memory

    @property
    def places(self) -> int:
        return 0 if self.keys is None else self.keys.shape[2] - 1

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.keys is not None:
            self.keys, self.values = change(self.keys), change(self.values)

    def allocate(self, rows: int, places: int | None) -> None:
        """Empty rows like those that are there, for `places` tokens and no more than the window and the sinks need."""
        bound = self.window + self.sinks
        size = bound if places is None else min(places, bound)
        if size == UNBOUNDED:
            raise ValueError("heads with softmax attention over all tokens need a max_length; got None")
        self.map_rows(lambda x: x.new_zeros(rows, x.shape[1], size + 1, x.shape[3]))
        self.is_allocated = True

    def reserve(self, tokens: int) -> None:
        """Memory for at least `tokens` tokens a row, or as many as the window and the sinks need."""
        self._reserve([self.keys, self.values], len(self.keys), min(tokens, self.window + self.sinks))

    def append(
        self, k_BGTD: Tensor, v_BGTD: Tensor, rows: Rows, visible: Visible, packed: bool
    ) -> tuple[Tensor, Tensor, Visible]:
        """Add the tokens of a pass.

        Args:
            visible: the window and the sinks; beyond them nothing is kept.
            packed: keep 8 bits; the first tokens of a cache decide.

        Returns:
            Keys and values that the new queries may see, and which these see: of one token a row, and of even rows that
            all places hold, these are the layer's own memory; else copies of what rows held, followed by the new
            tokens.
        """
        bounds = visible.sliding_window or UNBOUNDED, visible.sinks
        if self.keys is None:
            self.window, self.sinks = bounds
        elif bounds != (self.window, self.sinks) and not self.is_allocated:
            raise ValueError(f"the cache has {self.tokens} tokens of another exact_window; start with an empty cache")
        tokens, end = k_BGTD.shape[2], rows.end
        packed = packed if self.keys is None else is_packed(self.keys)
        new = [k_BGTD, v_BGTD]
        if packed and (tokens > 1 or self.keys is None):
            new = [pack(x) for x in new]
        past_B, row_B = rows.on(len(k_BGTD), k_BGTD.device)
        self._reserve(new, len(past_B), min(end, self.window + self.sinks))
        self.tokens, self.is_initialized = end, True
        adjacent, memory = rows.adjacent, (self.keys, self.values)
        key = self.keys.device, self.places, self.window, self.sinks

        # A CPU has no kernel that reads lengths.
        even = rows.past_B is None and rows.cu_seqlens is None
        if tokens == 1 and rows.cu_seqlens is None and (self.is_allocated or self.keys.is_cuda or not even):
            if key not in rows.shared:  # its place, and how many places have a token then
                place_B = place_of(past_B, self.window, self.sinks)
                place_B = torch.where(past_B < 0, self.places, place_B)
                rows.shared[key] = place_B, (past_B + 1).clamp(1, self.places)
            place_B, length_B = rows.shared[key]
            self._store(new, row_B, place_B)
            keys, values = (x[row_B if adjacent is None else adjacent, :, : min(end, self.places)] for x in memory)
            return keys, values, visible._replace(length=length_B)

        new = [pack(x) if packed and not is_packed(x) else x.to(self.keys.dtype) for x in new]
        if even and end <= self.places:
            for x, new_BGTD in zip(memory, new, strict=True):
                x[adjacent, :, rows.past : end] = new_BGTD
            keys, values = (x[adjacent, :, :end] for x in memory)
            return keys, values, visible

        if key not in rows.shared:
            rows.shared[key] = *self._held_by(rows), self._targets(past_B, row_B, rows.cu_seqlens, len(k_BGTD) * tokens)
        parts, borders, (row_N, place_N) = rows.shared[key]
        found = list(new)
        for i, (x, new_BGTD) in enumerate(zip(memory, new, strict=True)):
            if parts:
                both = [(x[row][:, :, place_P], new_BGTD[:, :, part]) for row, place_P, part in parts]
                found[i] = torch.cat([*chain(*both)], dim=2)
            x[row_N, :, place_N] = new_BGTD.transpose(1, 2).flatten(0, 1)
        return found[0], found[1], visible._replace(**borders)

    def _held_by(self, rows: Rows) -> tuple[list[tuple[slice, Tensor, slice]], dict[str, Any]]:
        """Of rows: their places, oldest first, and the part of the new tokens that follows them; and all borders."""
        bounds = self.window, self.sinks, self.keys.device
        if rows.host is None:
            return [(rows.adjacent or slice(None), held_places(rows.past, *bounds), slice(None))][: rows.past], {}
        if rows.fresh:
            return [], {"cu_seqlens": rows.host[0]}
        parts, (borders, held) = [], rows.host
        for (row, past), begin, end in zip(held, borders, borders[1:], strict=False):
            parts.append((slice(row, row + 1), held_places(past, *bounds), slice(begin, end)))
        counts = [len(place_P) + part.stop - part.start for _, place_P, part in parts]
        return parts, {"cu_seqlens": borders, "key_borders": [0, *accumulate(counts)]}

    def _targets(self, past_B: Tensor, row_B: Tensor, borders: Tensor | None, count: int) -> tuple[Tensor, Tensor]:
        """[N] each: the row and the place of each new token; the last place, if a later one takes its own."""
        index_N = torch.arange(count, device=past_B.device)
        even = torch.arange(len(past_B) + 1, device=past_B.device) * (count // len(past_B))
        borders = even if borders is None else borders.to(index_N)
        sequence_N = torch.searchsorted(borders[1:], index_N, right=True).clamp(max=len(past_B) - 1)
        position_N = past_B[sequence_N] + index_N - borders[sequence_N]
        end_N = (past_B + borders.diff())[sequence_N]
        stays_N = (position_N < end_N) & ((position_N < self.sinks) | (position_N >= end_N - self.window))
        place_N = torch.where(stays_N, place_of(position_N, self.window, self.sinks), self.places)
        return row_B[sequence_N], place_N

    def _reserve(self, new: list[Tensor], rows: int, places: int) -> None:
        """Memory for `places` tokens of each of `rows`, which this pass may change."""
        if self.is_allocated:
            return
        used, in_graph = self.places, self._in_graph or torch.is_grad_enabled()
        self._in_graph = torch.is_grad_enabled()
        from_inference = self.keys is not None and self.keys.is_inference()
        if used >= places and not in_graph and (torch.is_inference_mode_enabled() or not from_inference):
            return
        if used < places:
            places = max(places, min(max(used * 5 // 4, LEAST_PLACES), self.window + self.sinks))
        memory = []
        for old, x in zip((self.keys, self.values), new, strict=True):
            kind = x if old is None else old
            larger = kind.new_zeros(rows, kind.shape[1], max(places, used) + 1, kind.shape[3])
            if old is not None:
                larger[:, :, :used] = old[:, :, :used]
            memory.append(larger)
        self.keys, self.values = memory

    def _store(self, new: list[Tensor], row_B: Tensor, place_B: Tensor) -> None:
        """Write one token a row."""
        k_BG1D, v_BG1D = new
        takes = partial(supports_store_tokens, k_BG1D, v_BG1D, self.keys, self.values)
        if not is_packed(k_BG1D) and has_kernel("auto", k_BG1D, takes):
            from lolcats.ops.hybrid_attention.kernels.store_tokens import store_tokens  # imports Triton

            store_tokens(k_BG1D, v_BG1D, self.keys, self.values, row_B, place_B)
            return
        for x, new_BG1D in zip((self.keys, self.values), new, strict=True):
            new_BG1D = pack(new_BG1D) if is_packed(x) and not is_packed(new_BG1D) else new_BG1D.to(x.dtype)
            x[row_B, :, place_B] = new_BG1D.squeeze(2)

    # --- what the engine reads and writes of a row ------------------------------------------------------------

    @property
    def buffers(self) -> dict[str, Tensor]:
        return {"keys": self.keys, "values": self.values}

    def held(self, row: int, length: int) -> tuple[Any, ...]:
        """The index, in each buffer, of what a row holds after `length` tokens, oldest first."""
        return row, slice(None), held_places(length, self.window, self.sinks, self.keys.device)


class HybridCacheLayer(AttentionCacheLayer):
    """The `HybridState` of a layer's linear heads, and keys and values of its exact ones.

    The attention function takes the state of a pass's rows and gives back the one after it. Padding counts as tokens
    here, as in other cache layers; not in the state.

    Attributes:
        state: of all rows; None: no tokens yet.
        exact: the exact heads' cache layer, empty if there are none.
    """

    def reset(self) -> None:
        super().reset()
        self.state: HybridState | None = None
        self.exact = ExactCacheLayer()
        self._made: HybridState | None = None  # the state after a pass over slots, until it is put into them

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.state is not None:
            self.state = self.state.map(change)
        self.exact.map_rows(change)

    def allocate(self, rows: int) -> None:
        """Empty rows like those that are there."""
        assert self.state is not None
        self.state, self.is_allocated = self.state.map(lambda x: x.new_zeros(rows, *x.shape[1:])), True

    def take(self, rows: Rows) -> HybridState | None:
        """The state of a pass's rows: views if they are adjacent, else copies; None: they are fresh."""
        if rows.fresh or self.state is None:
            return None
        if not self.is_allocated:
            return self.state
        used: Any = rows.adjacent
        if used is None:
            assert rows.row_B is not None
            used = rows.row_B.to(self.state.S.device)
        state = self.state.map(lambda x: x[used])
        if not rows.step:
            state = state._replace(position=rows.on(len(state.position), state.position.device)[0].clone())
        return state

    def advance(self, state: HybridState | None, rows: Rows) -> None:
        """Take the state of a pass's rows after it."""
        self.tokens, self.is_initialized = rows.end, True
        if self.is_allocated:
            self._made = state
        else:
            self.state = state

    # --- what the engine reads and writes of a row ------------------------------------------------------------

    @property
    def buffers(self) -> dict[str, Tensor]:
        assert self.state is not None
        return {name: x for name, x in self.state._asdict().items() if name != "position"}

    def made(self) -> dict[str, Tensor]:
        """The new contents of a pass's rows in each buffer."""
        assert self.state is not None
        assert self._made is not None
        made, self._made = self._made, None
        return {name: getattr(made, name) for name in self.buffers}

    def held(self, row: int, length: int) -> tuple[Any, ...]:
        return (row,)
