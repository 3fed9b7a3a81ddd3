"""The training loop of both stages: update, evaluate, keep the best, save, resume.

It knows nothing about attention: a stage (`stage.py`) gives it blocks of parameters, a micro-step and an evaluation.
"""

from __future__ import annotations

import json
import math
import os
import signal
import threading
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import Any

import torch
from rich.console import Console

from lolcats.config import RESUME_MUTABLE_FIELDS, OptimSection
from lolcats.data.packed import BatchSampler, PackedDataset
from lolcats.errors import Terminated, UserError
from lolcats.training.checkpoint import list_checkpoints, read_checkpoint, refuse_other_settings, write_checkpoint
from lolcats.training.device import explain_out_of_memory, peak_memory_bytes, random_state, set_random_state
from lolcats.training.metrics import MetricBuffer, NonFinite, TrainingDiverged
from lolcats.training.optim import BlockOptimizer
from lolcats.training.progress import Progress
from lolcats.training.stage import Stage, TrainState, set_weights, weights_of

READ_EVERY = {"cpu": 1, "cuda": 10}
"""Updates between two readings of the losses: each one waits for the GPU."""
FEW_UPDATES = 100
SAVE_AFTER_S = 600.0
"""A checkpoint is written after so many seconds, if `checkpoint_every` updates take longer."""


def train(
    stage: Stage,
    dataset: PackedDataset,
    config: OptimSection,
    *,
    seed: int,
    directory: Path,
    resume: bool = False,
    progress: Progress | None = None,
    fingerprint: dict[str, Any] | None = None,
) -> TrainState:
    """Train a stage and leave the best weights in it.

    The processes of `stage.group` train together, each on its share of every batch: the same number of micro-batches
    (`parallel.group.fit_micro_batches`). Their number may change on resuming: batches and decisions are the same for
    any, and sums differ by rounding. Interrupted and resumed, it ends with the same weights as an unbroken run, bit for
    bit on a CPU. A stage that was already finished is not trained again: its best weights are loaded.

    Args:
        seed: of the data order and of torch's global generators (dropout), which are seeded at the beginning
            and again at the end, so that what follows is the same after a stage that was finished before.
        directory: for checkpoints; used by this stage alone.
        resume: continue with what is in `directory` (or begin, if it is empty).
        progress: where to report; closed in the end. None: nowhere.
        fingerprint: plain values which, with `config`, `seed` and `dataset`, decide the result. They are kept
            in the checkpoints, and resuming with other values is refused.

    Raises:
        TrainingDiverged: something became NaN or infinite. Nothing trained with it was kept.
        Terminated: SIGTERM came; a checkpoint was written. KeyboardInterrupt: likewise Ctrl-C.
        UserError: `directory` is in use, belongs to another configuration, cannot be written or is damaged;
            the data are fewer than a batch; out of memory.
    """
    progress = progress or Progress()
    try:
        trainer = Trainer(stage, dataset, config, seed, progress)
        with SignalWatch() as watch:
            return trainer.run(
                directory, stage_fingerprint(config, dataset, seed, fingerprint or {}), watch, resume=resume
            )
    finally:
        progress.close()


def stage_fingerprint(
    config: OptimSection, dataset: PackedDataset, seed: int, values: dict[str, Any]
) -> dict[str, Any]:
    """Plain values that decide the result of `train`: `values`, and what the loop adds."""
    own = {
        "seed": seed,
        "optimizer": config.model_dump(mode="json", exclude={"enabled", *RESUME_MUTABLE_FIELDS}),
        "data": {"sequences": len(dataset), "fingerprint": dataset.info.get("fingerprint")},
    }
    return _as_json({**values, "training": own})


