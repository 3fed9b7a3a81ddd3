"""How many bits the linear states need: perplexity and recall of a trained model whose states are rounded.

    python benchmarks/state_bits.py --model FOLDER --haystack wikipedia.jsonl.gz --json FILE

A simulation, in plain PyTorch: the state S that later blocks of 128 tokens read and add to is rounded after each block
as it would be stored; z, one vector a head, stays in float32. Integers have a factor for each feature's row of S.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from bench_tools import main, settings_json
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lolcats.data.packed import PackedDataset
from lolcats.data.retrieval import RetrievalWriter
from lolcats.errors import UserError
from lolcats.evaluation.load import load_model
from lolcats.evaluation.perplexity import dataset_perplexity
from lolcats.evaluation.recall import recall_accuracy
from lolcats.ops.hybrid_attention import api, chunked
from lolcats.provenance import provenance


def _integers(most: int) -> Callable[[Tensor], Tensor]:
    def rounded(S: Tensor) -> Tensor:
        factor = S.abs().amax(-1, keepdim=True).clamp_min(1e-30) / most
        return (S / factor).round() * factor

    return rounded


FORMATS: dict[str, Callable[[Tensor], Tensor]] = {
    "float32": lambda S: S,
    "bfloat16": lambda S: S.to(torch.bfloat16).to(S.dtype),
    "8 bits": _integers(127),
    "6 bits": _integers(31),
    "4 bits": _integers(7),
}


@dataclass(frozen=True)
class StateBitsBench:
    """What to measure."""

    model: str = ""
    haystack: str = "demo"
    formats: tuple[str, ...] = tuple(FORMATS)
    kinds: tuple[str, ...] = ("needle", "needles")
    lengths: tuple[int, ...] = (4096,)
    samples: int = 20
    window: int = 8192  # tokens of a piece of text, whose second half counts
    pieces: int = 8
    dtype: str = "bfloat16"
    device: str = "cuda"
    seed: int = 0


def run(bench: StateBitsBench, console: Console, keep: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """A row for each format."""
    if unknown := set(bench.formats) - set(FORMATS):
        raise UserError(f"--formats: {', '.join(unknown)}; there are {', '.join(FORMATS)}")
    model, tokenizer = load_model(bench.model, dtype=bench.dtype, device=bench.device)
    report: dict[str, Any] = {"settings": settings_json(bench), "provenance": provenance(), "rows": []}
    keep(report)
    text = pieces(RetrievalWriter(tokenizer, "test", bench.haystack, begin_token=True), bench)
    for name in bench.formats:
        with states_in(FORMATS[name]):
            row: dict[str, Any] = {"format": name, **dataset_perplexity(model, text, batch_size=1)}
            how: dict[str, Any] = {"kinds": bench.kinds, "lengths": bench.lengths, "samples": bench.samples}
            if bench.samples:
                row["recall"] = recall_accuracy(model, tokenizer, haystack=bench.haystack, seed=bench.seed, **how)
        report["rows"].append(row)
        keep(report)
        console.print(str(row), highlight=False, markup=False, soft_wrap=True)
    return report


def pieces(writer: RetrievalWriter, bench: StateBitsBench) -> PackedDataset:
    """Pieces of the haystack; the second half of each has labels."""
    draw = np.random.default_rng(bench.seed)
    tokens_NT = np.stack([writer.write_text(bench.window, draw) for _ in range(bench.pieces)])
    label_NT = np.broadcast_to(np.arange(bench.window) > bench.window // 2, tokens_NT.shape)
    return PackedDataset(tokens_NT, label_NT, info={})


@contextmanager
def states_in(rounded: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Run the plain implementation, whole texts in one piece, with states S in a format."""
    before = chunked._prefix_sums, chunked.PIECE_TOKENS, api.has_kernel

    def prefix_sums(x_BSNx: Tensor) -> Tensor:
        if x_BSNx.dim() < 5:  # z
            return before[0](x_BSNx)
        states = [torch.zeros_like(x_BSNx[:, :, 0])]
        for added in x_BSNx.unbind(2):
            states.append(rounded(states[-1] + added))
        return torch.stack(states, 2)

    chunked._prefix_sums, chunked.PIECE_TOKENS = prefix_sums, 1 << 30
    api.has_kernel = lambda *_: False
    try:
        yield
    finally:
        chunked._prefix_sums, chunked.PIECE_TOKENS, api.has_kernel = before


def print_table(report: dict[str, Any], console: Console) -> None:
    """A row for each format."""
    kinds = [f"{entry['kind']}, {entry['length']}" for entry in report["rows"][0].get("recall", [])]
    table = Table("state", "perplexity", *kinds, title="linear states in fewer bits")
    for row in report["rows"]:
        shares = (f"{100 * entry['accuracy']:.0f}" for entry in row.get("recall", []))
        table.add_row(row["format"], f"{row['perplexity']:.3f}", *shares)
    console.print(table)


if __name__ == "__main__":
    main(globals(), StateBitsBench())
