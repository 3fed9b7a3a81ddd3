"""What it costs and gains to check several tokens at once, by which drafts are as long as they pay."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lolcats.errors import UserError
from lolcats.modeling.cache_size import cache_bytes, kept_tokens, token_bytes
from lolcats.modeling.model import LolcatsForCausalLM

EVERY = torch.iinfo(torch.int32).max // 2  # tokens that a head looks back at, if nothing limits it
# What a pass costs besides reading, in bytes that could be read meanwhile: launches and small kernels of a layer, less
# where all products have a single row; what the host does in a round, whether it drafts or not; and operations of
# products for a byte. On a GPU at 3 TB/s these are 37 microseconds, of which a single row saves 12, and 0.17 ms; they
# follow from SmolLM2-135M on an H100, where a graph's step takes 0.78 to 0.89 ms with one sequence and 1.35 to 1.39
# with 16, and the host 0.15 ms more. On two cores of a CPU, at 11 GB/s in float32, a step takes 48 ms with one
# sequence, 87 with eight, and a check of nine tokens 93 (docs/speculation.md).
LAYER_BYTES = {"cuda": 110e6, "cpu": 1e6}
ONE_ROW_BYTES = {"cuda": 35e6, "cpu": 0.0}
ROUND_BYTES = {"cuda": 0.5e9, "cpu": 6e6}
FLOP_PER_BYTE = {"cuda": 200.0, "cpu": 2.5}
# What a layer's small kernels take longer with several tokens a row, 0.1 to 0.4 ms of such a model, and what choosing
# tokens then takes the host longer, 0.1 to 0.5 ms with one to 16 sequences.
CHECK_BYTES = {"cuda": 20e6, "cpu": 0.0}
VERIFY_BYTES = {"cuda": 0.5e9, "cpu": 0.0}
# How fast a rate of acceptance forgets, and drifts back while nothing is drafted.
DRIFT, MEMORY = 0.02, 0.95


class PassCosts:
    """Of a model's passes over some rows, in bytes that could be read meanwhile; a prediction.

    Attributes:
        round: what the host does between two passes.
        latency, single: what launches take, and how much less if all products have a single row.
        check: what several tokens a row take longer.
    """

    def __init__(self, model: LolcatsForCausalLM) -> None:
        kind = model.get_input_embeddings().weight.device.type
        kind = kind if kind in FLOP_PER_BYTE else "cuda"
        self.weights = sum(parameter.nbytes for parameter in model.parameters())
        self.flop = 2 * sum(parameter.numel() for parameter in model.parameters())
        layers = len(model.config.layer_heads)
        self.latency, self.single = LAYER_BYTES[kind] * layers, ONE_ROW_BYTES[kind] * layers
        self.check = CHECK_BYTES[kind] * layers + VERIFY_BYTES[kind]
        self.round, self.flop_per_byte = ROUND_BYTES[kind], FLOP_PER_BYTE[kind]
        self.states = cache_bytes(model.config, 0, model.dtype)  # of a sequence's linear heads
        self.kinds: list[tuple[int, int]] = []  # bytes of a token in all heads that look back so far, and how far
        for layer in model.config.layer_heads:
            reach = kept_tokens(model.config, layer)
            self.kinds.append((token_bytes(model.config, layer, model.dtype), EVERY if reach is None else reach))

    def of(self, lengths: Sequence[int], tokens: int, kinds: list[tuple[int, int]] | None = None) -> float:
        """A pass of so many tokens a row.

        Args:
            lengths: of the rows.
            kinds: what is read of the cache, if not all of it.
        """
        reads: dict[int, int] = {}
        for size, reach in self.kinds if kinds is None else kinds:
            reads[reach] = reads.get(reach, 0) + size
        cache = sum(size * min(length, reach) for reach, size in reads.items() for length in lengths)
        cache += self.states * len(lengths)
        rows = tokens * len(lengths)
        products = max(self.weights, self.flop * rows / self.flop_per_byte)
        launches = self.latency - (self.single if rows == 1 else 0.0)
        return products + launches + (self.check if tokens > 1 else 0.0) + cache


class Acceptance:
    """Share of drafted tokens that lately were accepted, of those whose predecessors were."""

    def __init__(self, prior: float) -> None:
        self._prior, self._accepted, self._tried = prior, prior, 1.0

    @property
    def rate(self) -> float:
        return min(self._accepted / self._tried, 0.999)

    def note(self, accepted: int, tried: int) -> None:
        """So many tokens accepted of those that were tried; none tried: a step without a draft."""
        if tried:
            self._accepted, self._tried = MEMORY * self._accepted + accepted, MEMORY * self._tried + tried
        else:
            self._accepted = (1 - DRIFT) * self._accepted + DRIFT * self._prior * self._tried


def gain(rate: float, count: int) -> float:
    """Tokens accepted of so many, if each is with this chance, less than 1, once those before it are."""
    return rate * (1 - rate**count) / (1 - rate)


def counts_to(most: int) -> list[int]:
    """0, 1, 2, 4, ... and `most`: each has CUDA graphs of its own."""
    return [0, *(1 << n for n in range(most.bit_length()) if 1 << n < most), most]


def refuse_unfit(model: LolcatsForCausalLM) -> None:
    """Raise UserError if a model cannot take tokens back, which checks of several tokens need."""
    config, text = model.config, model.config.get_text_config()
    if config.linear_layers and not config.attention.takes_back:
        raise UserError(
            f"draft: linear heads with a {config.attention.window} window of {config.attention.window_size} tokens take"
            " no token back, since each changes the sums of the linear part; those with a terraced window do"
            " (window: terraced). Generate without --draft"
        )
    chunked = getattr(text, "attention_chunk_size", None)
    if chunked or len(config.layer_heads) < text.num_hidden_layers:
        raise UserError("draft: layers that attend within chunks, or have no attention, cannot take tokens back")