def warn_of_few_updates(name: str, config: OptimSection, sequences: int, console: Console) -> None:
    """Say so if a stage that goes through all its data learns little."""
    in_epoch = sequences // config.batch_size
    if config.max_steps is None and (updates := config.total_steps(in_epoch)) < FEW_UPDATES:
        epochs = math.ceil(FEW_UPDATES / in_epoch)
        text = (
            f"warning: stage {name} has {updates} updates only, as {sequences} sequences in batches of"
            f" {config.batch_size} are few: give more data, or set {name}.epochs={epochs}, or a smaller"
            f" {name}.batch_size"
        )
        console.print(text, style="yellow", highlight=False, soft_wrap=True)


class SignalWatch:
    """Notes SIGTERM and Ctrl-C in a block of the main thread, which then ends at a good place; another ends at once.

    Attributes:
        received: the signal; 0: none.
    """

    def __enter__(self) -> SignalWatch:
        self.received = 0
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                if signal.getsignal(number) is not signal.SIG_IGN:  # as a shell's background jobs have it
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self.received and kind is None:  # it came too late for the block
            os.kill(os.getpid(), self.received)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        for each in self._before:
            signal.signal(each, signal.default_int_handler if each == signal.SIGINT else signal.SIG_DFL)
        if number == signal.SIGINT:  # a handler may not print
            os.write(2, b"\nending after this update, with a checkpoint; Ctrl-C again ends at once\n")


