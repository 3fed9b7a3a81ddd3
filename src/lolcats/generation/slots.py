"""Static slots: the states of up to `max_slots` sequences, allocated once, at fixed addresses."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from lolcats.errors import UserError
from lolcats.modeling.attention import ATTENTION_CALL, AttentionCall
from lolcats.modeling.cache import ExactCacheLayer, HybridCacheLayer, Rows


class SlotCache(Cache):
    """A transformers cache whose rows are slots. `begin` says which a forward pass works on, `commit` ends it.

    Attributes:
        lengths: tokens that each slot holds, on the host; `length_S` the same on the device.
        parts: what keeps something of a sequence, by name: layers ("7"), and the exact heads of layers that have both
            kinds ("7.exact"). Each has `buffers` [slots, ...] by name and says which part of a slot is `held`.

    Args:
        model: a `LolcatsForCausalLM` in linear mode. A token runs through it, to learn what each layer keeps.
        max_slots: sequences.
        max_length: most tokens of a sequence; only exact heads that see all tokens need it and reserve memory for it.
    """

    def __init__(self, model: Any, max_slots: int, max_length: int | None) -> None:
        self.max_slots, self.max_length = max_slots, max_length
        self.parts: dict[str, Any] = {}
        try:
            layers = _after_one_token(model)
            for index, layer in enumerate(layers):
                self._add(str(index), layer)
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"{max_slots} slots do not fit into memory: it ran out after {self.nbytes / 2**30:.1f} GiB."
                " Use fewer slots" + ("" if max_length is None else " or a smaller max_length")
            ) from error
        super().__init__(layers=layers)
        self.lengths = [0] * max_slots
        self.length_S = torch.zeros(max_slots, dtype=torch.int64, device=model.get_input_embeddings().weight.device)

    def _add(self, name: str, layer: Any) -> None:
        """A layer with a row for each slot, instead of the one that it has."""
        if isinstance(layer, HybridCacheLayer):
            layer.allocate(self.max_slots)
            if layer.exact.keys is not None:
                self._add(f"{name}.exact", layer.exact)
        else:
            layer.allocate(self.max_slots, self.max_length)
        self.parts[name] = layer

    def _parts(self, kind: type) -> list[Any]:
        return [part for part in self.parts.values() if isinstance(part, kind)]

    @property
    def places(self) -> int:
        """The most tokens that softmax heads look back at; 0: there are none."""
        return max((part.places for part in self._parts(ExactCacheLayer)), default=0)

    def begin(self, rows: Rows) -> None:
        for part in self.parts.values():
            part.tokens = rows.past
        if rows.step and self._parts(HybridCacheLayer):  # each layer's state counts its tokens
            position_B = rows.on(1, self.length_S.device)[0]
            copy_all([(part.state.position[rows.adjacent], position_B) for part in self._parts(HybridCacheLayer)])

    def commit(self, rows: Rows) -> None:
        """Put the states after the pass into its slots; keys and values are there."""
        pairs = []
        for part in self._parts(HybridCacheLayer):
            for name, new in part.made().items():
                stored = part.buffers[name]
                if rows.adjacent is not None:
                    pairs.append((stored[rows.adjacent], new))
                elif new.numel():
                    assert rows.row_B is not None
                    stored.index_copy_(0, rows.row_B.to(stored.device), new)
        copy_all(pairs)

    def set_length(self, slot: int, length: int) -> None:
        self.lengths[slot] = length
        self.length_S[slot] = length

    @torch.no_grad()
    def clear(self, slot: int) -> None:
        """Zeros: stale contents are masked, but 0 * NaN of a failed request would reach the next one."""
        groups = defaultdict(list)
        for part in self.parts.values():
            for buffer in part.buffers.values():
                if buffer.numel():
                    groups[buffer.device, buffer.dtype].append(buffer[slot])
        for rows in groups.values():
            torch._foreach_zero_(rows)
        self.set_length(slot, 0)

    @torch.no_grad()
    def move(self, source: int, target: int) -> None:
        """Copy a slot over another."""
        for part in self.parts.values():
            for buffer in part.buffers.values():
                buffer[target].copy_(buffer[source])
        self.set_length(target, self.lengths[source])

    def exchange(self, first: int, second: int) -> None:
        """Exchange the contents of two slots."""
        tensors, length = self.read(first), self.lengths[first]
        self.move(second, first)
        self.write(second, length, tensors)

    @torch.no_grad()
    def read(self, slot: int) -> dict[str, Tensor]:
        """Copies of all that later tokens can see of a slot, by "part.name".

        Keys and values come oldest first.
        """
        return {
            f"{name}.{entry}": buffer[part.held(slot, self.lengths[slot])].clone()
            for name, part in self.parts.items()
            for entry, buffer in part.buffers.items()
        }

    @torch.no_grad()
    def write(self, slot: int, length: int, tensors: dict[str, Tensor]) -> None:
        """Fill a slot with what `read` gave after `length` tokens.

        Raises:
            ValueError: a tensor is missing, or has another type or shape; the slot must be cleared then.
        """
        self.clear(slot)
        for name, part in self.parts.items():
            place = part.held(slot, length)
            for entry, buffer in part.buffers.items():
                if (new := tensors.get(f"{name}.{entry}")) is None:
                    raise ValueError(f"the state has no tensor '{name}.{entry}'")
                old = buffer[place]
                if (new.dtype, new.shape) != (old.dtype, old.shape):  # a smaller one would be broadcast
                    expected = f"expected {old.dtype} {list(old.shape)}"
                    got = f"got {new.dtype} {list(new.shape)}"
                    raise ValueError(f"the state does not fit layer {name}: {entry}: {expected}, {got}")
                buffer[place] = new.to(buffer.device)
        self.set_length(slot, length)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for part in self.parts.values() for buffer in part.buffers.values())


@torch.no_grad()
def _after_one_token(model: Any) -> list[Any]:
    """Layers of a cache as decoding leaves them, filled without kernels, which would have to be compiled first."""
    cache = DynamicCache(config=model.config.get_text_config())
    token_11 = torch.zeros(1, 1, dtype=torch.int64, device=model.get_input_embeddings().weight.device)
    plain = {ATTENTION_CALL: AttentionCall(backend="chunked")}
    model(input_ids=token_11, past_key_values=cache, use_cache=True, logits_to_keep=1, **plain)
    return cache.layers


def copy_all(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copy the second of each pair over the first, unless it is the same memory; tensors of a type all at once."""
    groups: dict[Any, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
    for target, source in pairs:
        if target.data_ptr() != source.data_ptr():
            targets, sources = groups[target.device, target.dtype, source.dtype]
            targets.append(target)
            sources.append(source)
    for targets, sources in groups.values():
        torch._foreach_copy_(targets, sources)
