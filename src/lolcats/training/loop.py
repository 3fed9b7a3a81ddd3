"""The training loop of both stages: accumulate, clip, update, evaluate, keep the best, go on after a kill."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict
from dataclasses import dataclass
from dataclasses import field
from pathlib import Path
from typing import Any
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lolcats.config import OptimSection
from lolcats.config.deciding import NOT_DECIDING
from lolcats.data.sampler import BatchSampler
from lolcats.distributed.group import SINGLE
from lolcats.distributed.group import Group
from lolcats.errors import UserError
from lolcats.training import checkpoint
from lolcats.training.device import explain_out_of_memory
from lolcats.training.device import peak_memory_bytes
from lolcats.training.device import random_state
from lolcats.training.device import set_random_state
from lolcats.training.folder import RunFolder
from lolcats.training.optim import BlockOptimizer
from lolcats.training.optim import local_part
from lolcats.training.progress import Progress
from lolcats.training.progress import TensorBoardLog
from lolcats.training.readings import NonFinite
from lolcats.training.readings import Readings
from lolcats.training.readings import TrainingDiverged
from lolcats.training.stage import Stage
from lolcats.training.stage import TokenBatches
from lolcats.training.stage import TrainResult

__all__ = ["Stage", "TokenBatches", "TrainResult", "TrainingDiverged", "train"]

READ_EVERY = {"cpu": 1, "cuda": 10}
"""Updates between two readings of the losses: each one waits for the GPU."""


@dataclass
class _Counters:
    """The plain values that a checkpoint restores."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    update_seconds: float = 0.0
    peak_memory_bytes: int = 0
    best_step: int = -1
    best_metric: float = math.inf
    without_gain: int = 0
    stopped_early: bool = False
    train_sums: dict[str, float] = field(default_factory=dict)
    train_updates: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)


def train(
    stage: Stage,
    dataset: TokenBatches,
    config: OptimSection,
    *,
    seed: int,
    directory: Path,
    resume: bool = False,
    progress: Progress | None = None,
    tensorboard: Path | None = None,
    fingerprint: dict[str, Any] | None = None,
    group: Group = SINGLE,
    saved: Callable[[], None] = lambda: None,
) -> TrainResult:
    """Train a stage and leave the best weights in it.

    Interrupted and resumed, it ends with the same weights as an unbroken run, bit for bit on a CPU. A stage
    that was already finished is not trained again: its best weights are loaded.

    Args:
        seed: of the data order and of torch's global generators (dropout), which are seeded at the beginning
            and again at the end, so that what follows is the same after a stage that was finished before.
        directory: for checkpoints and `done.json`; used by this stage alone.
        resume: go on from what is in `directory` (or begin, if it is empty).
        progress: where to report; None: nowhere.
        tensorboard: folder for TensorBoard logs; None: none.
        fingerprint: plain values which, with `config`, `seed` and `dataset`, decide the result. They are kept
            in the checkpoints, and resuming with other values is refused.
        group: the processes that train together, each on its share of every batch. Their number may change on
            resuming: batches and decisions are the same for any, and sums differ by rounding.
        saved: called when a checkpoint is written, before the one that it replaces is removed.

    Raises:
        TrainingDiverged: something became NaN or infinite. Nothing trained with it was kept.
        UserError: `directory` is in use, belongs to another configuration, cannot be written or is damaged;
            the data are fewer than a batch; out of memory.
    """
    progress = progress or Progress()
    log = TensorBoardLog(tensorboard if group.is_main else None, stage.name)
    own = {
        "seed": seed,
        "optimizer": config.model_dump(mode="json", exclude={"enabled", *NOT_DECIDING}),
        "data": {"sequences": len(dataset), "fingerprint": dataset.info.get("fingerprint")},
    }
    deciding = {**(fingerprint or {}), "training": own}
    try:
        parameters = {name: parameter for block in stage.blocks() for name, parameter in block.items()}
        folder = RunFolder(
            directory,
            stage.name,
            _plain(deciding),
            progress.message,
            group=group,
            parameters=dict(parameters),
            saved=saved,
        )
        return Run(stage, dataset, config, seed, folder, progress, log, group).run(resume)
    finally:
        log.close()
        progress.close()


