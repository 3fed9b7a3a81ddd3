"""Speed and memory of both training stages on models of known shapes with random weights.

python benchmarks/train.py --model llama3-8b --micro-batches 4,8 --json benchmarks/results/train_h200.json
python benchmarks/train.py --model smollm2-135m --sinks 1 --train-feature-maps --position-offset 7168
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from bench_tools import (
    check_shape,
    describe,
    free,
    main,
    memory_gib,
    quantile,
    random_model,
    settings_json,
    step_samples,
    weight_gib,
)
from rich.console import Console
from rich.table import Table
from verify import verify_shape

from lolcats.config import AdjustSection, TransferSection
from lolcats.config.attention import AttentionConfig
from lolcats.data import PackedDataset
from lolcats.errors import UserError
from lolcats.modeling.fused import fused_kernels
from lolcats.plan import SHAPES
from lolcats.provenance import provenance
from lolcats.training.attention_transfer import TransferStage
from lolcats.training.finetune import AdjustStage
from lolcats.training.graphs import WARM_UP
from lolcats.training.loop import Trainer

# transfer, adjust: the two stages; softmax: stage 2's step with the original attention (the LoRA control)
ROWS = ("transfer", "adjust", "softmax")
FEATURE_LR = 1e-3  # of feature maps in stage 2, as in lolcats-linear


@dataclass(frozen=True)
class TrainBench:
    """What to measure."""

    model: str = "smollm2-135m" if torch.cuda.is_available() else "tiny"
    rows: tuple[str, ...] = ROWS
    micro_batches: tuple[int, ...] = (8,) if torch.cuda.is_available() else (2,)
    accumulate: int = 1  # micro-batches of an optimizer update
    tokens: int = 1024 if torch.cuda.is_available() else 64  # of a sequence
    label_share: float = 1.0  # of the tokens that are labels in stage 2, at the end of every sequence
    steps: int = 20
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    lora_rank: int = 8
    train_feature_maps: bool = False  # in stage 2, at FEATURE_LR
    distill_factor: float = 0.0  # in stage 2
    position_offset: int = 0  # of `lolcats.data.PackedDataset`, with one jump
    gradient_checkpointing: bool = False
    fused_kernels: str = "auto"
    cuda_graphs: str = "auto"
    dtype: str = "bfloat16" if torch.cuda.is_available() else "float32"
    device: str = "cuda" if torch.cuda.is_available() else "cpu"


def run(
    bench: TrainBench, console: Console, keep: Callable[[dict[str, Any]], object] = lambda report: None
) -> dict[str, Any]:
    """Measure every row at every micro-batch size; what cannot run says why.

    Args:
        keep: gets the report after every row, so that an interrupted run loses nothing.
    """
    _check(bench)
    rows: list[dict[str, Any]] = []
    errors = verify_shape(bench.model, bench.attention, ("train", "stage1"), bench.dtype, bench.device)
    origin = {"provenance": provenance(), "relative_errors": errors}
    report = {"settings": settings_json(bench), **origin, "rows": rows}
    keep(report)  # a file that cannot be written shows now
    for micro_batch in bench.micro_batches:
        for name in bench.rows:
            row: dict[str, Any] = {"row": name, "micro_batch": micro_batch, "tokens": bench.tokens}
            try:
                row |= _measure(bench, name, micro_batch, console)
            except RuntimeError as error:  # out of memory is a result, too
                row["error"] = describe(error)
            rows.append(row)
            keep(report)
            console.print(_line(row), highlight=False)
    return report


def random_data(bench: TrainBench, sequences: int) -> PackedDataset:
    """Random tokens; the last `label_share` of every sequence are labels."""
    vocabulary = SHAPES[bench.model]["vocab_size"]
    tokens_NT = np.random.default_rng(0).integers(vocabulary, size=(sequences, bench.tokens), dtype=np.int32)
    label_NT = np.zeros(tokens_NT.shape, dtype=np.bool_)
    label_NT[:, max(1, round(bench.tokens * (1.0 - bench.label_share))) :] = True
    jumps = 1 if bench.position_offset else 0
    return PackedDataset(tokens_NT, label_NT, position_offset=bench.position_offset, position_jumps=jumps)


@contextmanager
def updates(
    bench: TrainBench,
    name: str,
    micro_batch: int,
    console: Console,
) -> Iterator[Callable[[], object]]:
    """A row's step as a function of nothing: an optimizer update as the training loop makes it."""
    made: dict[str, Any] = {"tokens": bench.tokens, "dtype": bench.dtype, "device": bench.device, "use_cache": False}
    model = random_model(bench.model, bench.attention, **made)
    batch = micro_batch * bench.accumulate
    data = random_data(bench, 4 * batch)
    common: dict[str, Any] = {
        "batch_size": batch,
        "micro_batch_size": micro_batch,
        "max_steps": 10**6,
        "schedule": "constant",
        "fused_kernels": bench.fused_kernels,
        "cuda_graphs": bench.cuda_graphs,
    }
    stage: TransferStage | AdjustStage
    config: TransferSection | AdjustSection
    if name == "transfer":
        config = TransferSection(**common)
        stage = TransferStage(model, config, data, report=console.print)
    else:
        adjust: dict[str, Any] = {
            "lora_rank": bench.lora_rank,
            "gradient_checkpointing": bench.gradient_checkpointing,
            "softmax_control": name == "softmax",
        }
        if bench.train_feature_maps and name == "adjust":
            adjust |= {"train_feature_maps": True, "feature_lr": FEATURE_LR}
        if name == "adjust":
            adjust["distill_factor"] = bench.distill_factor
        config = AdjustSection(**common, **adjust)
        stage = AdjustStage(model, config, data, report=console.print)
    with fused_kernels(model, bench.fused_kernels):
        trainer = Trainer(stage, data, config, seed=0)
        yield trainer.update
    stage.graphs.release()


