"""Static slots: the states of up to `max_slots` sequences, allocated once, at fixed addresses."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, LinearAttentionLayer

from lolcats.errors import UserError
from lolcats.generation.decoding import new_cache
from lolcats.generation.layer_slots import ForwardPass, HybridSlots, LayerSlots, RecurrentSlots, SoftmaxSlots
from lolcats.modeling.cache import BoundedLayer, HybridCacheLayer
from lolcats.modeling.call import ATTENTION_CALL, AttentionCall


class SlotCache(Cache):
    """A transformers cache over slots. `begin` says which slots a forward pass works on, `commit` ends it.

    Attributes:
        parts: all buffers by name: of layers ("7") and of the exact heads of layers that have both kinds ("7.exact").

    Args:
        model: a `LolcatsForCausalLM` in linear mode. A token runs through it, to learn what each layer keeps.
        max_slots: sequences.
        max_length: most tokens of a sequence; only exact heads that see all tokens need it and reserve memory for it.

    Raises:
        UserError: the slots do not fit into memory.
    """

    parts: dict[str, LayerSlots]

    def __init__(self, model: Any, max_slots: int, max_length: int | None) -> None:
        self.max_slots, self.max_length = max_slots, max_length
        self.parts = {}
        layers: list[Any] = []
        try:
            for index, layer in enumerate(_after_one_token(model)):
                layers.append(self._add(str(index), layer))
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"{max_slots} slots do not fit into memory: it ran out after {self.nbytes / 2**30:.1f} GiB."
                " Use fewer slots" + ("" if max_length is None else " or a smaller max_length")
            ) from error
        super().__init__(layers=layers)

    @property
    def has_recurrent(self) -> bool:
        """Whether some layers take padding for tokens, see `RecurrentSlots`."""
        return any(isinstance(part, RecurrentSlots) for part in self.parts.values())

    def _add(self, name: str, layer: Any) -> LayerSlots:
        """Slots for what the cache layer of one sequence holds."""
        if isinstance(layer, HybridCacheLayer):
            assert layer.state is not None
            exact: Any = None if layer.exact is None else self._add(f"{name}.exact", layer.exact)
            self.parts[name] = HybridSlots(self.max_slots, layer.state, layer.is_sliding, exact)
        elif isinstance(layer, LinearAttentionLayer):
            self.parts[name] = RecurrentSlots(self.max_slots, layer)
        else:
            bounded = isinstance(layer, BoundedLayer)
            window = layer.window if bounded else layer.sliding_window if layer.is_sliding else None
            sinks = layer.sinks if bounded else 0
            bound = None if window is None else window + sinks
            sizes = [size for size in (self.max_length, bound) if size is not None]
            if not sizes:
                raise ValueError("heads with softmax attention over all tokens need a max_length; got None")
            like = layer.keys, layer.values
            self.parts[name] = SoftmaxSlots(self.max_slots, min(sizes), sinks, like, layer.is_sliding)
        return self.parts[name]

    @property
    def places(self) -> int:
        """The most tokens that softmax heads look back at; 0: there are none."""
        return max((part.capacity for part in self.parts.values() if isinstance(part, SoftmaxSlots)), default=0)

    def begin(self, current: ForwardPass) -> None:
        for part in self.parts.values():
            part.begin(current)
        if current.step:  # each layer's state counts its tokens
            position_B = torch.where(current.new_B > 0, current.past_B, -1)
            states = [part.state for part in self.parts.values() if isinstance(part, HybridSlots)]
            copy_all([(state.position, position_B) for state in states if state is not None])

    def commit(self) -> None:
        copy_all([pair for part in self.parts.values() for pair in part.commit()])

    def clear(self, slot: int) -> None:
        """Zeros: stale contents are masked, but 0 * NaN of a failed request would reach the next one."""
        groups = defaultdict(list)
        for part in self.parts.values():
            for buffer in part.buffers.values():
                if buffer.numel():
                    groups[buffer.device, buffer.dtype].append(buffer[slot])
        for rows in groups.values():
            torch._foreach_zero_(rows)

    def move(self, source: int, target: int) -> None:
        for part in self.parts.values():
            part.move(source, target)

    def read(self, slot: int, length: int) -> dict[str, Tensor]:
        """Copies of all that one slot holds after `length` tokens, by "part.name"."""
        return {
            f"{name}.{entry}": tensor
            for name, part in self.parts.items()
            for entry, tensor in part.read(slot, length).items()
        }

    def write(self, slot: int, length: int, tensors: dict[str, Tensor]) -> None:
        """The reverse of `read`; the slot must be clear.

        Raises:
            ValueError: a tensor is missing, or has another type or shape; the slot must be cleared then.
        """
        for name, part in self.parts.items():
            try:
                part.write(slot, length, {entry: tensors[f"{name}.{entry}"] for entry in part.buffers})
            except KeyError as error:
                raise ValueError(f"the state has no tensor {error}") from error
            except (RuntimeError, ValueError) as error:
                raise ValueError(f"the state does not fit layer {name}: {error}") from error

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())


@torch.no_grad()
def _after_one_token(model: Any) -> list[Any]:
    """Layers of a cache as decoding leaves them, filled without kernels, which would have to be compiled first."""
    cache = new_cache(model)
    token_11 = torch.zeros(1, 1, dtype=torch.int64, device=model.get_input_embeddings().weight.device)
    plain = {ATTENTION_CALL: AttentionCall(backend="chunked")}
    model(input_ids=token_11, past_key_values=cache, use_cache=True, logits_to_keep=1, **plain)
    for index, linear_attention in model.linear_layers():
        state = cache.layers[index].state
        if state.S.is_cuda and linear_attention.has_step_kernel(state.k.dtype):
            cache.layers[index].state = state.as_steps_keep(state.k.dtype)
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
