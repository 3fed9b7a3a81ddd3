"""A stage small enough to train in milliseconds: independent linear regressions with dropout."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lolcats.config import OptimSection
from lolcats.parallel.group import SINGLE
from lolcats.training.device import to_device
from lolcats.training.loop import train
from lolcats.training.stage import TrainState, weights_of

FEATURES = 5


class ToyDataset:
    """N sequences of T tokens, each standing for FEATURES numbers."""

    def __init__(self, size: int = 24, length: int = 3, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        self.features_NF = torch.randn(size, FEATURES, generator=generator)
        self.length = length
        self.info: dict[str, Any] = {"fingerprint": f"toy-{size}-{seed}"}

    def __len__(self) -> int:
        return len(self.features_NF)

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        chosen = torch.as_tensor(indices)
        return {
            "input_ids": chosen[:, None].expand(-1, self.length).contiguous(),
            "x": self.features_NF[chosen],
        }


class ToyStage:
    """`layers` regressions, one loss each; their sum is the loss. Joint, or one block per layer.

    Hooks for tests: `before_step(n)` is called before the n-th micro-step (from 1); `metrics` are returned
    by the evaluations instead of the true losses, the last one again and again.
    """

    name = "toy"
    metric = "loss"
    by_labels = False
    group = SINGLE

    def __init__(
        self,
        layers: int = 2,
        per_block: bool = False,
        dropout: float = 0.0,
        only: int | None = None,
        device: str = "cpu",
        metrics: list[float] | None = None,
        before_step: Any = None,
    ):
        generator = torch.Generator().manual_seed(1)
        weights = torch.randn(layers, FEATURES, generator=generator) * 3
        self.targets_LF = (torch.randn(layers, FEATURES, generator=generator) * 3).to(device)
        self.numbers = list(range(layers)) if only is None else [only]
        self.parameters = {n: nn.Parameter(weights[n].clone().to(device)) for n in self.numbers}
        self.per_block = per_block
        self.dropout = dropout
        self.validation = ToyDataset(size=8, seed=9).batch(np.arange(8))["x"].to(device)
        self.metrics, self.before_step = metrics, before_step
        self.evaluations = 0
        self.micro_steps = 0
        self.lr_factors: dict[str, float] = {}

    def blocks(self) -> list[dict[str, nn.Parameter]]:
        named = {f"layers.{n}.weight": parameter for n, parameter in self.parameters.items()}
        return [{name: parameter} for name, parameter in named.items()] if self.per_block else [named]

    def micro_step(self, batch: dict[str, Tensor], scale: float) -> dict[str, Any]:
        self.micro_steps += 1
        if self.before_step is not None:
            self.before_step(self.micro_steps)
        x = nn.functional.dropout(to_device(batch, self.targets_LF.device)["x"], self.dropout)
        losses = {n: self._loss(x, n) for n in self.numbers}
        total = torch.stack(list(losses.values())).sum()
        (total * scale).backward()
        layer_losses = {n: loss.detach() for n, loss in losses.items()}
        return {
            "loss": total.detach(),
            "layer_losses": layer_losses,
            "first": next(iter(layer_losses.values())),
        }

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any]:
        losses = [self._loss(self.validation, n) for n in self.numbers]
        value = float(torch.stack(losses).sum())
        if self.metrics is not None:
            value = self.metrics[min(self.evaluations, len(self.metrics) - 1)]
        self.evaluations += 1
        result: dict[str, Any] = {"loss": value}
        if self.per_block:
            result["block_metrics"] = torch.stack(losses).tolist()
        return result

    def _loss(self, x_BF: Tensor, number: int) -> Tensor:
        return (x_BF @ (self.parameters[number] - self.targets_LF[number])).square().mean()


def toy_config(**changes: Any) -> OptimSection:
    """12 updates of 6 sequences in micro-batches of 2, evaluated every 3, saved every 4."""
    values: dict[str, Any] = {
        "lr": 0.1,
        "max_steps": 12,
        "batch_size": 6,
        "micro_batch_size": 2,
        "eval_every": 3,
        "checkpoint_every": 4,
        "min_lr": 1e-4,
        "plateau_patience": 0,
    }
    return OptimSection(**{**values, **changes})


def run(stage: ToyStage, directory: Path, *, dataset: Any = None, seed: int = 0, **options: Any) -> TrainState:
    """`train` with these options, and `toy_config` with all others."""
    own = {name: options.pop(name) for name in ("resume", "progress", "fingerprint") if name in options}
    return train(stage, dataset or ToyDataset(), toy_config(**options), seed=seed, directory=directory, **own)


class Killed(BaseException):
    """Stands for the end of the process: no code of the loop catches it."""


def kill_at(number: int, error: BaseException | None = None) -> Any:
    """A `before_step` that ends the run, or raises `error`, at a micro-step."""

    def before_step(step: int) -> None:
        if step == number:
            raise error or Killed

    return before_step


@contextmanager
def failing(owner: Any, name: str, number: int, error: Any = Killed) -> Iterator[None]:
    """Within the block that call of `owner.name`, counted from 1, raises `error`."""
    original, calls = getattr(owner, name), count(1)

    def counted(*arguments: Any, **keywords: Any) -> Any:
        if next(calls) == number:
            raise error
        return original(*arguments, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, counted)
        yield


def equal_weights(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """Bit for bit."""
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def copy_weights(stage: ToyStage) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in weights_of(stage).items()}


def folders(directory: Path) -> list[str]:
    """Names in a stage's folder, hidden ones included."""
    return sorted(path.name for path in directory.iterdir())
