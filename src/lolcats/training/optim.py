"""AdamW, clipping and learning-rate schedule of one block of parameters."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch import nn

from lolcats.config import OptimSection

GAIN = 1e-4
"""Relative decrease of the metric that the plateau schedule counts as a gain (the default of
`torch.optim.lr_scheduler.ReduceLROnPlateau`, which the paper's runs used)."""


class BlockOptimizer:
    """Optimizer of parameters that are clipped and scheduled together, apart from all other blocks.

    Args:
        parameters: name -> parameter.
        total_steps: updates of the whole run, the length of the cosine schedule.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], config: OptimSection, total_steps: int):
        self.parameters = parameters
        self.config = config
        self.total_steps = total_steps
        self.floor_lr = min(config.min_lr, config.lr)
        self.plateau_lr = config.lr
        self.plateau_best: float | None = None
        self.plateau_waited = 0
        on_gpu = all(parameter.device.type == "cuda" for parameter in parameters.values())
        self.adamw = torch.optim.AdamW(
            list(parameters.values()),
            lr=config.lr,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=True if on_gpu else None,
        )

    def lr(self, update: int) -> float:
        """Learning rate of an update, counted from 0."""
        if self.config.schedule == "plateau":
            return self.plateau_lr
        if self.config.schedule == "cosine":
            falling = 0.5 * (1.0 + math.cos(math.pi * min(update / self.total_steps, 1.0)))
            return self.floor_lr + (self.config.lr - self.floor_lr) * falling
        return self.config.lr

    def step(self, update: int) -> tuple[tuple[str, ...], Tensor]:
        """Clip the gradients, update the parameters, drop the gradients.

        Returns:
            names of the P parameters that had a gradient, and the norms [P] of their gradients before
            clipping. Nothing here waits for the GPU.
        """
        updated = {name: p for name, p in self.parameters.items() if p.grad is not None}
        if not updated:
            return (), torch.zeros(0)
        gradients = [p.grad for p in updated.values() if p.grad is not None]
        first = gradients[0].device
        norms_P = torch.stack([n.to(first, torch.float32) for n in torch._foreach_norm(gradients)])
        if self.config.clip_norm is not None:
            total_norm = torch.linalg.vector_norm(norms_P)
            torch.nn.utils.clip_grads_with_norm_(updated.values(), self.config.clip_norm, total_norm)
        self.adamw.param_groups[0]["lr"] = self.lr(update)
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        return tuple(updated), norms_P

    def evaluated(self, metric: float) -> None:
        """Lower the plateau schedule's rate after more than `plateau_patience` evaluations without gain."""
        if self.plateau_best is None or metric < self.plateau_best * (1.0 - GAIN):
            self.plateau_best = metric
            self.plateau_waited = 0
            return
        self.plateau_waited += 1
        if self.plateau_waited > self.config.plateau_patience:
            self.plateau_lr = max(self.plateau_lr * self.config.plateau_factor, self.floor_lr)
            self.plateau_waited = 0

    def tensors(self) -> dict[str, Tensor]:
        """AdamW's tensors, flat: `parameter/entry` -> tensor."""
        flat = {}
        for name, parameter in self.parameters.items():
            for entry, tensor in self.adamw.state.get(parameter, {}).items():
                flat[f"{name}/{entry}"] = tensor
        return flat

    def state(self) -> dict[str, Any]:
        """The schedule's plain values."""
        return {"lr": self.plateau_lr, "best": self.plateau_best, "waited": self.plateau_waited}

    def load(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Take over `tensors()` and `state()` of an equally built optimizer."""
        self.plateau_lr = state["lr"]
        self.plateau_best = state["best"]
        self.plateau_waited = state["waited"]
        order = {name: index for index, name in enumerate(self.parameters)}
        by_index: dict[int, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            name, _, entry = key.rpartition("/")
            by_index.setdefault(order[name], {})[entry] = tensor
        groups = self.adamw.state_dict()["param_groups"]
        self.adamw.load_state_dict({"state": by_index, "param_groups": groups})
