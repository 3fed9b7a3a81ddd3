"""From trained blocks to a linearized folder, without ever holding the whole model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from lolcats.checkpoint.write import export
from lolcats.modeling.decoder import decoder_layers
from lolcats.parallel.blockwise.forward import embedding_name
from lolcats.parallel.blockwise.run import SPLITS, BlockwiseTransfer
from lolcats.parallel.blockwise.weights import PartialModel
from lolcats.provenance import provenance
from lolcats.report import REPORT_FILE, begin_report, model_card


def assemble(run: BlockwiseTransfer, output: Path, console: Console) -> dict[str, Any]:
    """Export the trained blocks as `lolcats.checkpoint.write.export` would export the whole model.

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
    export(
        model,
        run.tokenizer,
        output,
        report=report,
        card=model_card(report),
        weights=_weights(run.partial),
        dtype=dtype,
    )
    console.print(f"written: {output} (model, {REPORT_FILE})")
    return report


def _weights(partial: PartialModel) -> Iterator[tuple[str, Tensor]]:
    """The model's weights, read from its checkpoint a decoder layer at a time."""
    tied = {f"model.{name}" for name in partial.tied}
    for part in _parts(partial):
        with partial.loaded(part):
            for name, tensor in partial.model.state_dict().items():
                if name.startswith(f"model.{part}.") and name not in tied:
                    yield name, tensor


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
