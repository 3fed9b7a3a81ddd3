"""Writing a linearized model as a Hugging Face folder."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

from lolcats.errors import UserError
from lolcats.modeling.model import LolcatsForCausalLM

REPORT_FILE = "lolcats_report.json"


def export(
    model: LolcatsForCausalLM | PeftModel,
    tokenizer: Any,
    output: Path,
    *,
    report: dict[str, Any],
    card: str,
    merge_lora: bool = True,
    dtype: torch.dtype | None = None,
) -> None:
    """Write weights (safetensors), config, tokenizer, code for machines without lolcats, card and report.

    Everything is written into a folder beside its destination first and then moved file by file: what was in
    `output` before survives a full disk. Files of other names are left alone.

    Args:
        merge_lora: merge a PEFT model's adapters into the weights; otherwise the folder holds the weights
            before stage 2 and the adapter lies in `adapter/`.
        dtype: type of the weights; None: as they are. Feature maps stay float32.

    Raises:
        UserError: the folder cannot be written.
    """
    staging = output / ".export-unfinished"
    try:
        output.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        linearized = _without_adapters(model, staging, merge_lora)
        if dtype is not None:
            linearized.to(dtype)  # type: ignore[arg-type]  # transformers' annotation of .to
        linearized.save_pretrained(staging)
        tokenizer.save_pretrained(staging)
        (staging / "README.md").write_text(card)
        (staging / REPORT_FILE).write_text(json.dumps(report, indent=2) + "\n")
        _move_into(staging, output)
    except OSError as error:
        shutil.rmtree(staging, ignore_errors=True)
        raise UserError(
            f"cannot write the model to {output}: {error}. What was there before is unchanged and the trained"
            " weights are safe in its run/ folder; make room, then run the same command with --resume"
        ) from error


def _without_adapters(model: LolcatsForCausalLM | PeftModel, staging: Path, merge_lora: bool) -> LolcatsForCausalLM:
    if not isinstance(model, PeftModel):
        return model
    if merge_lora:
        merged = model.merge_and_unload()
        assert isinstance(merged, LolcatsForCausalLM)
        return merged
    model.save_pretrained(str(staging / "adapter"))
    plain = model.unload()
    assert isinstance(plain, LolcatsForCausalLM)
    return plain


def _move_into(source: Path, target: Path) -> None:
    """Move all files of `source` into `target`, weights first and config last, replacing files of the same name."""
    files = sorted((path for path in source.rglob("*") if path.is_file()), key=lambda path: path.name == "config.json")
    for path in files:
        destination = target / path.relative_to(source)
        destination.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, destination)
    shutil.rmtree(source)
