"""From trained blocks to a linearized folder, without ever holding the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers.core_model_loading import revert_weight_conversion

from lolcats.export import staged, write_configuration, write_texts
from lolcats.modeling.decoder import decoder_layers
from lolcats.modeling.shards import ShardWriter
from lolcats.parallel.blockwise.forward import embedding_name
from lolcats.parallel.blockwise.run import SPLITS, BlockwiseTransfer
from lolcats.parallel.blockwise.weights import PartialModel
from lolcats.parallel.weights import Finish
from lolcats.provenance import provenance
from lolcats.report import REPORT_FILE, begin_report, model_card


def assemble(run: BlockwiseTransfer, output: Path, console: Console) -> dict[str, Any]:
    """Export the trained blocks as `lolcats.export.export` would export the whole model.

    Returns:
        The report, as written to `lolcats_report.json`. Perplexities are not in it: they need the whole model.

    Raises:
        UserError: blocks are missing, the checkpoint cannot be read, or `output` cannot be written.
    """
    model, config = run.partial.model, run.config
    report = begin_report(config, *(run.datasets[split] for split in SPLITS))
    report["softmax_layers"] = model.softmax_layers()
    report["stages"]["transfer"] = run.install(model)
    report["provenance"] = provenance()
    model.config.provenance = report["provenance"] | {"config": report["config"]}
    dtype = None if config.output.dtype == "same" else getattr(torch, config.output.dtype)
    with staged(output) as staging:
        write_model(run.partial, staging, dtype=dtype)
        write_texts(staging, run.tokenizer, report, model_card(report))
    console.print(f"written: {output} (model, {REPORT_FILE})")
    return report


def write_model(
    partial: PartialModel, folder: Path, *, dtype: torch.dtype | None = None, shard_bytes: int = 5 * 10**9
) -> None:
    """Write the model as its `save_pretrained` would, a decoder layer at a time.

    Args:
        dtype: type of the base weights; None: as they are. Feature maps stay float32.

    Raises:
        OSError: the disk is full.
    """
    model = partial.model
    write_configuration(model, folder, dtype)
    finish = Finish(model, merge_lora=False, dtype=dtype)
    writer = ShardWriter(folder, shard_bytes)
    tied = {f"model.{name}" for name in partial.tied}
    for part in _parts(partial):
        with partial.loaded(part):
            prefix = f"model.{part}."
            content = dict(
                finish(name, tensor)
                for name, tensor in model.state_dict().items()
                if name.startswith(prefix) and name not in tied
            )
            writer.add(revert_weight_conversion(model, content).items())
    writer.finish()


def _parts(partial: PartialModel) -> list[str]:
    """Paths in the base model of submodules that together hold all weights: layers one by one, then the rest."""
    base: Any = partial.model.model
    layers, _ = decoder_layers(partial.model)
    parts = [embedding_name(base), *(f"{layers}.{index}" for index in range(len(base.get_submodule(layers))))]
    for name, _ in base.named_parameters(remove_duplicate=False):
        if name in partial.tied:
            continue
        module = name.rpartition(".")[0]
        if not any(module == part or module.startswith(f"{part}.") for part in parts):
            parts.append(module)
    return parts
