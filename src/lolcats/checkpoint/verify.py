"""Whether an exported folder is the model that was measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM

from lolcats.data import PackedDataset
from lolcats.errors import UserError
from lolcats.evaluation.perplexity import dataset_perplexity
from lolcats.modeling.attention import AttentionCall
from lolcats.parallel.group import SINGLE, Group

SEQUENCES = 4
TOLERANCE = {torch.float32: 5e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Difference in nats per token that counts as rounding, by the type of the exported weights."""
ROUNDED_TOLERANCE = 0.5
"""The same for a model trained over weights in 4 bits, which is exported with exact ones."""
LARGEST_ON_CPU = 16 * 2**30
"""Bytes of weights beyond which a forward pass on the CPU takes too long."""


def reload_check(
    model: Any,
    validation: PackedDataset,
    *,
    batch_size: int,
    group: Group = SINGLE,
    attention_call: AttentionCall | None = None,
    tolerance: float | None = None,
) -> Callable[[Path], dict[str, Any]]:
    """Measure `model` on a few validation sequences; the result compares an exported folder with it.

    All processes of a sharded model call this, and one of them the result, which loads the folder as its user would.

    Args:
        attention_call: what the model's layers compute where the report's perplexity is measured.
        tolerance: difference in nats per token that counts as rounding; None: by the type of the exported weights.

    Returns:
        A function of the folder: `loss` and `expected_loss` (nats per token) and `sequences`, or `skipped` with the
        reason. It raises UserError if tensors are missing or the losses differ by more than rounding.
    """
    rows = validation.label_mask[:, 1:].any(1).nonzero()[0][:SEQUENCES]
    few = replace(validation, input_ids=validation.input_ids[rows], label_mask=validation.label_mask[rows])
    device = torch.device(getattr(model, "device", "cpu"))
    model.eval()
    expected = dataset_perplexity(model, few, batch_size=batch_size, group=group, attention_call=attention_call)["loss"]

    def check(folder: Path) -> dict[str, Any]:
        size = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
        place = _device_with_room(size, device)
        if place is None:
            return {"skipped": f"{size / 2**30:.1f} GiB of weights fit nowhere beside those in memory"}
        read: Any = AutoModelForCausalLM.from_pretrained
        loaded, info = read(folder, dtype="auto", device_map={"": place}, output_loading_info=True)
        loss = dataset_perplexity(loaded.eval(), few, batch_size=batch_size)["loss"]
        rounding = tolerance or TOLERANCE.get(loaded.dtype, TOLERANCE[torch.bfloat16])
        if info["missing_keys"] or not abs(loss - expected) <= rounding:
            raise UserError(
                f"the exported folder is not the model that was measured: {loss:.4f} nats per token in {len(few)} rows,"
                f" in training {expected:.4f}; missing: {sorted(info['missing_keys'])[:5]}. It stays in {folder} and"
                " replaces nothing; the trained weights are safe in run/. This is a bug: please report it"
            )
        return {"loss": loss, "expected_loss": expected, "sequences": len(few)}

    return check


def _device_with_room(size: int, device: torch.device) -> torch.device | None:
    """The device, else the CPU, else None; with room for `size` bytes of weights and some activations."""
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] > 1.25 * size + 2**30:
        return device
    if size <= LARGEST_ON_CPU and psutil.virtual_memory().available > 1.25 * size:
        return torch.device("cpu")
    return None
