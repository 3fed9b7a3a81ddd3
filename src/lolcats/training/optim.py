"""AdamW, clipping and learning rates of one block of parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lolcats.config import OptimSection

GAIN = 1e-4
"""Relative decrease of the metric that the plateau schedule counts as a gain (the default of
`torch.optim.lr_scheduler.ReduceLROnPlateau`, which the paper's runs used)."""


class BlockOptimizer:
    """Optimizer of parameters that are clipped and scheduled together, apart from all other blocks.

    Args:
        parameters: name -> parameter. Gradients are those of the whole batch when `step` is called.
        total_steps: updates of the whole stage.
        lr_factors: name -> factor of the schedule's learning rate; 1 for names that are not there.

    Attributes:
        plateau: where the plateau schedule stands.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        config: OptimSection,
        total_steps: int,
        lr_factors: Mapping[str, float] | None = None,
    ):
        groups: dict[float, dict[str, nn.Parameter]] = {}
        for name, parameter in parameters.items():  # a group of AdamW's has one rate
            groups.setdefault((lr_factors or {}).get(name, 1.0), {})[name] = parameter
        ordered = sorted(groups.items())
        self.parameters = {name: parameter for _, group in ordered for name, parameter in group.items()}
        self.config = config
        self.total_steps = total_steps
        self.plateau = {"lr": config.lr, "best": math.inf, "waited": 0}
        on_gpu = all(parameter.device.type == "cuda" for parameter in parameters.values())
        self.adamw = torch.optim.AdamW(
            [{"params": list(group.values()), "lr_factor": factor} for factor, group in ordered],
            lr=config.lr,
            weight_decay=config.weight_decay,
            fused=True if on_gpu else None,
        )

    def lr(self, update: int) -> float:
        """Learning rate of an update, counted from 0, before `lr_factors`."""
        config = self.config
        if config.schedule == "plateau":
            return self.plateau["lr"]
        if config.schedule == "constant":
            return config.lr
        lowest = min(config.min_lr, config.lr)
        return lowest + (config.lr - lowest) * (0.5 * (1.0 + math.cos(math.pi * min(update / self.total_steps, 1.0))))

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
        norms_P = torch.stack([norm.to(first, torch.float32) for norm in torch._foreach_norm(gradients)])
        if self.config.clip_norm is not None:  # as torch.nn.utils.clip_grad_norm_, with the norms at hand
            factor = (self.config.clip_norm / (torch.linalg.vector_norm(norms_P) + 1e-6)).clamp(max=1.0)
            for device in {gradient.device for gradient in gradients}:
                own = [gradient for gradient in gradients if gradient.device == device]
                torch._foreach_mul_(own, factor.to(device))
        for group in self.adamw.param_groups:
            group["lr"] = self.lr(update) * group["lr_factor"]
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        return tuple(updated), norms_P

    def evaluated(self, metric: float) -> None:
        """Lower the plateau schedule's rate after more than `plateau_patience` evaluations without gain."""
        plateau, config = self.plateau, self.config
        plateau["waited"] += 1
        if metric < plateau["best"] * (1.0 - GAIN):
            plateau.update(best=metric, waited=0)
        elif plateau["waited"] > config.plateau_patience:
            plateau.update(lr=max(plateau["lr"] * config.plateau_factor, min(config.min_lr, config.lr)), waited=0)

    def tensors(self) -> dict[str, Tensor]:
        """AdamW's tensors, flat: `parameter/entry` -> tensor."""
        return {
            f"{name}/{entry}": tensor
            for name, parameter in self.parameters.items()
            for entry, tensor in self.adamw.state.get(parameter, {}).items()
        }

    def load(self, tensors: dict[str, Tensor], plateau: dict[str, float]) -> None:
        """Take over `tensors()` and `plateau` of an equally built optimizer; tensors of other names may be there."""
        self.plateau = dict(plateau)
        order = {name: index for index, name in enumerate(self.parameters)}
        by_index: dict[int, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            name, _, entry = key.rpartition("/")
            if name in order:
                by_index.setdefault(order[name], {})[entry] = tensor
        groups = self.adamw.state_dict()["param_groups"]
        self.adamw.load_state_dict({"state": by_index, "param_groups": groups})
