"""Optimizer updates of a stage, one by one: micro-steps, averaging over processes, clipping, AdamW, reading losses."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lolcats.config import OptimSection
from lolcats.data.packed import BatchSampler
from lolcats.errors import UserError
from lolcats.parallel.group import SINGLE, Group
from lolcats.training.counters import Counters
from lolcats.training.optim import BlockOptimizer
from lolcats.training.progress import Progress, TensorBoardLog
from lolcats.training.readings import Readings
from lolcats.training.stage import Stage, TokenBatches

READ_EVERY = {"cpu": 1, "cuda": 10}
"""Updates between two readings of the losses: each one waits for the GPU."""


class Updater:
    """Makes the updates of a stage. `build_optimizers` comes before the first one.

    Attributes:
        counters: what the updates count; replaced by a checkpoint's on resuming.
        total_steps: updates of the whole stage.
        blocks: the optimizers, one for each of the stage's blocks.
        device: of the parameters.
        sequence_length: tokens of a sequence of the latest batch; 0 before the first.

    Raises:
        UserError: the data are fewer than a batch, or the processes cannot share a batch equally.
    """

    def __init__(
        self,
        stage: Stage,
        dataset: TokenBatches,
        config: OptimSection,
        seed: int,
        progress: Progress,
        log: TensorBoardLog,
        group: Group = SINGLE,
    ):
        self.stage = stage
        self.dataset = dataset
        self.config = config
        self.seed = seed
        self.progress = progress
        self.log = log
        self.group = group
        self.sampler = BatchSampler(len(dataset), config.batch_size, seed)
        self.total_steps = config.total_steps(self.sampler.steps_per_epoch)
        self.counters = Counters()
        self.readings = Readings()
        self.blocks: list[BlockOptimizer] = []
        self.device = torch.device("cpu")
        self.sequence_length = 0
        micro_batches = config.batch_size // config.micro_batch_size
        if micro_batches % group.world:
            raise UserError(
                f"{stage.name}: a batch of {config.batch_size} in micro-batches of {config.micro_batch_size} makes"
                f" {micro_batches}, which {group.world} processes cannot share equally; change {stage.name}.batch_size"
                f" or {stage.name}.micro_batch_size"
            )

    def build_optimizers(self) -> None:
        """Optimizers for the stage's blocks, whose weights must be those to begin with."""
        groups = self.stage.blocks()
        names = [name for group in groups for name in group]
        if not names or len(set(names)) != len(names) or not all(groups):
            raise ValueError("blocks() must give at least one parameter per block, under unique names")
        self.blocks = [BlockOptimizer(group, self.config, self.total_steps, self.stage.lr_factors) for group in groups]
        self.device = next(iter(groups[0].values())).device
        whole = [p for group in groups for p in group.values() if not isinstance(p, DTensor)]
        self.group.broadcast_([parameter.detach() for parameter in whole])  # all ranks begin with the same
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def optimizer_state(self) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
        """The optimizers' tensors, flat (`block/parameter/entry` -> tensor), and their schedules' plain values."""
        tensors: dict[str, Tensor] = {}
        for index, block in enumerate(self.blocks):
            tensors.update({f"{index}/{key}": tensor for key, tensor in block.tensors().items()})
        return tensors, [block.state() for block in self.blocks]

    def load_optimizer_state(self, tensors: dict[str, Tensor], schedules: list[dict[str, Any]]) -> None:
        """Take over what `optimizer_state` gave."""
        for index, (block, schedule) in enumerate(zip(self.blocks, schedules, strict=True)):
            prefix = f"{index}/"
            own = {key[len(prefix) :]: tensor for key, tensor in tensors.items() if key.startswith(prefix)}
            block.load(own, schedule)

    def update(self) -> None:
        """One optimizer update from the next batch.

        Raises:
            NonFinite: a number read here is NaN or infinite; it may be of an earlier update.
        """
        counters = self.counters
        started = time.monotonic()
        update = counters.step  # counted from 0; the step it completes, from 1
        indices = self.sampler.indices(update)
        micro_size = self.config.micro_batch_size
        own = len(indices) // self.group.world
        first = own * self.group.rank
        for start in range(first, first + own, micro_size):
            batch = self.dataset.batch(indices[start : start + micro_size])
            counters.tokens += batch["input_ids"].numel() * self.group.world
            self.sequence_length = batch["input_ids"].shape[-1]
            values = self.stage.micro_step(batch, micro_size / own)
            self.readings.add_losses(update + 1, values)
        self._average_gradients()
        for block in self.blocks:
            self.readings.add_gradients(update + 1, *block.step(update))
        counters.step += 1
        if self.readings.updates >= READ_EVERY.get(self.device.type, 1):
            self.read()
        counters.update_seconds += time.monotonic() - started

    def read(self) -> None:
        """Fetch, count and report the losses of the updates since the last reading.

        Raises:
            NonFinite: one of them is NaN or infinite.
        """
        for step, scalars in self.readings.read(self.group):
            self.counters.add_train(scalars)
            rates = self.rates(step)
            self.progress.update(step, scalars.get("loss", math.nan), max(rates), self.counters.tokens)
            self.log.scalars(step, {**{f"train/{k}": v for k, v in scalars.items()}, **_named_rates(rates)})

    def rates(self, step: int) -> list[float]:
        """Learning rate of each block in the update that completes `step`; at 0 that of the first."""
        return [block.lr(max(step - 1, 0)) for block in self.blocks]

    def _average_gradients(self) -> None:
        """Each rank has the mean over its share of the batch; FSDP averages those of divided weights itself."""
        gradients = [parameter.grad for block in self.blocks for parameter in block.parameters.values()]
        self.group.average_([grad for grad in gradients if grad is not None and not isinstance(grad, DTensor)])


def _named_rates(rates: list[float]) -> dict[str, float]:
    if len(rates) == 1:
        return {"lr": rates[0]}
    return {f"lr/block_{index}": rate for index, rate in enumerate(rates)}
