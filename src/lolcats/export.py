"""Writing a linearized model as a Hugging Face folder."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

from lolcats.errors import UserError
from lolcats.modeling.model import LolcatsForCausalLM
from lolcats.modeling.shards import INDEX, SINGLE, ShardWriter
from lolcats.parallel.group import SINGLE as SINGLE_PROCESS
from lolcats.parallel.group import Group
from lolcats.parallel.weights import Finish, stored_weights, whole_weights
from lolcats.report import REPORT_FILE


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
    with staged(output) as staging:
        linearized = _without_adapters(model, staging, merge_lora)
        if dtype is not None:
            linearized.to(dtype)  # type: ignore[arg-type]  # transformers' annotation of .to
        linearized.save_pretrained(staging)
        write_texts(staging, tokenizer, report, card)


def export_sharded(
    model: LolcatsForCausalLM | PeftModel,
    tokenizer: Any,
    output: Path,
    group: Group = SINGLE_PROCESS,
    *,
    checkpoint: Path | None = None,
    report: dict[str, Any],
    card: str,
    merge_lora: bool = True,
    dtype: torch.dtype | None = None,
    shard_bytes: int = 5 * 10**9,
) -> None:
    """`export` of a model that is divided among processes, all of which call this; or of a quantised one.

    Weights are gathered or read, and merged, one at a time; rank 0, which writes, holds no more than a shard.

    Args:
        checkpoint: the folder of a quantised model's own weights, which are written in the place of its rounded ones.
        shard_bytes: size of a file.

    Raises:
        UserError: on all ranks, if the folder cannot be written.
    """
    with group.sync_errors(), staged(output) if group.is_main else nullcontext() as staging:
        linearized: Any = model.get_base_model() if isinstance(model, PeftModel) else model
        weights = whole_weights(linearized, group) if checkpoint is None else stored_weights(linearized, checkpoint)
        try:
            if staging is not None:
                write_configuration(linearized, staging, dtype)
                finish = Finish(linearized, merge_lora=merge_lora, dtype=dtype)
                writer = ShardWriter(staging, shard_bytes)
                for name, tensor in weights:
                    writer.add([finish(name, tensor)])
                writer.finish()
                if isinstance(model, PeftModel) and not merge_lora:
                    model.save_pretrained(str(staging / "adapter"))
                write_texts(staging, tokenizer, report, card)
        finally:
            for _ in weights:  # the others count on this rank also after its disk is full
                pass


def write_configuration(model: Any, folder: Path, dtype: torch.dtype | None) -> None:
    """Configuration, generation settings and code, by `save_pretrained` with no weights; before the weights.

    Args:
        dtype: of the weights, to be named in the configuration; None: the model's own.
    """
    model.save_pretrained(folder, state_dict={})
    for name in (SINGLE, INDEX):
        (folder / name).unlink(missing_ok=True)
    if dtype is not None:
        file = folder / "config.json"
        content = json.loads(file.read_text()) | {"dtype": str(dtype).removeprefix("torch.")}
        file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


@contextmanager
def staged(output: Path) -> Iterator[Path]:
    """A folder to write a model into; what is in it after the block moves to `output`, file by file.

    Raises:
        UserError: OSError in the block (a full disk), or the folder cannot be written; `output` is as before.
    """
    staging = output / ".export-unfinished"
    try:
        output.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        yield staging
        _move_into(staging, output)
    except OSError as error:
        shutil.rmtree(staging, ignore_errors=True)
        raise UserError(
            f"cannot write the model to {output}: {error}. What was there before is unchanged and the trained"
            " weights are safe in its run/ folder; make room, then run the same command with --resume"
        ) from error


def write_texts(folder: Path, tokenizer: Any, report: dict[str, Any], card: str) -> None:
    """What an exported folder holds beside weights, configuration and code."""
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(card)
    (folder / REPORT_FILE).write_text(json.dumps(report, indent=2) + "\n")


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
