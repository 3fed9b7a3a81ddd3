"""The rows of scaling.py in their order, and what `lolcats plan` says of each beforehand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from scaling_row import RowBench
from transformers import LlamaConfig
from vllm_gpu import BYTES_PER_S

from lolcats.config import AdjustSection
from lolcats.config.attention import AttentionConfig
from lolcats.plan.costs import FLOAT, WEIGHT, forward_flops
from lolcats.plan.gpus import GB, Gpu, flop_s
from lolcats.plan.known_shapes import SHAPES
from lolcats.plan.shape import ModelShape, shape_of
from lolcats.plan.ways import CHECKPOINTING, OFFLOAD, Request, best_way

TOKENS = 20_000_000  # of a stage, for its hours
MAX_MICRO_BATCH = {"transfer": 8, "adjust": 4}
UPDATE = {"transfer": 64, "adjust": 32}  # sequences of an update where strong scaling is measured
PROMPT = 8192  # tokens, in the rows of vLLM


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        bench: what scaling_row.py measures; `planned` chooses its micro-batch.
        update: sequences of an update; None: one micro-batch of each process.
        unless: name of the row that makes this one unnecessary once it is measured.
        vllm: decode and read prompts with this kind of model (vllm_gpu.py) instead.
    """

    name: str
    gpus: int
    bench: RowBench
    update: int | None = None
    unless: str | None = None
    vllm: str | None = None


