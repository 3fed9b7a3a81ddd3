"""Ways beyond plain gates to choose exact heads: swaps after the gates, and gates beside LoRA that learns with them.

    lolcats linearize MODEL --recipe lolcats-linear --set adjust.enabled=false -o FOLDER   # stage 1 alone
    python benchmarks/head_choice.py --model FOLDER --budget 12% --test-haystack wikipedia.jsonl.gz --json FILE

gates: as `lolcats linearize` learns them, with fewer updates. moving: the same updates, in which LoRA on q, k, v and o
learns beside the gates, against the same untouched teacher. swaps: each of the `swapped` weakest heads that gates
chose for each of as many of the strongest others. Every choice is judged by its divergence from the
teacher, in nats, nothing else trained, on validation texts as the gates' own and on longer ones in another haystack.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_tools import main, settings_json
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from lolcats.config import AdjustSection
from lolcats.config.sections import GatesSection
from lolcats.data.packed import PackedDataset
from lolcats.data.retrieval import retrieval_dataset
from lolcats.errors import UserError
from lolcats.evaluation.load import load_model
from lolcats.modeling.cache_size import heads_in_budget
from lolcats.modeling.call import SOFTMAX
from lolcats.provenance import provenance
from lolcats.training import head_gates
from lolcats.training.head_gates import GateStage, by_gate
from lolcats.training.loop import train
from lolcats.training.lora import add_lora

SECTIONS = ("gates", "moving", "swaps")
Head = tuple[int, int]


@dataclass(frozen=True)
class HeadChoiceBench:
    """What to measure."""

    sections: tuple[str, ...] = SECTIONS
    model: str = ""
    budget: str = "12%"
    swapped: int = 5
    updates: int = 300
    batch_size: int = 4
    length: int = 2048
    lora_lr: float = 5e-4
    texts: int = 16  # that judge a choice
    test_haystack: str = "demo"
    test_length: int = 2048
    dtype: str = "bfloat16"
    device: str = "cuda"
    seed: int = 0


class MovingGates(GateStage):
    """Gates beside adapters that learn with them; the teacher is the model without these."""

    def __init__(self, model: Any, config: GatesSection, validation: PackedDataset, lora_lr: float) -> None:
        super().__init__(model, config, validation)
        self.wrapped = add_lora(model, AdjustSection())
        self.lora = {name: p for name, p in self.wrapped.named_parameters() if "lora_" in name}
        self.lr_factors = dict.fromkeys(self.lora, lora_lr / config.lr)

    def blocks(self) -> list[dict[str, nn.Parameter]]:
        return [super().blocks()[0] | self.lora]

    def _losses(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        original = head_gates.head_inputs

        def head_inputs(model: Any, head: Any, inputs: Any, row_L: Tensor, call: Any) -> Tensor:
            if call is not SOFTMAX:
                return original(model, head, inputs, row_L, call)
            with self.wrapped.disable_adapter():
                return original(model, head, inputs, row_L, call)

        head_gates.head_inputs = head_inputs
        try:
            return super()._losses(batch)
        finally:
            head_gates.head_inputs = original


def run(bench: HeadChoiceBench, console: Console, keep: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """A row for each choice."""
    if unknown := set(bench.sections) - set(SECTIONS):
        raise UserError(f"--sections: {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    rows: list[dict[str, Any]] = []
    report = {"settings": settings_json(bench), "provenance": provenance(), "rows": rows}
    keep(report)
    model, tokenizer = load_model(bench.model, dtype=bench.dtype, device=bench.device)
    size, count = bench.batch_size, bench.updates * bench.batch_size
    section = GatesSection(max_steps=bench.updates, batch_size=size, micro_batch_size=size, eval_every=bench.updates)

    def texts(haystack: str, texts: int, length: int, first: int = 0) -> PackedDataset:
        return retrieval_dataset(tokenizer, haystack, count=texts, length=length, seed=bench.seed, first=first)

    data, own = texts("demo", count, bench.length), texts("demo", bench.texts, bench.length, count)
    judges = {"own": GateStage(model, section, own)}
    judges["test"] = GateStage(model, section, texts(bench.test_haystack, bench.texts, bench.test_length, count))

    def judge(name: str, heads: Iterable[Head], *names: str, **more: Any) -> float:
        """The divergence of a choice on the gates' kind of texts, of which a row is made."""
        choice: dict[int, list[int]] = {}
        for layer, head in sorted(heads):
            choice.setdefault(layer, []).append(head)
        found = {text: judges[text].divergences([choice])[0] for text in names or judges}
        rows.append({"choice": name, "heads": [f"{layer}.{head}" for layer, head in sorted(heads)], **found, **more})
        keep(report)
        console.print(str(rows[-1]), highlight=False, markup=False, soft_wrap=True)
        return found["own"]

    def ranked(stage: GateStage) -> tuple[list[Head], list[Head]]:
        """All heads by their gates, and those that the budget takes."""
        with tempfile.TemporaryDirectory() as folder:
            train(stage, data, section, seed=bench.seed, directory=Path(folder) / "gates")
        order = by_gate(stage.values())
        budget = heads_in_budget(model.config, bench.budget, model.dtype, order)
        return order, [(layer, head) for layer, heads in budget.items() for head in heads]

    if {"gates", "swaps"} & set(bench.sections):
        order, chosen = ranked(GateStage(model, section, own))
        judge("gates", chosen)
    if "swaps" in bench.sections:
        weak = [head for head in order if head in chosen][-bench.swapped :]
        strong = [head for head in order if head not in chosen][: bench.swapped]
        swapped = [sorted({*chosen, new} - {old}) for old, new in itertools.product(weak, strong)]
        best = min(swapped, key=lambda heads: judge("swap", heads, "own"))
        judge("best swap", best)
    if "moving" in bench.sections:
        stage = MovingGates(model, section, own, bench.lora_lr)
        _, moved = ranked(stage)
        with stage.wrapped.disable_adapter():
            judge("moving", moved)
    return report


def print_table(report: dict[str, Any], console: Console) -> None:
    """A row for each choice."""
    table = Table("choice", "own texts", "test", "heads", title="divergence from the teacher (nats)")
    for row in report["rows"]:
        numbers = [f"{row[text]:.4f}" if text in row else "" for text in ("own", "test")]
        table.add_row(row["choice"], *numbers, " ".join(row["heads"]))
    console.print(table)


if __name__ == "__main__":
    main(globals(), HeadChoiceBench())
