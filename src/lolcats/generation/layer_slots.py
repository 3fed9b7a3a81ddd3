"""What layers of each kind keep for all slots: buffers with a row for each, which forward passes read and write."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from lolcats.modeling.cache import AttentionCacheLayer, Held, HybridCacheLayer
from lolcats.ops import HybridState
from lolcats.ops.eight_bits import pack
from lolcats.ops.hybrid_attention.kernels.support import HAS_TRITON
from lolcats.ops.hybrid_attention.planes import in_planes, join_sums, split_sums
from lolcats.ops.packing import Packing


@dataclass(frozen=True)
class ForwardPass:
    """Which tokens a forward pass feeds to which slots.

    Attributes:
        slot_B: int64 slot of each row of the batch.
        past_B: int64 tokens that the slot held before.
        new_B: int64 new tokens of the row; the rest of its columns is padding on the right. Of one column, rows without
            a new token keep what their slots hold.
        past: columns for past tokens, at least the largest of `past_B`.
        fresh: no row has past tokens.
        packing: of rows of several tokens that may end in padding.
        adjacent: the slots as a slice, if they are adjacent; None: see `slot_B`.
        even: all rows held `past` tokens before and get as many new ones, without padding.
        step: one column; states are written while layers run, which then have no tensor in common.
        shared: what layers computed from these numbers, for others like them.
    """

    slot_B: Tensor
    past_B: Tensor
    new_B: Tensor
    past: int
    fresh: bool = False
    packing: Packing | None = None
    adjacent: slice | None = None
    even: bool = False
    step: bool = False
    shared: dict[Hashable, Any] = field(default_factory=dict)


class LayerSlots(ABC):
    """Buffers of one layer, named as in its cache, with a row for each slot: what all kinds of layers share.

    Attributes:
        buffers: [slots, ...] each.
        current: the forward pass, between `begin` and `commit`.
    """

    buffers: dict[str, Tensor]
    current: ForwardPass | None = None

    @abstractmethod
    def begin(self, current: ForwardPass) -> None:
        """Make ready for a pass."""

    @abstractmethod
    def commit(self) -> list[tuple[Tensor, Tensor]]:
        """Put what the pass made into its slots; (slots, states) that are still to be copied."""

    def held(self, slot: int, length: int) -> tuple[Any, ...]:
        """The index, in each buffer, of what a slot holds after `length` tokens."""
        return (slot,)

    def move(self, source: int, target: int) -> None:
        for buffer in self.buffers.values():
            buffer[target].copy_(buffer[source])

    def read(self, slot: int, length: int) -> dict[str, Tensor]:
        """Copies of all that later tokens can see; keys and values oldest first."""
        return {name: buffer[self.held(slot, length)].clone() for name, buffer in self.buffers.items()}

    def write(self, slot: int, length: int, tensors: dict[str, Tensor]) -> None:
        """The reverse of `read`; ValueError unless types and shapes are the same."""
        place = self.held(slot, length)
        for name, buffer in self.buffers.items():
            new, old = tensors[name], buffer[place]
            if (new.dtype, new.shape) != (old.dtype, old.shape):  # a smaller one would be broadcast
                expected = f"expected {old.dtype} {list(old.shape)}"
                raise ValueError(f"{name}: {expected}, got {new.dtype} {list(new.shape)}")
            buffer[place] = new.to(buffer.device)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers.values())

    def _store(self, tensors: dict[str, Tensor], current: ForwardPass) -> list[tuple[Tensor, Tensor]]:
        """Put `tensors` [B, ...] into the slots of a pass; pairs as `commit` gives."""
        pairs = [(self.buffers[name], new) for name, new in tensors.items() if new.numel()]
        if current.adjacent is not None:
            return [(stored[current.adjacent], new) for stored, new in pairs]
        for stored, new in pairs:
            stored.index_copy_(0, current.slot_B.to(stored.device), new)
        return []


class HybridSlots(LayerSlots, HybridCacheLayer):
    """The states of one layer's linear heads for all slots, and where its exact heads keep theirs.

    Args:
        slots: number of sequences.
        like: a state of this layer, for shapes, types and device.
        exact: slots of the exact heads, which `SlotCache` treats as a layer of their own.
    """

    packs = True
    store: HybridState

    def __init__(self, slots: int, like: HybridState, is_sliding: bool, exact: SoftmaxSlots | None) -> None:
        super().__init__(is_sliding)
        self.exact = exact
        self.store = like.map(lambda tensor: tensor.new_zeros(slots, *tensor.shape[1:]))
        self.buffers = {name: tensor for name, tensor in self.store.tensors().items() if name != "position"}
        self.is_initialized = True

    def append(
        self, k_BGTD: Tensor, v_BGTD: Tensor, window: int | None, sinks: int | None, mask: Tensor | None
    ) -> Held:
        assert self.exact is not None
        return self.exact.append(k_BGTD, v_BGTD, window, sinks, mask)

    def begin(self, current: ForwardPass) -> None:
        """Bind `state` to the slots of a pass: views if they are adjacent, else copies; none if they are `fresh`."""
        self.tokens, self.current, self.state = current.past, current, None
        if current.fresh:
            return
        slots = current.adjacent
        self.state = (
            self.store.select(current.slot_B) if slots is None else self.store.map(lambda tensor: tensor[slots])
        )
        if not current.step:
            # One tensor in all layers: what follows from it is computed once (`ops.hybrid_attention.remember`).
            self.state.position = current.past_B.to(self.state.position.device)

    def commit(self) -> list[tuple[Tensor, Tensor]]:
        assert self.state is not None
        assert self.current is not None
        state, current, self.state, self.current = self.state, self.current, None, None
        tensors = state.stored_as(self.store.S).tensors()
        return self._store({name: tensors[name] for name in self.buffers}, current)

    def read(self, slot: int, length: int) -> dict[str, Tensor]:
        """Whatever the form in which steps on this device keep S, here it is float32."""
        tensors = super().read(slot, length)
        return tensors | {"S": join_sums(tensors["S"])}

    def write(self, slot: int, length: int, tensors: dict[str, Tensor]) -> None:
        S = tensors["S"]
        super().write(slot, length, tensors | {"S": split_sums(S) if in_planes(self.store.S) else S})


class SoftmaxSlots(LayerSlots, AttentionCacheLayer):
    """Keys and values [slots, G, C + 1, D] of softmax heads; place C takes padding.

    The first `sinks` tokens stay in their places, the later ones follow each other in a ring of the others: softmax
    needs no order.

    Args:
        capacity: C, the most tokens that are kept.
        sinks: the first tokens of a sequence.
        like_BGTD: keys and values of this layer, for their shapes, types and device.
    """

    is_compileable = False
    packs = True

    def __init__(
        self,
        slots: int,
        capacity: int,
        sinks: int,
        like_BGTD: tuple[Tensor, Tensor],
        is_sliding: bool = False,
    ) -> None:
        super().__init__()
        self.is_sliding = is_sliding
        self.capacity, self.sinks = capacity, min(sinks, capacity - 1)
        self.ring = capacity - self.sinks
        self.buffers = {
            name: like.new_zeros(slots, like.shape[1], self.capacity + 1, like.shape[3])
            for name, like in zip(("keys", "values"), like_BGTD, strict=True)
        }
        self.device = like_BGTD[0].device
        self.is_initialized = True

    def begin(self, current: ForwardPass) -> None:
        slot_B, past_B, new_B = (x.to(self.device) for x in (current.slot_B, current.past_B, current.new_B))
        how: dict[str, Any] = {"adjacent": current.adjacent, "even": current.even, "shared": current.shared}
        self.current = ForwardPass(slot_B, past_B, new_B, current.past, **how)

    def append(
        self, k_BGTD: Tensor, v_BGTD: Tensor, window: int | None, sinks: int | None, mask: Tensor | None
    ) -> Held:
        """Store the new tokens. Of one token a row, and of even rows, adjacent slots return their own memory; else
        copies of what rows held are followed by the new tokens, with the positions of both."""
        if self.current is None:
            raise RuntimeError("begin a pass of the SlotCache first")
        current, tokens = self.current, k_BGTD.shape[2]
        rows = current.slot_B if current.adjacent is None else current.adjacent
        if tokens == 1:
            key = self.device, self.capacity, self.sinks
            if key not in current.shared:
                current.shared[key] = self._step_places(current)
            place_B, length_B = current.shared[key]
            self._store_at(k_BGTD, v_BGTD, current.slot_B, place_B)
            places = min(current.past + 1, self.capacity)
            keys, values = (buffer[rows, :, :places] for buffer in self.buffers.values())
            return Held(keys, values, length_B)

        k_BGTD, v_BGTD = self._as_kept(k_BGTD), self._as_kept(v_BGTD)
        end = current.past + tokens
        if current.even and current.adjacent is not None and end <= self.capacity:
            for buffer, new_BGTD in zip(self.buffers.values(), (k_BGTD, v_BGTD), strict=True):
                buffer[current.adjacent, :, current.past : end] = new_BGTD
            keys, values = (buffer[current.adjacent, :, :end] for buffer in self.buffers.values())
            return Held(keys, values)

        past_B1, new_B1 = current.past_B[:, None], current.new_B[:, None]
        column_T = torch.arange(tokens, device=self.device)
        new_BT = past_B1 + column_T
        is_new_BT = column_T < new_B1
        stays_BT = is_new_BT & ((new_BT < self.sinks) | (column_T >= new_B1 - self.ring))
        place_BT = torch.where(stays_BT, self._place(new_BT), self.capacity)
        places = min(current.past, self.capacity)
        position, order = None, torch.arange(places, device=self.device)
        if places > 0:
            held_BP = self._held_positions(past_B1, places)
            if current.even:
                order = held_BP[0].argsort()
                held_BP = held_BP[:, order]
            position = torch.cat([held_BP, torch.where(is_new_BT, new_BT, -1)], dim=1)
        outputs = []
        for buffer, new_BGTD in zip(self.buffers.values(), (k_BGTD, v_BGTD), strict=True):
            outputs.append(torch.cat([buffer[rows][:, :, order], new_BGTD], dim=2))  # before writing
            buffer[current.slot_B[:, None], :, place_BT] = new_BGTD.transpose(1, 2)
        return Held(outputs[0], outputs[1], position=position, in_order=current.even)

    def _as_kept(self, x_BGTD: Tensor) -> Tensor:
        return pack(x_BGTD) if self.buffers["keys"].dtype == torch.int8 else x_BGTD.to(self.buffers["keys"].dtype)

    def _store_at(self, k_BG1D: Tensor, v_BG1D: Tensor, slot_B: Tensor, place_B: Tensor) -> None:
        keys, values = self.buffers["keys"], self.buffers["values"]
        if HAS_TRITON and k_BG1D.is_cuda:
            from lolcats.ops.store_tokens_kernel import store_tokens, takes_tokens  # imports Triton

            if takes_tokens(k_BG1D, v_BG1D, keys, values):
                store_tokens(k_BG1D, v_BG1D, keys, values, slot_B, place_B)
                return
        for buffer, new_BG1D in ((keys, k_BG1D), (values, v_BG1D)):
            buffer[slot_B, :, place_B] = self._as_kept(new_BG1D).squeeze(2)

    def _step_places(self, current: ForwardPass) -> tuple[Tensor, Tensor]:
        """Of one new token a row: its place [B]; how many places have a token then [B]."""
        place_B = torch.where(current.new_B > 0, self._place(current.past_B), self.capacity)
        return place_B, (current.past_B + 1).clamp(max=self.capacity)

    def _place(self, position: Tensor) -> Tensor:
        """Where the token at a position lies."""
        return torch.where(position < self.sinks, position, self.sinks + (position - self.sinks) % self.ring)

    def _held_positions(self, length_B1: Tensor, places: int) -> Tensor:
        """[B, places], the inverse of `_place`: the position of the token in each place; -1: none."""
        place_P, last_B1 = torch.arange(places, device=self.device), length_B1 - 1
        latest_BP = last_B1 - (last_B1 - place_P) % self.ring
        position_BP = torch.where(place_P < self.sinks, place_P, latest_BP)
        exists_BP = torch.where(place_P < self.sinks, place_P < length_B1, latest_BP >= self.sinks)
        return torch.where(exists_BP, position_BP, -1)

    def commit(self) -> list[tuple[Tensor, Tensor]]:
        """Nothing is left to copy: `append` wrote into the buffers."""
        self.current = None
        return []

    def held(self, slot: int, length: int) -> tuple[Any, ...]:
        kept = [*range(min(self.sinks, length)), *range(max(self.sinks, length - self.ring), length)]
        return slot, slice(None), self._place(torch.tensor(kept, dtype=torch.int64, device=self.device))

    def get_seq_length(self) -> int:
        return 0 if self.current is None else self.current.past

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return self.capacity


class RecurrentSlots(LayerSlots, LinearAttentionLayer):
    """The states of a layer without attention, which the base model's own code reads and writes.

    A pass works on copies. The code takes padding on the right for tokens: the rows of a pass have equally
    many tokens, or none.

    Args:
        slots: number of sequences.
        like: the cache layer of one sequence, for shapes, types and device.
    """

    def __init__(self, slots: int, like: LinearAttentionLayer) -> None:
        super().__init__(like.number_of_states)
        self.device, self.dtype, self.conv_kernel_size = like.device, like.dtype, like.conv_kernel_size
        self.is_conv_states_initialized = like.is_conv_states_initialized
        self.is_recurrent_states_initialized = like.is_recurrent_states_initialized
        # an empty slot's states are zero, from which the base model starts too
        self.has_previous_state = dict.fromkeys(like.has_previous_state, True)
        self.buffers, self._places = {}, {}
        for kind in ("conv_states", "recurrent_states"):
            for index, tensor in getattr(like, kind).items():
                if tensor is not None:
                    self.buffers[f"{kind}.{index}"] = tensor.new_zeros(slots, *tensor.shape[1:])
                    self._places[f"{kind}.{index}"] = getattr(self, kind), index

    def begin(self, current: ForwardPass) -> None:
        self.current = current
        for name, (states, index) in self._places.items():
            states[index] = self._rows(name, current)

    def commit(self) -> list[tuple[Tensor, Tensor]]:
        assert self.current is not None
        current, self.current = self.current, None
        new = {}
        for name, (states, index) in self._places.items():
            state, before = states[index], self._rows(name, current)
            fed_B = (current.new_B > 0).to(state.device)
            new[name] = torch.where(fed_B.view(-1, *[1] * (state.dim() - 1)), state, before)
        return self._store(new, current)

    def _rows(self, name: str, current: ForwardPass) -> Tensor:
        """A copy of the slots of a pass."""
        return self.buffers[name].index_select(0, current.slot_B.to(self.buffers[name].device))
