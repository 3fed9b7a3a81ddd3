"""The LoRA adapters of stage 2, read from where a run leaves them, and how far they moved the weights."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load_file
from torch import Tensor

from lolcats.config import AdjustSection
from lolcats.training.checkpoint import list_checkpoints, read_checkpoint

_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")


class Adapter(NamedTuple):
    """One projection's update scale * B A.

    Attributes:
        a_RI: [rank, inputs].
        b_OR: [outputs, rank].
        scale: lora_alpha / rank.
    """

    a_RI: Tensor
    b_OR: Tensor
    scale: float

    def delta(self) -> Tensor:
        """[outputs, inputs], float32."""
        return self.scale * (self.b_OR.float() @ self.a_RI.float())

    def norm(self) -> float:
        """Frobenius norm of `delta`, without building it: |BA|^2 = tr(B^T B A A^T)."""
        a, b = self.a_RI.double(), self.b_OR.double()
        squared = float(((b.T @ b) * (a @ a.T)).sum())
        return self.scale * max(squared, 0.0) ** 0.5


def adapter_of_export(folder: Path) -> dict[str, Adapter]:
    """Adapters in `folder/adapter` by the name of the weight they change; empty if there are none."""
    settings, weights = folder / "adapter" / "adapter_config.json", folder / "adapter" / "adapter_model.safetensors"
    if not (settings.is_file() and weights.is_file()):
        return {}
    values = json.loads(settings.read_text(encoding="utf-8"))
    return _adapters(load_file(weights), values["lora_alpha"] / values["r"])


def adapter_of_run(stage_folder: Path, config: AdjustSection) -> dict[str, Adapter]:
    """Adapters in the best checkpoint of stage 2's folder; empty if there are none."""
    best = list_checkpoints(stage_folder, "best")
    if config.method != "lora" or not best:
        return {}
    return _adapters(read_checkpoint(best[-1]).tensors["weights"], config.lora_alpha / config.lora_rank)


def lora_updates(adapters: dict[str, Adapter], weights: dict[str, Tensor]) -> list[dict[str, Any]]:
    """How far stage 2 moved each projection, from its first step to the weights that were kept.

    The paper's appendix sums the lengths of all steps instead; checkpoints do not hold the steps between.

    Args:
        weights: the projections before stage 2, by the adapters' names.

    Returns:
        For each adapter its layer and projection, norm = |scale B A|, weight_norm = |W|, relative = their
        quotient, and the norms of A and B alone (Frobenius).
    """
    rows = []
    for name, adapter in adapters.items():
        weight_norm = float(weights[name].float().norm()) if name in weights else None
        norm = adapter.norm()
        rows.append(
            {
                "layer": layer_of(name),
                "projection": name.split(".")[-2],
                "rank": adapter.a_RI.shape[0],
                "norm": norm,
                "weight_norm": weight_norm,
                "relative": norm / weight_norm if weight_norm else None,
                "a_norm": float(adapter.a_RI.float().norm()),
                "b_norm": float(adapter.b_OR.float().norm()),
            }
        )
    return rows


def layer_of(name: str) -> int:
    """The first number in a parameter's name; -1 if there is none."""
    return next((int(part) for part in name.split(".") if part.isdigit()), -1)


def _adapters(tensors: dict[str, Tensor], scale: float) -> dict[str, Adapter]:
    sides: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        match = _NAME.fullmatch(key)
        if match is not None:
            sides.setdefault(f"{match['module']}.weight", {})[match["side"]] = tensor
    return {name: Adapter(pair["A"], pair["B"], scale) for name, pair in sides.items() if len(pair) == 2}
