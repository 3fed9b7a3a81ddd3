"""Static slots: the states of up to `max_slots` sequences, allocated once, at fixed addresses."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from lolcats.errors import UserError
from lolcats.generation.softmax_slots import Pass, SoftmaxSlots
from lolcats.modeling.cache import HybridCacheLayer
from lolcats.ops import HybridSpec, HybridState


class HybridSlots(HybridCacheLayer):
    """The states of one linearized layer for all slots.

    Args:
        slots: number of sequences.
        like: a state of this layer, for shapes, types and device.
    """

    def __init__(self, slots: int, like: HybridState, is_sliding: bool) -> None:
        super().__init__(is_sliding)
        self.store = like.map(lambda tensor: tensor.new_zeros(slots, *tensor.shape[1:]))
        self.is_initialized = True
        self.current: Pass | None = None

    def begin(self, current: Pass) -> None:
        """Bind `state` to the rows of a pass: views of slots one behind the other, else copies; none if `fresh`."""
        self.tokens, self.current, self.state = current.past, current, None
        if current.fresh:
            return
        slots = current.slots
        self.state = self.store.select(current.row_B) if slots is None else self.store.map(lambda tensor: tensor[slots])
        if not current.inplace:
            # One tensor in all layers: what follows from it is computed once (`ops.hybrid_attention.remember`).
            self.state.position = current.past_B.to(self.state.position.device)

    def commit(self) -> list[tuple[Tensor, Tensor]]:
        """Put the states after the pass into their slots; (slots, states) that are still to be copied."""
        assert self.state is not None
        assert self.current is not None
        pairs = list(zip(self.store.tensors().values(), self.state.tensors().values(), strict=True))
        current, self.state, self.current = self.current, None, None
        slots = current.slots
        if slots is not None:
            return [(stored[slots], new) for stored, new in pairs]
        row_B = current.row_B.to(self.store.position.device)
        for stored, new in pairs:
            stored.index_copy_(0, row_B, new)
        return []

    def writable(self) -> bool:
        return self.current is not None and self.current.inplace and super().writable()

    def block_evicted(self, spec: HybridSpec) -> bool:
        """What the host says, which knows how long each sequence is."""
        return self.current is None or self.current.block_evicted

    def clear(self, row: int) -> None:
        for tensor in self.store.tensors().values():
            tensor[row].zero_()

    def move(self, source: int, target: int) -> None:
        for tensor in self.store.tensors().values():
            tensor[target].copy_(tensor[source])

    def read(self, row: int, length: int) -> dict[str, Tensor]:
        return {name: tensor[row].clone() for name, tensor in self.store.tensors().items()}

    def write(self, row: int, length: int, tensors: dict[str, Tensor]) -> None:
        for name, tensor in self.store.tensors().items():
            tensor[row].copy_(tensors[name])

    def expected(self, length: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {name: (tuple(tensor.shape[1:]), tensor.dtype) for name, tensor in self.store.tensors().items()}

    @property
    def nbytes(self) -> int:
        return self.store.nbytes


class SlotCache(Cache):
    """A transformers cache over slots. `begin` says which slots a forward pass works on, `commit` ends it.

    Args:
        model: a `LolcatsForCausalLM` in linear mode. One token runs through it, to learn what each layer keeps.
        max_slots: sequences.
        max_length: most tokens of a sequence; only kept softmax layers need it and reserve memory for it.

    Raises:
        UserError: the slots do not fit into memory.
    """

    layers: list[Any]

    def __init__(self, model: Any, max_slots: int, max_length: int | None) -> None:
        self.max_slots, self.max_length = max_slots, max_length
        needed = 0
        layers: list[Any] = []
        try:
            for layer in _one_token(model).layers:
                layers.append(_slots_like(layer, max_slots, max_length))
                needed += layers[-1].nbytes
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"{max_slots} slots do not fit into memory: {needed / 2**30:.1f} GiB were reserved when it ran out."
                " Use fewer slots" + ("" if max_length is None else " or a smaller max_length")
            ) from error
        super().__init__(layers=layers)

    def begin(self, current: Pass) -> None:
        for layer in self.layers:
            layer.begin(current)

    def commit(self) -> None:
        copy_all([pair for layer in self.layers for pair in layer.commit()])

    def clear(self, row: int) -> None:
        for layer in self.layers:
            layer.clear(row)

    def move(self, source: int, target: int) -> None:
        for layer in self.layers:
            layer.move(source, target)

    def read(self, row: int, length: int) -> dict[str, Tensor]:
        """Copies of all that one slot holds after `length` tokens, by "layer.name"."""
        return {
            f"{index}.{name}": tensor
            for index, layer in enumerate(self.layers)
            for name, tensor in layer.read(row, length).items()
        }

    def write(self, row: int, length: int, tensors: dict[str, Tensor]) -> None:
        """The reverse of `read`; the slot must be clear."""
        for index, layer in enumerate(self.layers):
            names = layer.expected(length)
            layer.write(row, length, {name: tensors[f"{index}.{name}"] for name in names})

    def expected(self, length: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and type of each tensor of a slot after `length` tokens."""
        return {
            f"{index}.{name}": entry
            for index, layer in enumerate(self.layers)
            for name, entry in layer.expected(length).items()
        }

    @property
    def has_softmax(self) -> bool:
        return any(isinstance(layer, SoftmaxSlots) for layer in self.layers)

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)


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


@torch.no_grad()
def _one_token(model: Any) -> DynamicCache:
    """The model's own cache after one token."""
    cache = DynamicCache(config=model.config.get_text_config())
    device = model.get_input_embeddings().weight.device
    model(
        input_ids=torch.zeros(1, 1, dtype=torch.int64, device=device),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    return cache


def _slots_like(layer: Any, max_slots: int, max_length: int | None) -> HybridSlots | SoftmaxSlots:
    if isinstance(layer, HybridCacheLayer):
        assert layer.state is not None
        return HybridSlots(max_slots, layer.state, layer.is_sliding)
    if max_length is None:
        raise ValueError("layers with softmax attention need a max_length; got None")
    window = getattr(layer, "sliding_window", None) if layer.is_sliding else None
    return SoftmaxSlots(max_slots, max_length, window, (layer.keys, layer.values))
