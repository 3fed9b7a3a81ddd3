"""The training loop of both stages: update, evaluate, keep the best, save, go on after a kill."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from lolcats.config import OptimSection
from lolcats.config.fingerprint import RESUME_MUTABLE_FIELDS
from lolcats.errors import UserError
from lolcats.parallel.group import SINGLE, Group
from lolcats.training.checkpoint import Checkpoint
from lolcats.training.counters import Counters
from lolcats.training.device import explain_out_of_memory, peak_memory_bytes, random_state, set_random_state
from lolcats.training.folder import RunFolder
from lolcats.training.optim import local_part
from lolcats.training.progress import Progress, TensorBoardLog
from lolcats.training.readings import NonFinite, TrainingDiverged
from lolcats.training.stage import Stage, TokenBatches, TrainResult
from lolcats.training.updates import Updater


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
    try:
        parameters = {name: parameter for block in stage.blocks() for name, parameter in block.items()}
        folder = RunFolder(
            directory,
            stage.name,
            stage_fingerprint(config, dataset, seed, fingerprint or {}),
            progress.message,
            group=group,
            parameters=dict(parameters),
            saved=saved,
        )
        updater = Updater(stage, dataset, config, seed, progress, log, group)
        return _Run(updater, folder).run(resume)
    finally:
        log.close()
        progress.close()


def stage_fingerprint(config: OptimSection, dataset: TokenBatches, seed: int, values: dict[str, Any]) -> dict[str, Any]:
    """Plain values that decide the result of `train`: `values`, and what the loop adds."""
    own = {
        "seed": seed,
        "optimizer": config.model_dump(mode="json", exclude={"enabled", *RESUME_MUTABLE_FIELDS}),
        "data": {"sequences": len(dataset), "fingerprint": dataset.info.get("fingerprint")},
    }
    return _plain({**values, "training": own})


class _Run:
    """One call of `train`: what surrounds the updates."""

    def __init__(self, updater: Updater, folder: RunFolder):
        self.updater = updater
        self.folder = folder
        self.stage = updater.stage
        self.config = updater.config
        self.seed = updater.seed
        self.progress = updater.progress
        self.log = updater.log
        self.group = updater.group

    @property
    def counters(self) -> Counters:
        return self.updater.counters

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
        self.updater.build_optimizers()
        if loaded is not None:
            self._restore(loaded)
        self.progress.start(self.stage.name, self.stage.metric, self.updater.total_steps, self.counters.step)
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
                self.updater.sequence_length,
                self.updater.device,
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
        while counters.step < self.updater.total_steps and not counters.stopped_early:
            self.updater.update()
            last = counters.step == self.updater.total_steps
            counters.seconds = time.monotonic() - started
            if last or counters.step % self.config.eval_every == 0:
                self._evaluate()
                counters.seconds = time.monotonic() - started
            if last or counters.stopped_early or counters.step % self.config.checkpoint_every == 0:
                self._save()

    def _evaluate(self) -> None:
        self.updater.read()
        counters = self.counters
        blocks = self.updater.blocks
        results = self.group.broadcast(_plain(self.stage.evaluate()))
        metric = results[self.stage.metric]
        block_metrics = results.get("block_metrics") or [metric] * len(blocks)
        if len(block_metrics) != len(blocks):
            raise ValueError(f"evaluate() gave {len(block_metrics)} block_metrics for {len(blocks)} blocks")
        for name, value in [(self.stage.metric, metric), *enumerate(block_metrics)]:
            if not math.isfinite(value):
                what = name if name == self.stage.metric else f"{self.stage.metric} of block {name}"
                raise NonFinite(counters.step, f"the validation {what}", value)
        entry = {
            "step": counters.step,
            "tokens": counters.tokens,
            "seconds": counters.seconds,
            "lr": self.updater.rates(counters.step),
            "train": counters.take_train(),
            **results,
        }
        counters.history.append(entry)
        is_best = counters.evaluated(metric, self.config.early_stopping)
        if is_best:
            self.folder.save_best(counters.step, metric, self._finite_weights())
        for block, value in zip(blocks, block_metrics, strict=True):
            block.evaluated(value)
        self.progress.evaluated(counters.step, metric, is_best)
        numbers = {f"validation/{k}": v for k, v in results.items() if isinstance(v, int | float)}
        self.log.scalars(counters.step, numbers)

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

    def _save(self) -> None:
        self.updater.read()
        counters, device = self.counters, self.updater.device
        counters.peak_memory_bytes = max(counters.peak_memory_bytes, *self.group.gather(peak_memory_bytes(device)))
        optimizer, schedules = self.updater.optimizer_state()
        state = {
            "counters": asdict(counters),
            "schedules": schedules,
            "random": self.group.gather(random_state(device)),
        }
        tensors = {"weights": self._finite_weights(), "optimizer": optimizer}
        self.folder.save(counters.step, counters.best_step, tensors, state)

    def _restore(self, loaded: Checkpoint) -> None:
        self.updater.counters = Counters(**loaded.state["counters"])
        self.updater.load_optimizer_state(loaded.tensors["optimizer"], loaded.state["schedules"])
        self._restore_random(loaded.state["random"])
        self.progress.message(f"stage {self.stage.name}: going on from {loaded.path}")

    def _restore_random(self, states: list[dict[str, str]]) -> None:
        """Every rank's own state; with another number of ranks than before, new ones."""
        if len(states) == self.group.world:
            set_random_state(states[self.group.rank], self.updater.device)
        else:
            torch.manual_seed(hash((self.seed, self.counters.step, self.group.rank)))

    def _finish(self) -> TrainResult:
        self.stage.load_state(self.folder.best_weights(self.counters.best_step))
        result = self.counters.result()
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
