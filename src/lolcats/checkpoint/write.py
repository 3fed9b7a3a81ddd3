"""Writing a model as a complete Hugging Face folder, one group of weights at a time."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.lora.layer import LoraLayer
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from lolcats.checkpoint.read import INDEX, SINGLE, BaseCheckpoint, ShardReader
from lolcats.data.templates import end_of_turn
from lolcats.errors import UserError
from lolcats.modeling.model import LolcatsForCausalLM
from lolcats.parallel.group import SINGLE as SINGLE_PROCESS
from lolcats.parallel.group import Group
from lolcats.report import REPORT_FILE

SHARD_BYTES = 5 * 10**9
_STAGING = ".export-unfinished"
_PREFIX, _MAPS, _BASE = "model.", ".linear_attention.", ".base_layer"

Weights = Iterable[tuple[str, Tensor]]


def export(
    model: PreTrainedModel | PeftModel,
    tokenizer: Any,
    output: Path,
    group: Group = SINGLE_PROCESS,
    *,
    report: dict[str, Any],
    card: str,
    weights: Weights | None = None,
    check: Callable[[Path], Any] | None = None,
) -> None:
    """Write weights (safetensors), config, tokenizer, code for machines without lolcats, card and report.

    The new folder is completed beside what `output` holds and then swapped in: weights and code of an export before are
    gone afterwards, `run/` and other files stay. All processes of a sharded model call this; rank 0 writes, and holds
    one decoder layer's weights and one shard in memory.

    Args:
        model: with adapters, those of `add_lora`; others are merged before (`merge_and_unload`). Or the base model of
            a linearized one, which is written without feature maps.
        report: written as `lolcats_report.json`, with what `check` returns. If its data are conversations, the
            generation settings end with their turns.
        weights: names and tensors, if they are not those in memory (`stored_weights`, blocks).
        check: called with the complete folder before it is swapped in, may raise; its result goes into the report.

    Raises:
        UserError: on all ranks, if the folder cannot be written; what `output` held is as before.
    """
    with group.sync_errors(), staged(output) if group.is_main else nullcontext() as staging:
        plain: Any = model.get_base_model() if isinstance(model, PeftModel) else model
        _end_with_turns(plain.generation_config, tokenizer, report)
        named = whole_weights(plain) if weights is None else iter(weights)
        try:
            if staging is not None:
                plain.save_pretrained(staging, state_dict={})  # configuration, generation settings and code
                for name in (SINGLE, INDEX):
                    (staging / name).unlink(missing_ok=True)
                finish = _finisher(plain)

                def layer_of(item: tuple[str, Tensor]) -> str:
                    """As layouts on disk differ from those in memory within layers; else the weight's name."""
                    found = re.match(r".*?\.\d+\.", item[0])
                    return found[0] if found else item[0]

                def stored() -> Weights:
                    for _, members in groupby(named, key=layer_of):
                        content = dict(finish(name, tensor) for name, tensor in members)
                        yield from revert_weight_conversion(plain, content).items()

                write_shards(staging, stored())
                tokenizer.save_pretrained(staging)
                (staging / "README.md").write_text(card, encoding="utf-8")
                if check is not None:
                    report["reloaded"] = check(staging)
                (staging / REPORT_FILE).write_text(json.dumps(report, indent=2) + "\n")
        finally:
            for _ in named:  # the other ranks count on this one also after its disk is full
                pass


def _end_with_turns(settings: Any, tokenizer: Any, report: dict[str, Any]) -> None:
    """Trained on conversations, a model ends its answers as the chat template does, also if its base did not."""
    data = [part for part in report.get("data", {}).values() if isinstance(part, dict)]
    formats = {source["format"] for part in data for source in part.get("sources", ())}
    end = end_of_turn(tokenizer) if formats & {"chat", "prompt"} else None
    known = settings.eos_token_id
    known = [known] if isinstance(known, int) else known or [tokenizer.eos_token_id]
    if end is not None and end not in known:
        settings.eos_token_id = [*known, end]