class Trainer:
    """Makes the updates of a stage, evaluates it, and keeps its best weights and checkpoints.

    Attributes:
        state: what the updates count; replaced by a checkpoint's on resuming.
        total_steps: updates of the whole stage.
        blocks: the optimizers, one for each of the stage's blocks.
        device: of the parameters.
    """

    def __init__(
        self, stage: Stage, dataset: PackedDataset, config: OptimSection, seed: int, progress: Progress | None = None
    ) -> None:
        self.stage, self.config, self.seed, self.group = stage, config, seed, stage.group
        self.progress = progress or Progress()
        self.dataset, self.sampler = dataset, BatchSampler(len(dataset), config.batch_size, seed)
        self.total_steps = config.total_steps(self.sampler.steps_per_epoch)
        self.state = TrainState()
        self.metrics = MetricBuffer()
        groups = stage.blocks()
        self.blocks = [BlockOptimizer(block, config, self.total_steps, stage.lr_factors) for block in groups]
        self.device = next(iter(groups[0].values())).device
        self.group.broadcast_(list(weights_of(stage).values()))  # all ranks begin with the same
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def update(self) -> None:
        """One optimizer update from the next batch.

        Raises:
            NonFinite: a number read here is NaN or infinite; it may be of an earlier update.
        """
        state = self.state
        started = monotonic()
        update = state.steps  # counted from 0; the step it completes, from 1
        indices = self.sampler.indices(update)
        micro_size = self.config.micro_batch_size
        own = len(indices) // self.group.world
        first = own * self.group.rank
        for start in range(first, first + own, micro_size):
            batch = self.dataset.batch(indices[start : start + micro_size])
            state.tokens += batch["input_ids"].numel() * self.group.world
            scale = micro_size / own
            if self.stage.by_labels:
                labels = self.dataset.labels(indices[start : start + micro_size])
                scale = labels / max(self.dataset.labels(indices), 1) * self.group.world
            values = self.stage.micro_step(batch, scale)
            self.metrics.add_losses(update + 1, values)
        gradients = [parameter.grad for block in self.blocks for parameter in block.parameters.values()]
        self.group.average_([grad for grad in gradients if grad is not None])  # of each rank's share of the batch
        for block in self.blocks:
            self.metrics.add_gradients(update + 1, *block.step(update))
        state.steps += 1
        if self.metrics.updates >= READ_EVERY.get(self.device.type, 1):
            self.read()
        state.update_seconds += monotonic() - started

    def read(self) -> None:
        """Fetch, count and report the losses of the updates since the last reading.

        Raises:
            NonFinite: one of them is NaN or infinite.
        """
        read = self.metrics.read(self.group)
        for step, scalars in read:
            sums = self.state.train_sums
            sums |= {name: sums.get(name, 0.0) + value for name, value in scalars.items()}
            self.state.train_updates += 1
            rates = self.rates(step)
            named = {"lr": rates[0]} if len(rates) == 1 else {f"lr/block_{i}": rate for i, rate in enumerate(rates)}
            self.progress.log(step, {**{f"train/{name}": value for name, value in scalars.items()}, **named})
        if read:
            step, scalars = read[-1]
            values = f"loss {scalars['loss']:.4g}  lr {max(self.rates(step)):.3g}  "
            self.progress.update(step, values, self.state.tokens)

    def rates(self, step: int) -> list[float]:
        """Learning rate of each block in the update that completes `step`; at 0 that of the first."""
        return [block.lr(max(step - 1, 0)) for block in self.blocks]

    # --- what surrounds the updates -------------------------------------------------------------------------

    def run(
        self, directory: Path, fingerprint: dict[str, Any], watch: SignalWatch, *, resume: bool = False
    ) -> TrainState:
        """All updates from the beginning, or from what is in the folder; the best weights are in the stage then."""
        self.directory, self.fingerprint, self.watch, self.saved_at = directory, fingerprint, watch, monotonic()
        name, saved = self.stage.name, list_checkpoints(directory)
        if saved and not resume:
            raise UserError(
                f"{directory} already holds a run ({saved[-1].name}); resume it with --resume, replace it by"
                " --overwrite, or choose another folder"
            )
        if saved:
            refuse_other_settings(directory, fingerprint)
            self._restore(saved[-1])
        if saved and self.state.steps == self.total_steps:
            self.progress.message(f"stage {name}: already finished in {directory}")
            return self._end()
        self.progress.start(name, self.stage.metric, self.total_steps, self.state.steps)
        try:
            self._train(fresh=not saved)
        except NonFinite as found:
            raise self._diverged(found) from None
        except (RuntimeError, MemoryError) as error:
            message = explain_out_of_memory(error, name, self.config, self.device)
            if message is None:
                raise
            raise UserError(
                f"stage {name}, step {self.state.steps + 1}: {message} {self._last_checkpoint()}"
            ) from error
        return self._end()

    def _train(self, fresh: bool) -> None:
        state = self.state
        started = monotonic() - state.seconds
        if fresh:
            torch.manual_seed(self.seed + self.group.rank)  # so that dropout differs from rank to rank
            self._evaluate()
        while state.steps < self.total_steps:
            self.update()
            last = state.steps == self.total_steps
            state.seconds = monotonic() - started
            if last or state.steps % self.config.eval_every == 0:
                self._evaluate()
                state.seconds = monotonic() - started
            due, received = self._asked()
            if last or due or received:
                self._save()
            if received:
                where = f"stage {self.stage.name} at step {state.steps}"
                stop = KeyboardInterrupt if received == signal.SIGINT else Terminated
                raise stop(f"{where}: its checkpoint is written, and the same command resumes there")

    def _asked(self) -> tuple[bool, int]:
        """Whether a checkpoint is due, and which signal came; the same on all ranks. Several ask each other when
        losses were read, which waits for all of them anyway; the time is looked at then, too."""
        due = self.state.steps % self.config.checkpoint_every == 0
        if self.metrics.updates:
            return due, self.watch.received if self.group.world == 1 else 0
        asked = self.group.gather((monotonic() - self.saved_at >= SAVE_AFTER_S, self.watch.received))
        return due or asked[0][0], max(received for _, received in asked)

    def _evaluate(self) -> None:
        state, metric_name = self.state, self.stage.metric
        self.read()
        started = monotonic()
        results = self.group.broadcast(_as_json(self.stage.evaluate()))
        metric = results[metric_name]
        block_metrics = results.get("block_metrics") or [metric] * len(self.blocks)
        for name, value in [(metric_name, metric), *enumerate(block_metrics)]:
            if not math.isfinite(value):
                what = name if name == metric_name else f"{metric_name} of block {name}"
                raise NonFinite(state.steps, f"the validation {what}", value)
        entry = {
            "step": state.steps,
            "tokens": state.tokens,
            "seconds": state.seconds,
            "lr": self.rates(state.steps),
            "train": {name: total / state.train_updates for name, total in state.train_sums.items()},
            **results,
        }
        state.history.append(entry)
        state.train_sums, state.train_updates = {}, 0
        if is_best := metric < state.best_metric:
            state.best_metric, state.best_step = metric, state.steps
            self.best = {name: tensor.to("cpu", copy=True) for name, tensor in weights_of(self.stage).items()}
        for block, value in zip(self.blocks, block_metrics, strict=True):
            block.evaluated(value)
        state.evaluation_seconds += monotonic() - started
        self.progress.evaluated(state.steps, metric, is_best)
        numbers = {f"validation/{name}": value for name, value in results.items() if isinstance(value, int | float)}
        self.progress.log(state.steps, numbers)

    def _save(self) -> None:
        state = self.state
        self.read()
        peaks = self.group.gather(peak_memory_bytes(self.device))
        state.peak_memory_bytes = max(state.peak_memory_bytes, *peaks)
        plain = {
            "fingerprint": self.fingerprint,
            "finished": state.steps == self.total_steps,
            "counters": asdict(state),
            "schedules": [block.plateau for block in self.blocks],
            "random": self.group.gather(random_state(self.device)),
        }
        tensors = {"weights": weights_of(self.stage), "best": self.best}
        if plain["finished"]:
            tensors = {"best": self.best}
        else:
            tensors["optimizer"] = {key: tensor for block in self.blocks for key, tensor in block.tensors().items()}
        write_checkpoint(self.directory, state.steps, tensors, plain, self.group)
        self.saved_at = monotonic()

    def _restore(self, path: Path) -> None:
        tensors, plain = read_checkpoint(path)
        self.state = TrainState(**plain["counters"])
        self.best = {name: tensor.to("cpu", copy=True) for name, tensor in tensors["best"].items()}
        if plain["finished"]:
            return
        set_weights(self.stage, tensors["weights"])
        for block, plateau in zip(self.blocks, plain["schedules"], strict=True):
            block.load(tensors.get("optimizer", {}), plateau)
        states: list[dict[str, str]] = plain["random"]
        if len(states) == self.group.world:
            set_random_state(states[self.group.rank], self.device)
        else:  # another number of ranks than before: new ones
            torch.manual_seed(hash((self.seed, self.state.steps, self.group.rank)))
        self.progress.message(f"stage {self.stage.name}: resuming from {path}")

    def _end(self) -> TrainState:
        set_weights(self.stage, self.best)
        # what comes next (the next stage's initial weights) must not depend on whether this stage was skipped
        torch.manual_seed(self.seed)
        return self.state

    def _last_checkpoint(self) -> str:
        saved = list_checkpoints(self.directory)
        return f"The last good checkpoint is {saved[-1]}." if saved else "No checkpoint had been written yet."

    def _diverged(self, found: NonFinite) -> UserError:
        name, config = self.stage.name, self.config
        advice = "This was before training: check the model, its dtype and the validation data."
        if found.step > 0:
            clip = "" if config.clip_norm is not None else f" and set {name}.clip_norm"
            advice = f"{self._last_checkpoint()} Lower {name}.lr (now {config.lr:g}){clip}, in a new run."
        where = "" if found.rank is None else f"rank {found.rank}: "
        message = f"{where}stage {name}, step {found.step}: {found.what} is {found.value}. {advice}"
        return self.group.common(TrainingDiverged(message))


def _as_json(values: dict[str, Any]) -> dict[str, Any]:
    """The values as they are read back from a file: keys are strings, tuples lists."""
    return json.loads(json.dumps(values))
