"""Texts longer than the training sequences: does it help to bound the weight of the linear part? No training.

    python benchmarks/horizon_probe.py out/ --data books.jsonl --tokens 4096 --documents 4 --json linear_length_cap.json

The linear part's numerator and denominator at position n are multiplied by a factor c(n), which is 1 up to the training
length L: "as trained" 1 everywhere; "L / n", so that the sum over n features weighs as much as one over L; its square
root; "nothing beyond L"; "nothing", the window and the sinks alone. With --softmax also softmax attention, which is the
teacher's where stage 1 alone was trained. Perplexity by position; layers run in `chunked`, in
float32.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lolcats.analysis.files import write_json
from lolcats.config import DataSection
from lolcats.data.build import evaluation_documents
from lolcats.data.reading import begin_token
from lolcats.evaluation.load import load_model
from lolcats.evaluation.long_text import document_perplexity
from lolcats.evaluation.trained import training_length, with_begin_token
from lolcats.provenance import provenance

Factor = Callable[[Tensor], Tensor]
CHUNKED = import_module("lolcats.ops.hybrid_attention.chunked")  # the package exports a function of this name


def factors(length: int) -> dict[str, Factor]:
    """Name -> c of positions [B, E]."""
    return {
        "as trained": torch.ones_like,
        "L / n": lambda n: (length / (n + 1)).clamp_max(1.0),
        "square root of L / n": lambda n: (length / (n + 1)).clamp_max(1.0).sqrt(),
        "nothing beyond L": lambda n: (n < length).to(n.dtype),
        "nothing": torch.zeros_like,
    }


@contextmanager
def weighed(factor: Factor) -> Iterator[None]:
    """The linear part times `factor` of the query's position, while the block lasts."""
    plain = CHUNKED._linear_part

    def part(q_BHED: Tensor, k: Tensor, v: Tensor, spec: Any, params: Any, grid: Any, *rest: Any) -> Any:
        numerator, denominator, S, z = plain(q_BHED, k, v, spec, params, grid, *rest)
        position_BE = (grid.base_B[:, None] + grid.index_E).to(numerator.dtype)
        c_BHE1 = factor(position_BE)[:, None, :, None]
        return numerator * c_BHE1, denominator * c_BHE1, S, z

    with mock.patch.object(CHUNKED, "_linear_part", part):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a linearized model")
    parser.add_argument("--data", required=True, help="long documents")
    parser.add_argument("--tokens", type=int, default=4096, help="of each document")
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--length", type=int, help="L; default: of the training sequences")
    parser.add_argument("--factors", type=lambda text: text.split(","), default=list(factors(1)), help="some of them")
    parser.add_argument("--softmax", action="store_true", help="also softmax attention, each document in one piece")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if unknown := set(given.factors) - set(factors(1)):
        parser.error(f"--factors: no {sorted(unknown)[0]!r}; there are {', '.join(factors(1))}")
    length = given.length or training_length(given.model)
    if length is None:
        parser.error(f"{given.model} does not say how long its training sequences were; give --length")
    model, tokenizer = load_model(given.model, dtype="float32", device="cpu")
    section = DataSection(sources=[{"path": given.data, "max_rows": given.documents}])
    section = with_begin_token(section, given.model, tokenizer)
    documents = [
        (ids[: given.tokens], asked[: given.tokens]) for ids, asked in evaluation_documents(section, tokenizer)
    ]
    begin = begin_token(tokenizer) if section.begin_token else None
    settings = {name: str(value) for name, value in vars(given).items()} | {"length": length}
    report: dict[str, Any] = {"settings": settings, "provenance": provenance(), "arms": {}}
    arms = {name: (weighed(factors(length)[name]), {}) for name in given.factors}
    if given.softmax:
        arms["softmax"] = (model.attention_mode("softmax"), {"chunk": given.tokens})
    for name, (condition, options) in arms.items():
        with condition:
            report["arms"][name] = document_perplexity(
                model, documents, max_length=given.tokens, training_length=length, begin_with=begin, **options
            )
        if given.json:
            write_json(given.json, report)
    table = Table("tokens before", *report["arms"], title=f"perplexity, trained on sequences of {length}")
    for entries in zip(*(arm["positions"] for arm in report["arms"].values()), strict=True):
        table.add_row(f"{entries[0]['start']:,}", *(f"{entry['perplexity']:.2f}" for entry in entries))
    Console().print(table)


if __name__ == "__main__":
    main()