def whole_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Names and whole tensors of the model's weights, as `export` takes it, without adapters, one after another.

    All ranks go through it together; each holds one whole weight at a time. Weights that share a tensor come once.
    """
    omitted = [".lora_"] if isinstance(model, LolcatsForCausalLM) else [".lora_", _MAPS]
    unique = {name for name, _ in model.named_parameters()}
    second_names = {name for name, _ in model.named_parameters(remove_duplicate=False)} - unique
    for name, tensor in model.state_dict().items():
        if not any(part in name for part in omitted) and name not in second_names:
            yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def stored_weights(model: PreTrainedModel, folder: Path) -> Iterator[tuple[str, Tensor]]:
    """The weights of a model in 4 bits, the base model's own as its checkpoint in `folder` has them.

    Adapters trained on weights in 4 bits are merged into the exact ones: rounded to 4 bits again, their small
    changes would mostly vanish.
    """
    reader = ShardReader(folder)
    base, prefix = (model.model, _PREFIX) if isinstance(model, LolcatsForCausalLM) else (model, "")
    for name, own in BaseCheckpoint(base, folder).own_names().items():
        yield f"{prefix}{own}", reader.slice(name)[:].to(model.dtype)
    for name, tensor in model.state_dict().items():
        if _MAPS in name and prefix:
            yield name, tensor


def _finisher(model: PreTrainedModel) -> Callable[[str, Tensor], tuple[str, Tensor]]:
    """Makes of a weight and its name those that `save_pretrained` writes after PEFT's `merge_and_unload`.

    That itself merges in place, in the weights' own type, and cannot where they are sharded or elsewhere in exact form.
    """
    layers: dict[str, Any] = {f"{path}.weight": m for path, m in model.named_modules() if isinstance(m, LoraLayer)}

    @torch.no_grad()
    def finish(name: str, tensor: Tensor) -> tuple[str, Tensor]:
        name = name.replace(_BASE, "")
        if (layer := layers.get(name)) is None:
            return name, tensor
        merged = tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=True)
        for adapter in layer.active_adapters:
            merged += LoraLinear.get_delta_weight(layer, adapter).to(merged.device)
        return name, merged.to(tensor.dtype)

    return finish


@contextmanager
def staged(output: Path) -> Iterator[Path]:
    """A folder to write a model into, which after the block takes the place of the model in `output`.

    Raises:
        UserError: OSError in the block (a full disk), which leaves `output` as before, or the folder cannot be written.
    """
    staging = output / _STAGING
    try:
        output.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        yield staging
        _swap(staging, output)
    except BaseException as error:
        shutil.rmtree(staging, ignore_errors=True)
        if not isinstance(error, OSError) and "os error" not in str(error):  # so tokenizers reports a full disk
            raise
        raise UserError(
            f"cannot write the model to {output}: {error}. The trained weights are safe in its run/ folder; make"
            " room, then run the same command with --resume"
        ) from error


def _swap(staging: Path, output: Path) -> None:
    """Put the files of `staging` in the place of an earlier export's.

    config.json is the first to go and the last to come, so that nobody loads half of each.
    """
    (output / "config.json").unlink(missing_ok=True)
    for pattern in ("model*.safetensors", "model*.safetensors.index.json"):
        for old in output.glob(pattern):
            old.unlink()
    new = [path.relative_to(staging) for path in staging.rglob("*") if path.is_file()]
    for name in sorted(new, key=lambda name: name.name == "config.json"):
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(staging / name, output / name)
    shutil.rmtree(staging, ignore_errors=True)


def write_shards(folder: Path, weights: Weights) -> None:
    """Write tensors in the order in which they come, into shards with an index, as `save_pretrained` does.

    Memory holds one shard: huggingface_hub's `save_torch_state_dict` needs all tensors at once.

    Raises:
        OSError: the disk is full.
    """
    shards: list[list[str]] = []
    waiting: dict[str, Tensor] = {}
    total = size = 0

    def flush() -> None:
        try:
            save_file(waiting, folder / f"unfinished-{len(shards)}.safetensors", metadata={"format": "pt"})
        except SafetensorError as error:  # how the library reports a full disk
            raise OSError(str(error)) from error
        shards.append(list(waiting))
        waiting.clear()

    for name, tensor in weights:
        if waiting and size + tensor.nbytes > SHARD_BYTES:
            flush()
            size = 0
        # a copy: safetensors refuses tensors that share memory, and the caller may free its own
        waiting[name] = tensor.detach().to("cpu", copy=True).contiguous()
        size += tensor.nbytes
        total += tensor.nbytes
    flush()
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = SINGLE if len(shards) == 1 else f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        os.replace(folder / f"unfinished-{number}.safetensors", folder / file)
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        content = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