def _measure(bench: TrainBench, name: str, micro_batch: int, console: Console) -> dict[str, Any]:
    device = torch.device(bench.device)
    free(device)
    with updates(bench, name, micro_batch, console) as step:
        for _ in range(WARM_UP + 2):  # kernels are compiled, graphs captured
            step()
        samples_ms = step_samples(step, bench.steps, device)
    tokens = micro_batch * bench.accumulate * bench.tokens
    ordered = sorted(samples_ms)
    p10, median, p90 = (quantile(ordered, share) for share in (0.1, 0.5, 0.9))
    memory = {"weights_gib": weight_gib(bench.model, bench.dtype), **memory_gib(device)}
    peak_gib, weights_gib = memory["peak_gib"], memory["weights_gib"]
    memory["beyond_weights_gib"] = None if peak_gib is None or weights_gib is None else peak_gib - weights_gib
    return {
        "tokens_per_second": tokens / median * 1e3,
        "tokens_per_second_p10": tokens / p90 * 1e3,
        "tokens_per_second_p90": tokens / p10 * 1e3,
        "step_ms": median,
        "steps": len(samples_ms),
        **memory,
    }


def _check(bench: TrainBench) -> None:
    check_shape(bench.model)
    unknown = [name for name in bench.rows if name not in ROWS]
    if unknown:
        raise UserError(f"no row named {unknown[0]!r}; there are {', '.join(ROWS)}")


def _line(row: dict[str, Any]) -> str:
    head = f"{row['micro_batch']:>3} x {row['tokens']:<6}{row['row']:<9}"
    if "error" in row:
        return f"{head} {row['error']}"
    line = f"{head} {row['tokens_per_second']:10,.0f} tokens/s  {row['step_ms']:9.2f} ms"
    if row["peak_gib"] is not None:
        line += f"  peak {row['peak_gib']:.1f} GiB ({row['beyond_weights_gib']:.1f} beyond the weights)"
    return line


def print_table(report: dict[str, Any], console: Console) -> None:
    """One line a row."""
    settings = report["settings"]
    title = f"{settings['model']}, {settings['dtype']}, {report['provenance']['device']}"
    table = Table("micro-batch x tokens", "row", "tokens/s", "p10 to p90", "ms/step", "peak GiB", title=title)
    for row in report["rows"]:
        size = f"{row['micro_batch']} x {row['tokens']}"
        if "error" in row:
            table.add_row(size, row["row"], row["error"])
            continue
        spread = f"{row['tokens_per_second_p10']:,.0f} to {row['tokens_per_second_p90']:,.0f}"
        peak = "-" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}"
        table.add_row(size, row["row"], f"{row['tokens_per_second']:,.0f}", spread, f"{row['step_ms']:.2f}", peak)
    console.print(table)


if __name__ == "__main__":
    main(globals(), TrainBench())
