"""Keys and values of one kept softmax layer for all slots: preallocated buffers of fixed length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin


@dataclass(frozen=True)
class Pass:
    """Which tokens a forward pass feeds to which slots.

    Attributes:
        row_B: int64 slot of each row of the batch.
        past_B: int64 tokens that the slot held before.
        new_B: int64 new tokens of the row; the rest of its columns is padding on the right.
        past: columns for past tokens, at least the largest of `past_B`.
        fresh: no row has past tokens.
        slots: of the rows, if they lie one behind the other; None: see `row_B`.
        inplace: whether states may be written into while layers run, which then have no tensor in common.
        block_evicted: whether a block may leave the window of a row that gets one token, see `hybrid_attention`.
    """

    row_B: Tensor
    past_B: Tensor
    new_B: Tensor
    past: int
    fresh: bool = False
    slots: slice | None = None
    inplace: bool = False
    block_evicted: bool = True


class SoftmaxSlots(CacheLayerMixin):
    """Buffers [slots, G, C + 1, D]: the token at position p is in place p % C; place C takes padding.

    `update` returns each row's past aligned to the right, then the new tokens: the layout of
    `lolcats.modeling.softmax`, in which the distance of two columns is the distance of their tokens, so that
    native windows hold.

    Args:
        max_length: most tokens of a slot.
        sliding_window: the layer's native window; the buffer holds no more than that.
        like_BGTD: keys and values of this layer, for their shapes, types and device.
    """

    is_compileable = False
    is_croppable = False
    keys: Tensor
    values: Tensor

    def __init__(
        self, slots: int, max_length: int, sliding_window: int | None, like_BGTD: tuple[Tensor, Tensor]
    ) -> None:
        super().__init__()
        self.is_sliding = sliding_window is not None
        self.reach = max_length if sliding_window is None else min(sliding_window - 1, max_length)
        self.capacity = max(self.reach, 1)
        keys, values = like_BGTD
        self.keys = keys.new_zeros(slots, keys.shape[1], self.capacity + 1, keys.shape[3])
        self.values = values.new_zeros(slots, values.shape[1], self.capacity + 1, values.shape[3])
        self.is_initialized = True
        self.current: Pass | None = None

    def begin(self, current: Pass) -> None:
        device = self.keys.device
        self.current = Pass(current.row_B.to(device), current.past_B.to(device), current.new_B.to(device), current.past)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store the new tokens; returns keys and values [B, G, min(past, reach) + T, D]."""
        if self.current is None:
            raise RuntimeError("begin a pass of the SlotCache first")
        current, tokens = self.current, key_states.shape[2]
        past = min(current.past, self.reach)
        row_B1, new_B1 = current.row_B[:, None], current.new_B[:, None]
        position_BP = current.past_B[:, None] + torch.arange(-past, 0, device=row_B1.device)
        old_BP = torch.where(position_BP >= 0, position_BP % self.capacity, self.capacity)
        column_T = torch.arange(tokens, device=row_B1.device)
        stays_BT = (column_T < new_B1) & (column_T >= new_B1 - self.capacity)
        place_BT = torch.where(stays_BT, (current.past_B[:, None] + column_T) % self.capacity, self.capacity)

        outputs = []
        for buffer, new_BGTD in ((self.keys, key_states), (self.values, value_states)):
            past_BGPD = buffer[row_B1, :, old_BP].transpose(1, 2)  # a copy: writing comes after it
            outputs.append(torch.cat([past_BGPD, new_BGTD.to(buffer.dtype)], dim=2))
            buffer[row_B1, :, place_BT] = new_BGTD.transpose(1, 2).to(buffer.dtype)
        return outputs[0], outputs[1]

    def commit(self) -> list[tuple[Tensor, Tensor]]:
        """Nothing is left to copy: `update` wrote into the buffers."""
        self.current = None
        return []

    def clear(self, row: int) -> None:
        # Stale places are masked, but 0 * NaN of a failed request would reach the next one.
        self.keys[row].zero_()
        self.values[row].zero_()

    def move(self, source: int, target: int) -> None:
        self.keys[target].copy_(self.keys[source])
        self.values[target].copy_(self.values[source])

    def read(self, row: int, length: int) -> dict[str, Tensor]:
        """Copies of the keys and values [G, n, D] that later tokens can see, oldest first."""
        place = self._places(length)
        return {"keys": self.keys[row][:, place], "values": self.values[row][:, place]}

    def write(self, row: int, length: int, tensors: dict[str, Tensor]) -> None:
        place = self._places(length)
        self.keys[row][:, place] = tensors["keys"].to(self.keys.device)
        self.values[row][:, place] = tensors["values"].to(self.values.device)

    def expected(self, length: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and type of what `read` gives."""
        seen = min(length, self.reach)
        return {
            name: ((buffer.shape[1], seen, buffer.shape[3]), buffer.dtype)
            for name, buffer in (("keys", self.keys), ("values", self.values))
        }

    def _places(self, length: int) -> Tensor:
        first = length - min(length, self.reach)
        return torch.arange(first, length, device=self.keys.device) % self.capacity

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the buffers exist."""

    def get_seq_length(self) -> int:
        return 0 if self.current is None else self.current.past

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return self.capacity