class Run:
    """One call of `train`. Benchmarks drive its updates one by one."""

    def __init__(
        self,
        stage: Stage,
        dataset: TokenBatches,
        config: OptimSection,
        seed: int,
        folder: RunFolder,
        progress: Progress,
        log: TensorBoardLog,
        group: Group = SINGLE,
    ):
        self.group = group
        self.stage = stage
        self.dataset = dataset
        self.config = config
        self.seed = seed
        self.folder = folder
        self.progress = progress
        self.log = log
        self.sampler = BatchSampler(len(dataset), config.batch_size, seed)
        self.total_steps = config.total_steps(self.sampler.steps_per_epoch)
        self.counters = _Counters()
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

    def run(self, resume: bool) -> TrainResult:
        if resume:
            finished = self.folder.finished()
            if finished is not None:
                self.stage.load_state(self.folder.best_weights(finished.best_step))
                self.progress.message(f"stage {self.stage.name}: already finished in {self.folder.path}")
                torch.manual_seed(self.seed)
                return finished
        else:
            self.folder.refuse_used()
        loaded = self.folder.latest() if resume else None
        if loaded is not None:
            self.stage.load_state(loaded.tensors["weights"])
        self.build_optimizers()
        if loaded is not None:
            self._restore(loaded)
        self.progress.start(self.stage.name, self.stage.metric, self.total_steps, self.counters.step)
        try:
            self._train(fresh=loaded is None)
        except NonFinite as found:
            raise self._diverged(found) from None
        except (RuntimeError, MemoryError) as error:
            message = explain_out_of_memory(
                error,
                self.stage.name,
                self.counters.step + 1,
                self.config,
                self.sequence_length,
                self.device,
            )
            if message is None:
                raise
            raise UserError(f"{message} {self.folder.where_to_go_on()}") from error
        return self._finish()

    def _train(self, fresh: bool) -> None:
        counters = self.counters
        started = time.monotonic() - counters.seconds
        if fresh:
            torch.manual_seed(self.seed + self.group.rank)  # so that dropout differs from rank to rank
            self._evaluate()
        while counters.step < self.total_steps and not counters.stopped_early:
            self.update()
            last = counters.step == self.total_steps
            counters.seconds = time.monotonic() - started
            if last or counters.step % self.config.eval_every == 0:
                self._evaluate()
                counters.seconds = time.monotonic() - started
            if last or counters.stopped_early or counters.step % self.config.checkpoint_every == 0:
                self._save()

    def update(self) -> None:
        """One optimizer update from the next batch."""
        counters = self.counters
        started = time.monotonic()
        update = counters.step  # counted from 0; the step it completes, from 1
        self.stage.begin_update(update, self.seed)
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
            self._read()
        counters.update_seconds += time.monotonic() - started

    def _average_gradients(self) -> None:
        """Each rank has the mean over its share of the batch; FSDP averages those of divided weights itself."""
        gradients = [parameter.grad for block in self.blocks for parameter in block.parameters.values()]
        self.group.average_([grad for grad in gradients if grad is not None and not isinstance(grad, DTensor)])

    def _read(self) -> None:
        """Fetch the losses of the updates since the last reading; stops if one is not finite."""
        counters = self.counters
        for step, scalars in self.readings.read(self.group):
            for name, value in scalars.items():
                counters.train_sums[name] = counters.train_sums.get(name, 0.0) + value
            counters.train_updates += 1
            rates = [block.lr(step - 1) for block in self.blocks]
            self.progress.update(step, scalars.get("loss", math.nan), max(rates), counters.tokens)
            self.log.scalars(step, {**{f"train/{k}": v for k, v in scalars.items()}, **_named_rates(rates)})

    def _evaluate(self) -> None:
        self._read()
        counters = self.counters
        results = self.group.broadcast(_plain(self.stage.evaluate()))
        metric = results[self.stage.metric]
        block_metrics = results.get("block_metrics") or [metric] * len(self.blocks)
        if len(block_metrics) != len(self.blocks):
            raise ValueError(f"evaluate() gave {len(block_metrics)} block_metrics for {len(self.blocks)} blocks")
        for name, value in [(self.stage.metric, metric), *enumerate(block_metrics)]:
            if not math.isfinite(value):
                what = name if name == self.stage.metric else f"{self.stage.metric} of block {name}"
                raise NonFinite(counters.step, f"the validation {what}", value)
        updates = counters.train_updates
        entry = {
            "step": counters.step,
            "tokens": counters.tokens,
            "seconds": counters.seconds,
            "lr": [block.lr(max(counters.step - 1, 0)) for block in self.blocks],
            "train": {name: total / updates for name, total in counters.train_sums.items()},
            **results,
        }
        counters.history.append(entry)
        counters.train_sums = {}
        counters.train_updates = 0
        if metric < counters.best_metric:
            counters.best_metric = metric
            counters.best_step = counters.step
            counters.without_gain = 0
            self.folder.save_best(counters.step, metric, self._finite_weights())
        else:
            counters.without_gain += 1
        patience = self.config.early_stopping
        counters.stopped_early = patience is not None and counters.without_gain >= patience
        for block, value in zip(self.blocks, block_metrics, strict=True):
            block.evaluated(value)
        self.progress.evaluated(counters.step, metric, counters.best_step == counters.step)
        numbers = {f"validation/{k}": v for k, v in results.items() if isinstance(v, int | float)}
        self.log.scalars(counters.step, numbers)

    def _save(self) -> None:
        self._read()
        counters = self.counters
        counters.peak_memory_bytes = max(counters.peak_memory_bytes, *self.group.gather(peak_memory_bytes(self.device)))
        optimizer: dict[str, Tensor] = {}
        for index, block in enumerate(self.blocks):
            optimizer.update({f"{index}/{key}": tensor for key, tensor in block.tensors().items()})
        state = {
            "counters": asdict(counters),
            "schedules": [block.state() for block in self.blocks],
            "random": self.group.gather(random_state(self.device)),
        }
        tensors = {"weights": self._finite_weights(), "optimizer": optimizer}
        self.folder.save(counters.step, counters.best_step, tensors, state)

    def _finite_weights(self) -> dict[str, Tensor]:
        weights = self.stage.state()
        found = None
        for name, tensor in weights.items():
            part = local_part(tensor)
            if not bool(torch.isfinite(part).all()):
                found = name, part[~torch.isfinite(part)].flatten()[0].item()
                break
        for problem in self.group.gather(found):
            if problem is not None:
                raise NonFinite(self.counters.step, f"the weight {problem[0]}", problem[1])
        return weights

    def build_optimizers(self) -> None:
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

    def _restore(self, loaded: checkpoint.Checkpoint) -> None:
        self.counters = _Counters(**loaded.state["counters"])
        for index, (block, state) in enumerate(zip(self.blocks, loaded.state["schedules"], strict=True)):
            prefix = f"{index}/"
            flat = loaded.tensors["optimizer"]
            block.load({key[len(prefix) :]: t for key, t in flat.items() if key.startswith(prefix)}, state)
        self._restore_random(loaded.state["random"])
        self.progress.message(f"stage {self.stage.name}: going on from {loaded.path}")

    def _restore_random(self, states: list[dict[str, str]]) -> None:
        """Every rank's own state; with another number of ranks than before, new ones."""
        if len(states) == self.group.world:
            set_random_state(states[self.group.rank], self.device)
        else:
            torch.manual_seed(hash((self.seed, self.counters.step, self.group.rank)))

    def _finish(self) -> TrainResult:
        counters = self.counters
        self.stage.load_state(self.folder.best_weights(counters.best_step))
        result = TrainResult(
            steps=counters.step,
            tokens=counters.tokens,
            seconds=counters.seconds,
            tokens_per_second=counters.tokens / max(counters.update_seconds, 1e-9),
            peak_memory_bytes=counters.peak_memory_bytes,
            best_step=counters.best_step,
            best_metric=counters.best_metric,
            history=counters.history,
            stopped_early=counters.stopped_early,
        )
        self.folder.finish(result)
        # what comes next (the next stage's initial weights) must not depend on whether this stage was skipped
        torch.manual_seed(self.seed)
        return result

    def _diverged(self, found: NonFinite) -> TrainingDiverged:
        if found.step == 0:
            advice = "This was before training: check the model, its dtype and the validation data."
        else:
            section = self.stage.name
            clip = "" if self.config.clip_norm is not None else f" and set {section}.clip_norm"
            lower = f"Lower {section}.lr (now {self.config.lr:g}){clip}, in a new run."
            advice = f"{self.folder.where_to_go_on()} {lower}"
        diverged = TrainingDiverged(self.stage.name, found.step, found.what, found.value, advice, found.rank)
        self.group.common(diverged)
        return diverged


def _named_rates(rates: list[float]) -> dict[str, float]:
    if len(rates) == 1:
        return {"lr": rates[0]}
    return {f"lr/block_{index}": rate for index, rate in enumerate(rates)}


_Value = TypeVar("_Value")


def _plain(value: _Value) -> _Value:
    """The value with tensors and numpy numbers replaced by JSON values, and mapping keys by strings."""
    result: Any = value
    if isinstance(value, Tensor | np.ndarray | np.generic):
        result = value.tolist()
    elif isinstance(value, dict):
        result = {str(key): _plain(item) for key, item in value.items()}
    elif isinstance(value, list | tuple):
        result = [_plain(item) for item in value]
    return result
