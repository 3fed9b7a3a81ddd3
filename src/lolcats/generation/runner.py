"""The model over slots: tensors, forward passes and CUDA graphs. Prefills some slots, decodes the first ones.

Slots are the states of up to `max_slots` sequences, allocated once, at fixed addresses. Sequences that decode are in
slots 0 .. n - 1, so that a step works on contiguous views and costs what n sequences cost; the scheduler moves a
sequence when one before it ends.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable
from contextlib import ExitStack
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache, DynamicCache

from lolcats.errors import UserError
from lolcats.modeling.attention import ATTENTION_CALL, AttentionCall
from lolcats.modeling.cache import ExactCacheLayer, HybridCacheLayer, Rows, longrope_border, recurrent_layers
from lolcats.modeling.fused import CompiledLayers, fused_kernels
from lolcats.modeling.graphs import Graphs
from lolcats.modeling.model import LolcatsForCausalLM
from lolcats.modeling.softmax import any_length, upload

DEFAULT_MAX_LENGTH = 4096
# Prompts, or pieces of them, of so many tokens at most run from CUDA graphs: longer ones do not wait for the host.
MOST_CAPTURED = 1024
LEAST_CAPTURED = 16  # shorter ones are rounded up to it


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
        groups = defaultdict(list)
        for buffer in chain(*(part.buffers.values() for part in self.parts.values())):
            if buffer.numel():
                groups[buffer.device, buffer.dtype].append(buffer.unbind())
        # All tensors of each slot, by type: to index the buffers for each change takes the host longer than the change.
        self._slots = [list(zip(*rows, strict=True)) for rows in groups.values()]
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
        for tensors in self._slots:
            torch._foreach_zero_(tensors[slot])
        self.set_length(slot, 0)

    @torch.no_grad()
    def move(self, source: int, target: int) -> None:
        """Copy a slot over another."""
        for tensors in self._slots:
            torch._foreach_copy_(tensors[target], tensors[source])
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


def bucket(count: int, most: int) -> int:
    """`count` rounded up to 1, 2, 4, 8 or n * 2^k with n in 4..7: at most a quarter too many.

    >>> [bucket(n, 100) for n in (1, 3, 8, 9, 33, 99)]
    [1, 4, 8, 10, 40, 100]
    """
    if count <= 2:
        return min(count, most)
    unit = 1 << max((count - 1).bit_length() - 3, 0)
    rounded = -(-count // unit) * unit
    return min(max(rounded, 4), most)


class Runner:
    """Runs a linearized model over static slots; until `close` it is in eval mode and, on a GPU, computes norms,
    activations and rotary embedding with liger-kernel where that is installed (`lolcats.modeling.fused`). Until then
    attention in this process starts at once at `any_length`.

    Args:
        model: a `LolcatsForCausalLM`.
        max_slots: sequences at a time.
        max_length: most tokens of a sequence in a model with exact heads; by default what the model
            was made for, at most 4096. Models without such heads, or whose exact heads have a window, have no limit.
        use_graphs: capture decoding, with compiled layers (`lolcats.modeling.fused`), and short prompts in CUDA
            graphs; None: where the model is on a single CUDA device.

    Attributes:
        cache: the slots.
        tokens_prefilled, tokens_decoded: tokens that went through the model so far.
    """

    def __init__(
        self, model: Any, max_slots: int, max_length: int | None = None, use_graphs: bool | None = None
    ) -> None:
        if not isinstance(model, LolcatsForCausalLM):
            raise UserError(
                f"the engine runs linearized models, not a {type(model).__name__}; linearize it first, or use its own"
                " generate()"
            )
        if recurrent := recurrent_layers(model.config):
            raise UserError(
                f"{model.config.text_config.model_type}: the engine does not keep the states of layers without"
                f" attention ({recurrent}); use the model's own generate()"
            )
        if max_slots < 1:
            raise ValueError(f"max_slots={max_slots}: expected at least 1")
        if max_length is not None and max_length < 2:
            raise ValueError(f"max_length={max_length}: expected at least 2 tokens")
        self.model = model
        changes = ExitStack()
        self._restore = weakref.finalize(self, changes.close)
        changes.callback(model.train, model.training)
        changes.enter_context(any_length())
        model.eval()
        self.max_length: int | None = None
        if model.config.has_exact_heads and model.config.attention.exact_tokens is not None:
            self.max_length = max_length
        elif model.config.has_exact_heads:
            base = model.config.get_text_config()
            limits = [getattr(base, name, None) for name in ("max_position_embeddings", "attention_chunk_size")]
            self.max_length = max_length or min(x for x in (*limits, DEFAULT_MAX_LENGTH) if x)
            self.max_length = min(self.max_length, limits[1] or self.max_length)
        if border := longrope_border(model.config):
            if (max_length or 0) > border:
                raise UserError(
                    f"max_length={max_length}: beyond {border} (longrope) neighbours would change an answer"
                )
            self.max_length = min(self.max_length or border, border)
        self.cache = SlotCache(model, max_slots, self.max_length)
        embedding: Any = model.get_input_embeddings()
        self.vocabulary: int = embedding.weight.shape[0]
        self.device: torch.device = embedding.weight.device
        self.token_S = torch.zeros(max_slots, dtype=torch.int64, device=self.device)
        self.active_S = torch.zeros(max_slots, dtype=torch.bool, device=self.device)
        self.slot_S = torch.arange(max_slots, device=self.device)
        # A slot, its tokens so far, how many are new, and these: what the graphs of prompts read.
        self.prompt = torch.zeros(3 + MOST_CAPTURED, dtype=torch.int64, device=self.device)
        self._widths: set[Hashable] = set()
        if use_graphs is None:
            one_device = {parameter.device for parameter in model.parameters()} == {self.device}
            use_graphs = self.device.type == "cuda" and one_device
        self.compiled = CompiledLayers(model, enabled=use_graphs)
        self.graphs = Graphs(self.compiled.give_up) if use_graphs else None
        self.prompt_graphs = Graphs() if use_graphs else None  # of their own: those of decoding stay if these fail
        changes.enter_context(fused_kernels(model, "auto"))
        self.tokens_prefilled = self.tokens_decoded = 0

    def close(self) -> None:
        """Give the model its own kernels and mode back, as garbage collection does too. The runner cannot run again."""
        self._restore()
        self.graphs = self.prompt_graphs = None

    @torch.no_grad()
    def prefill(self, slots: list[int], chunks: list[list[int]]) -> Tensor:
        """Feed tokens to some slots.

        Args:
            slots: distinct.
            chunks: tokens for each of them, at least one.

        Returns:
            [n, V], logits after each chunk's last token.
        """
        counts = [len(chunk) for chunk in chunks]
        longest = max(counts)
        captures = self.prompt_graphs is not None and len(slots) == 1 and 1 < longest <= MOST_CAPTURED
        # A graph has one shape, but exact heads look back at as many tokens as there are.
        if captures and not (self.cache.places and self.cache.lengths[slots[0]]):
            return self._prefill_captured(slots[0], chunks[0])
        slot_B, new_B = upload([slots, counts], self.device)
        before = [self.cache.lengths[slot] for slot in slots]
        positions = chain(*(range(held, held + count) for held, count in zip(before, counts, strict=True)))
        token_1N, position_1N = upload([[[*chain(*chunks)]], [[*positions]]], self.device)
        past, end = max(before), max(before) + longest
        rows = Rows.packed([*zip(slots, before, strict=True)], counts, past, end, self.device)
        if len(slots) == 1:
            adjacent = slice(slots[0], slots[0] + 1)
            rows = Rows(past, end, None, slot_B, adjacent, fresh=rows.fresh)
        logits_BV = self._forward(rows, token_1N, position_1N, new_B.cumsum(0) - 1)
        self.cache.length_S.index_add_(0, slot_B, new_B)
        for slot, count in zip(slots, counts, strict=True):
            self.cache.lengths[slot] += count
        self.tokens_prefilled += sum(counts)
        return logits_BV

    def _prefill_captured(self, slot: int, chunk: list[int]) -> Tensor:
        """`prefill` of one slot, in a row whose length is rounded up.

        A length is captured when it comes for the second time: that takes as long as three passes.
        """
        assert self.prompt_graphs is not None
        count, past = len(chunk), self.cache.lengths[slot]
        width, fresh = max(bucket(count, MOST_CAPTURED), LEAST_CAPTURED), past == 0
        given = [slot, past, count, *chunk, *[0] * (width - count)]
        self.prompt[: len(given)] = upload(given, self.device)

        def run() -> Tensor:
            slot_1, past_1, new_1, token_T = self.prompt[: len(given)].split([1, 1, 1, width])
            rows = Rows(0, width, past_1, slot_1, adjacent=None, fresh=fresh, cu_seqlens=pad(new_1, (1, 0)).int())
            return self._forward(rows, token_T[None], past_1 + torch.arange(width, device=self.device)[None], new_1 - 1)

        def run_nothing() -> None:
            """The slot stays as it is; where the pass is fresh, empty."""
            self.prompt[2] = 0
            run()
            self.prompt[2] = count

        key = width, fresh
        logits_1V = self.prompt_graphs.run(key, run, run_nothing) if key in self._widths else run()
        self._widths.add(key)
        self.cache.set_length(slot, past + count)
        self.tokens_prefilled += count
        return logits_1V

    @torch.no_grad()
    def decode(self, tokens: list[int] | Tensor) -> Tensor:
        """Feed one token to each of the first len(tokens) slots.

        Returns:
            [len(tokens), V] logits, valid until the next call.
        """
        count, past = len(tokens), self.cache.places
        self.token_S[:count] = tokens if isinstance(tokens, Tensor) else upload(tokens, self.device)
        self.active_S.copy_(self.slot_S < count)
        if self.graphs is None:
            logits_BV = self._decode(count, min(max(self.cache.lengths[:count]), past))
        else:
            # Rows between count and rows, if any, may belong to sequences in prefill: they must not change. As many
            # places as there are, whatever comes: kernels read each row's own length.
            rows = bucket(count, len(self.cache.lengths))
            decode = partial(self._decode, rows, past)
            logits_BV = self.graphs.run(rows, decode, partial(self._decode_nothing, decode))
        self.cache.lengths[:count] = [length + 1 for length in self.cache.lengths[:count]]
        self.tokens_decoded += count
        return logits_BV[:count]

    def _decode(self, rows: int, past: int) -> Tensor:
        """One step of the first `rows` slots, from and to fixed addresses, without a look at values."""
        first, active_B = slice(0, rows), self.active_S[:rows]
        length_B = self.cache.length_S[:rows].clone()
        past_B = torch.where(active_B, length_B, -1)
        used = Rows(past, past + 1, past_B, self.slot_S[:rows], first)
        with self.compiled.active():
            logits_BV = self._forward(used, self.token_S[:rows, None], length_B[:, None], None)
        self.cache.length_S[:rows] += active_B
        return logits_BV

    def _decode_nothing(self, decode: Callable[[], Tensor]) -> None:
        """Slots stay as they are. Whatever is to be compiled for so many rows is compiled here."""
        active_S = self.active_S.clone()
        self.active_S.zero_()
        try:
            decode()
        finally:
            self.active_S.copy_(active_S)

    def _forward(self, rows: Rows, token_BT: Tensor, position_BT: Tensor, last_N: Tensor | None) -> Tensor:
        """Logits [N, V] after some of the tokens [1, T]; None: after all, of which there is one a row."""
        self.cache.begin(rows)
        inputs: dict[str, Any] = {"input_ids": token_BT, "position_ids": position_BT}
        inputs |= {"attention_call": AttentionCall(rows=rows), "past_key_values": self.cache, "use_cache": True}

        def pick(module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor]:
            """Before the head."""
            assert last_N is not None
            return (args[0][:, last_N.to(args[0].device)],)

        with ExitStack() as changes:
            if last_N is not None:
                changes.callback(self.model.get_output_embeddings().register_forward_pre_hook(pick).remove)
            logits = self.model(**inputs).logits
        self.cache.commit(rows)
        return logits[:, -1] if last_N is None else logits[0]
