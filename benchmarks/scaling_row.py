"""One row of scaling.py: a training stage or the export of a model with random weights, over all processes.

    torchrun --nproc-per-node 4 benchmarks/scaling_row.py --model llama3-70b --stage adjust --micro-batch 4
    torchrun --nproc-per-node 8 benchmarks/scaling_row.py --model llama3-405b --layers 40 --mode pipelined
    python benchmarks/scaling_row.py --model llama3-405b --layers 9 --micro-batch 8 --json block.json

Every process makes its share of the weights where it is needed. Tokens/s are of all processes together. Without a GPU
it runs a tiny model.
"""

from __future__ import annotations

import os
import resource
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from accelerate import init_empty_weights
from bench_tools import (
    check_shape,
    describe,
    free,
    memory_gib,
    parser,
    quantile,
    saver,
    settings,
    settings_json,
    shape_config,
    step_samples,
    synchronize,
)
from rich.console import Console
from torch import Tensor, nn
from train import TrainBench, random_data, updates
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights

from lolcats.checkpoint import write
from lolcats.config import AdjustSection, TransferSection
from lolcats.config.attention import AttentionConfig
from lolcats.conversion import convert
from lolcats.errors import UserError
from lolcats.modeling.decoder import decoder_layers
from lolcats.modeling.model import LolcatsForCausalLM
from lolcats.parallel.blockwise.layers import LayerBlock, divide
from lolcats.parallel.blockwise.modes import pipeline_ends
from lolcats.parallel.blockwise.transfer import SPLITS, BlockwiseTransfer
from lolcats.parallel.errors import is_communication_error
from lolcats.parallel.group import Group
from lolcats.parallel.launch import open_group
from lolcats.parallel.sharding import fill, place_replicated, shard
from lolcats.provenance import provenance
from lolcats.training.finetune import AdjustStage
from lolcats.training.graphs import WARM_UP
from lolcats.training.loop import Trainer
from lolcats.training.optim import local_part

DEVIATION = 0.02  # of random weights: activations stay finite in any depth
STAGES = ("transfer", "adjust", "softmax", "export")
MODES = ("sharded", "replicated", "pipelined")
SINKS = ("null", "disk")


@dataclass(frozen=True)
class RowBench:
    """What to measure."""

    model: str = TrainBench.model
    stage: str = "transfer"  # softmax: stage 2 with the original attention; export: after stage 2
    mode: str = "sharded"  # where the weights are; pipelined: stage 1, each process holds consecutive layers
    layers: int = 0  # of the decoder; 0: all of the shape's, fewer keep each layer's shape
    micro_batch: int = 1
    accumulate: int = 1  # micro-batches of each process in an update
    tokens: int = TrainBench.tokens  # of a sequence
    gradient_checkpointing: bool = False
    cpu_offload: bool = False  # shares of the weights in CPU memory
    lora_rank: int = 8
    fused_kernels: str = "auto"
    sink: str = "null"  # of an export; disk: files are written, and emptied at once
    seconds: float = 20.0  # of measured steps
    dtype: str = TrainBench.dtype
    device: str = TrainBench.device

    def __post_init__(self) -> None:
        check_shape(self.model)
        for name, values in (("stage", STAGES), ("mode", MODES), ("sink", SINKS)):
            if getattr(self, name) not in values:
                raise UserError(f"--{name} {getattr(self, name)}: expected one of {', '.join(values)}")
        if self.mode == "pipelined" and self.stage != "transfer":
            raise UserError(f"--mode pipelined is for --stage transfer, not {self.stage}")

    @property
    def train(self) -> TrainBench:
        """The same as benchmarks/train.py has it."""
        return TrainBench(
            model=self.model,
            accumulate=self.accumulate,
            tokens=self.tokens,
            lora_rank=self.lora_rank,
            gradient_checkpointing=self.gradient_checkpointing,
            fused_kernels=self.fused_kernels,
            dtype=self.dtype,
            device=self.device,
        )


