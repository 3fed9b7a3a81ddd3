"""From trained blocks to a linearized folder, without ever holding the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from lolcats.checkpoint.write import export
from lolcats.parallel.blockwise.transfer import SPLITS, BlockwiseTransfer
from lolcats.provenance import provenance
from lolcats.report import REPORT_FILE, begin_report, model_card


def assemble(transfer: BlockwiseTransfer, output: Path, console: Console) -> dict[str, Any]:
    """Export the trained blocks as `lolcats.checkpoint.write.export` would export the whole model.

    Returns:
        The report, as written to `lolcats_report.json`. Perplexities are not in it: they need the whole model.

    Raises:
        UserError: blocks are missing, the checkpoint cannot be read, or `output` cannot be written.
    """
    model, config = transfer.partial.model, transfer.config
    report = begin_report(config, *(transfer.datasets[split] for split in SPLITS))
    report["softmax_layers"] = model.softmax_layers()
    report["stages"]["transfer"] = transfer.install(model)
    report["provenance"] = provenance()
    model.config.provenance = report["provenance"] | {"config": report["config"]}
    dtype = None if config.output.dtype == "same" else getattr(torch, config.output.dtype)
    export(
        model,
        transfer.tokenizer,
        output,
        report=report,
        card=model_card(report),
        weights=transfer.partial.weights(),
        dtype=dtype,
    )
    console.print(f"written: {output} (model, {REPORT_FILE})")
    return report