def all_rows(gpus: int, base: RowBench, large: str = "llama3-405b", small: str = "llama3-70b") -> list[Row]:
    """What tells most comes first; of the large model a few layers, then all, then a third in case that all do not fit.

    Args:
        base: settings of every row.
    """
    stage_1, stage_2 = {"stage": "transfer"}, {"stage": "adjust"}
    checkpointing = stage_2 | {"gradient_checkpointing": True}

    def of_large(title: str, settings: dict[str, Any]) -> Iterator[Row]:
        layers, name = SHAPES[large]["num_hidden_layers"], f"{label(large)} {title}"
        third = max(1, layers // 3 // gpus) * gpus  # of which a pipeline's processes get equally many
        for count in dict.fromkeys((min(gpus, layers), layers, min(third, layers))):
            bench = replace(base, model=large, layers=0 if count == layers else count, **settings)
            more = f", {count} layers" if bench.layers else ""
            yield Row(name + more, gpus, bench, unless=name if count > gpus and more else None)

    def of_small(title: str, settings: dict[str, Any], number: int = gpus, update: int | None = None) -> Row:
        where = "" if number == gpus else f", {number} GPUs"
        return Row(f"{label(small)} {title}{where}", number, replace(base, model=small, **settings), update)

    def served(model: str, kind: str, title: str) -> Row:
        return Row(f"{label(model)} vLLM, {title}", gpus, replace(base, model=model), vllm=kind)

    return [
        *of_large("stage 2, checkpointing", checkpointing),
        *of_large("stage 1, sharded", stage_1),
        *of_large("stage 1, pipelined", {"mode": "pipelined"}),
        *of_large("stage 2", stage_2),
        *of_large("export to nothing", {"stage": "export"}),
        *(
            of_small(title, settings, number, UPDATE[settings["stage"]])
            for number in (gpus, gpus // 2, gpus // 4)
            if number > 1
            for title, settings in (("stage 1, sharded", stage_1), ("stage 2", stage_2))
        ),
        of_small("stage 1, pipelined", {"mode": "pipelined"}),
        of_small("stage 2, checkpointing", checkpointing),
        served(large, "linear", "all heads linear"),
        served(small, "linear", "all heads linear"),
        served(small, "softmax", "softmax"),
        *of_large("stage 2, checkpointing and offload", checkpointing | {"cpu_offload": True}),
        of_small("export to a disk", {"stage": "export", "sink": "disk"}),
    ]


def label(model: str) -> str:
    return model.removeprefix("llama3-")


def planned(row: Row, gpu: Gpu) -> tuple[Row, dict[str, Any]]:
    """The row with the largest micro-batch that fits, and its plan.

    Returns:
        gb (10^9 bytes on a GPU, without those of validation, which no row has), tokens_per_second, hours of TOKENS,
        all_layers_hours of a row with fewer layers, host_gb of offloaded weights, missing (why it does not fit, or
        None). `lolcats plan` knows nothing of exports and of vLLM: of these a bound by the bytes that are moved.
    """
    if row.vllm:
        return row, _served(row, gpu)
    if row.bench.stage == "export":
        return row, _exported(row, gpu)
    bench, pipelined = row.bench, row.bench.mode == "pipelined"
    mode = "pipelined" if pipelined else {"transfer": "sharded", "adjust": "lora-sharded"}[bench.stage]
    options = ((CHECKPOINTING,) if bench.gradient_checkpointing else ()) + ((OFFLOAD,) if bench.cpu_offload else ())
    ranks = 1 if pipelined else row.gpus

    def way(layers: int, micro_batch: int | None = None) -> Any:
        shape = _shape(bench.model, layers)
        request = Request(
            gpu,
            gpus=row.gpus,
            tokens=TOKENS,
            sequence_length=bench.tokens,
            batch_size=MAX_MICRO_BATCH[bench.stage] * ranks,
            micro_batch_size=micro_batch,
            block_layers=-(-len(shape.layers) // row.gpus) if pipelined else None,
        )
        return best_way(shape, request, mode, options)

    own = way(bench.layers)
    size = own.micro_batch_size
    accumulate = max(1, row.update // (size * ranks)) if row.update else 1
    plan = {
        "gb": (own.memory.peak - own.memory.validation) / GB,
        "tokens_per_second": TOKENS / own.seconds,
        "hours": own.hours,
        "missing": own.missing,
    }
    if bench.layers:
        plan["all_layers_hours"] = way(0, size).hours
    if bench.cpu_offload:
        plan["host_gb"] = own.host / GB
    return replace(row, bench=replace(bench, micro_batch=size, accumulate=accumulate)), plan


def _exported(row: Row, gpu: Gpu) -> dict[str, Any]:
    """Rank 0 holds a whole layer beside its shard; its bytes pass to the host, and to a disk."""
    shape = _shape(row.bench.model, row.bench.layers)
    adapters = (shape.feature_parameters + shape.lora_parameters(row.bench.lora_rank)) * FLOAT
    gathered = max(shape.embedding, *(layer.parameters for layer in shape.layers)) * WEIGHT
    gb = (shape.parameters * WEIGHT / row.gpus + adapters + gathered) / GB
    speed = gpu.host_gb_s if row.bench.sink == "null" else Request(gpu).disk_gb_s
    return {"gb": gb, "seconds": shape.parameters * WEIGHT / GB / speed, "missing": _missing(gb, gpu)}


def _served(row: Row, gpu: Gpu) -> dict[str, Any]:
    """Decoding of one sequence reads all weights and its cache once a token."""
    softmax = row.vllm == "softmax"
    shape, weights = _shape(row.bench.model, softmax=softmax), _shape(row.bench.model).parameters * WEIGHT
    one = _one_layer(row.bench.model)
    sequence = (one.softmax if softmax else one).cache_bytes(PROMPT) * len(shape.layers)
    gb = weights / row.gpus / GB
    return {
        "gb": gb,
        "prefill_tokens_per_second": row.gpus * flop_s(gpu, "frozen", shape.hidden) / forward_flops(shape, PROMPT),
        "decode_tokens_per_second": row.gpus * BYTES_PER_S / (weights + sequence),
        "mib_per_sequence": sequence / 2**20,
        "missing": _missing(gb, gpu),
    }


def _missing(gb: float, gpu: Gpu) -> str | None:
    return f"needs {gb:.0f} GB on a GPU with {gpu.memory_gb:g} GB" if gb > gpu.memory_gb else None


@cache
def _one_layer(model: str) -> ModelShape:
    return shape_of(LlamaConfig(**SHAPES[model] | {"num_hidden_layers": 1}), AttentionConfig(), AdjustSection())


def _shape(model: str, layers: int = 0, *, softmax: bool = False) -> ModelShape:
    """Of so many layers, all alike; 0: all of the shape's."""
    one = _one_layer(model).softmax if softmax else _one_layer(model)
    return replace(one, layers=one.layers * (layers or SHAPES[model]["num_hidden_layers"]))