def run(bench: RowBench, group: Group, console: Console) -> dict[str, Any]:
    """Measure the row; all processes call this and get the same report."""
    device = group.device or torch.device(bench.device)
    free(device)
    measured = _export(bench, group, device) if bench.stage == "export" else _steps(bench, group, device, console)
    memory = group.gather(memory_gib(device) | {"host_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20})
    return {
        "settings": settings_json(bench),
        "processes": group.world,
        "provenance": provenance(),
        **measured,
        "peak_gib": [rank["peak_gib"] for rank in memory],
        "reserved_gib": [rank["reserved_gib"] for rank in memory],
        "host_peak_gib": [rank["host_gib"] for rank in memory],
    }


# --- models -------------------------------------------------------------------------------------------------------


def build(bench: RowBench, group: Group) -> LolcatsForCausalLM:
    """A linearized model with random weights; every process makes only its share of them."""
    device = group.device or torch.device(bench.device)
    model, base = _skeleton(bench, device)
    tied = base.get_output_embeddings().weight is base.get_input_embeddings().weight
    if group.world > 1 and bench.mode == "sharded":
        shard(model, group, cpu_offload=bench.cpu_offload)
    fill(model, lambda _, parameter: _random(parameter, device), device, cpu_offload=bench.cpu_offload)
    if tied:
        base.get_output_embeddings().weight = base.get_input_embeddings().weight
    return model


def _skeleton(bench: RowBench, device: torch.device) -> tuple[LolcatsForCausalLM, Any]:
    """The linearized model and its base on the meta device, feature maps and buffers on `device`."""
    config = shape_config(bench.model, bench.tokens, bench.layers or None, use_cache=False)
    with init_empty_weights(include_buffers=False), no_init_weights():
        base = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, bench.dtype))
    base.tie_weights()
    model = convert(base.eval(), AttentionConfig())
    place_replicated(model, device)
    return model, base


def _random(parameter: Tensor, device: torch.device) -> Tensor:
    part = torch.empty(local_part(parameter).shape, dtype=parameter.dtype, device=device)
    return part.fill_(1.0) if parameter.dim() == 1 else part.normal_(0.0, DEVIATION)


class RandomParts:
    """In place of `PartialModel`: the layers of one block, and the embedding for the first one, with random weights."""

    def __init__(self, bench: RowBench, device: torch.device, group: Group) -> None:
        self.model, _ = _skeleton(bench, device)
        self.device = device
        linear = [index for index, _ in self.model.linear_layers()]
        self.blocks = divide(linear, -(-len(linear) // group.world), group.world)
        block = self.blocks[group.rank]
        for index, module in self.model.linear_layers():
            if not block.begin <= index < block.end:
                module.to("cpu")
        used = list(decoder_layers(self.model)[1][block.begin : block.end])
        used += [] if block.index else [self.model.get_input_embeddings()]
        for module in (inner for part in used for inner in part.modules()):
            for key, parameter in module._parameters.items():
                if parameter is not None and parameter.is_meta:
                    module._parameters[key] = nn.Parameter(_random(parameter, device), requires_grad=False)

    def parts_of(self, block: LayerBlock) -> list[str]:
        return []

    @contextmanager
    def loaded(self) -> Iterator[None]:
        yield


# --- measurements -------------------------------------------------------------------------------------------------


def _steps(bench: RowBench, group: Group, device: torch.device, console: Console) -> dict[str, Any]:
    """Optimizer updates as the training loop makes them."""
    began_s = time.perf_counter()
    made = (
        _pipelined(bench, group, device, console)
        if bench.mode == "pipelined"
        else updates(
            bench.train, bench.stage, bench.micro_batch, console, group=group, build=lambda _: build(bench, group)
        )
    )
    with made as step:
        built_s = time.perf_counter() - began_s
        console.print(f"built after {built_s:.1f} s")
        for _ in range(WARM_UP + 1):
            step()
        synchronize(device)
        warm_s = time.perf_counter() - began_s - built_s
        console.print(f"warm after {warm_s:.1f} s more")
        begin_s = time.perf_counter()
        step()
        synchronize(device)
        once_s = group.broadcast(time.perf_counter() - begin_s)  # all ranks make equally many steps
        samples_ms = step_samples(step, max(3, min(1000, int(bench.seconds / once_s))), device)
    ordered = sorted(samples_ms)
    median_ms = max(group.gather(quantile(ordered, 0.5)))
    shares = 1 if bench.mode == "pipelined" else group.world  # of an update's sequences
    return {
        "tokens_per_second": bench.micro_batch * bench.accumulate * shares * bench.tokens / median_ms * 1e3,
        "step_ms": median_ms,
        "step_ms_p10": quantile(ordered, 0.1),
        "step_ms_p90": quantile(ordered, 0.9),
        "steps": len(samples_ms),
        "build_s": built_s,
        "warm_up_s": warm_s,
    }


@contextmanager
def _pipelined(bench: RowBench, group: Group, device: torch.device, console: Console) -> Iterator[Callable[[], object]]:
    """Stage 1 with this process's layers: hidden states come from the process before it and go to the next."""
    if group.world == 1:
        raise UserError("--mode pipelined needs several processes: start with torchrun, one process per GPU")
    parts: Any = RandomParts(bench, device, group)
    batch = bench.micro_batch * bench.accumulate
    data = random_data(bench.train, 4 * batch)
    section = TransferSection(
        batch_size=batch,
        micro_batch_size=bench.micro_batch,
        max_steps=10**6,
        schedule="constant",
        fused_kernels=bench.fused_kernels,
    )
    nothing: Any = None  # no checkpoint, tokenizer or folder is used
    datasets = dict.fromkeys(SPLITS, data)
    opened = BlockwiseTransfer(nothing, section, parts.blocks, parts, nothing, datasets, nothing, {}, console)
    block = parts.blocks[group.rank]
    sources, sender = pipeline_ends(opened, block, group)
    with opened.stage(block, sources, sender) as (stage, of_block):
        yield Trainer(stage, of_block["train"], section, seed=0).update
        if sender is not None:
            sender.wait()


def _export(bench: RowBench, group: Group, device: torch.device) -> dict[str, Any]:
    """The whole model with merged adapters, a decoder layer and a file of 5 GB at a time, to where nothing is kept."""
    began_s = time.perf_counter()
    data = random_data(bench.train, 4)
    config = AdjustSection(batch_size=group.world, micro_batch_size=1, lora_rank=bench.lora_rank)
    model = AdjustStage(build(bench, group), config, data, group=group).model
    built_s, written = time.perf_counter() - began_s, [0]
    save_file = write.save_file

    def save(tensors: dict[str, Tensor], file: Path, **options: Any) -> None:
        written[0] += sum(tensor.nbytes for tensor in tensors.values())
        if bench.sink == "disk":
            save_file(tensors, file, **options)
        file.write_bytes(b"")

    synchronize(device)
    begin_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, patch.object(write, "save_file", save):
        write.export(model, _NoTokenizer(), Path(folder), group, report={}, card="")
    group.barrier()
    return {"export_s": time.perf_counter() - begin_s, "bytes": group.broadcast(written[0]), "build_s": built_s}


class _NoTokenizer:
    def save_pretrained(self, folder: Path) -> None:
        """There is none."""


def main() -> None:
    defaults = RowBench()
    given = parser(defaults, __doc__).parse_args()
    keep = saver(given.json)
    bench = settings(defaults, given)
    with open_group(bench.device) as group:
        try:
            report = run(bench, group, Console(stderr=True, width=200, quiet=not group.is_main))
        except Exception as error:
            if is_communication_error(error):
                raise  # another process's failure, which that one writes
            with suppress(UserError):  # several may write at once
                keep({"settings": settings_json(bench), "error": f"rank {group.rank}: {describe(error)}"})
            traceback.print_exc()
            os._exit(1)  # at once, as leaving the group may wait for processes that wait for this one
        if group.is_main:
            keep(report)
            for name, value in report.items():
                if name not in ("settings", "provenance"):
                    print(f"{name}: {value}")


if __name__ == "__main__":
    main()
