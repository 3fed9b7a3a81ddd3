"""All diagnostics of one model, written beside it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lolcats.analysis.diagnostics import AttentionMaps, LinearShare, OutputError
from lolcats.analysis.observe import Seen, measure
from lolcats.analysis.stages import load_stages
from lolcats.config import DataSection
from lolcats.data import build_evaluation_dataset
from lolcats.errors import UserError
from lolcats.evaluation.load import with_begin_token
from lolcats.provenance import provenance
from lolcats.report import ANALYSIS_FILE, plain, without_paths, write_text

FORMAT = 3  # of analysis.json; raise when a key changes its meaning
MAP_LAYERS, MAP_HEADS = 5, 4  # as the paper's appendix shows


def analyse(
    folder: str | Path,
    data: DataSection,
    *,
    dtype: str = "auto",
    device: str = "auto",
    batch_size: int = 1,
    report: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Measure everything on the linearized model in `folder` and write `analysis.json` there.

    Args:
        data: text that was not trained on; all rows, or the first `validation_sequences` packed sequences. If it
            does not set `begin_token`, that is as the folder was trained.
        batch_size: sequences at a time; attention weights take batch * heads * T * T numbers.
        report: receives sentences on what is being done.

    Returns:
        What was written; `docs/analysis.md` lists the keys.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give the output folder of `lolcats linearize`")
    weights, tokenizer = load_stages(folder, dtype=dtype, device=device)
    dataset = build_evaluation_dataset(with_begin_token(data, folder, tokenizer), tokenizer)
    layers = sorted(index for index, _ in weights.model.linear_layers())
    heads = weights.model.config.linear_layers[0].num_heads
    report(f"{len(layers)} layers, stages {', '.join(weights.names)}, {len(dataset)} sequences")

    error, share = OutputError(), LinearShare()
    shown = layers
    if len(layers) > MAP_LAYERS:  # evenly spaced, the first and the last among them
        shown = [layers[round(place * (len(layers) - 1) / (MAP_LAYERS - 1))] for place in range(MAP_LAYERS)]
    maps = AttentionMaps(shown, list(range(min(heads, MAP_HEADS))))

    def see(seen: Seen) -> None:
        for diagnostic in (error, share, maps):
            diagnostic.see(seen)

    measure(weights, dataset, see, batch_size=batch_size)
    values = {
        "format": FORMAT,
        "model": str(folder),
        "stages": weights.names,
        "layers": layers,
        "notes": weights.notes,
        "data": dataset.info,
        "attention": asdict(weights.model.config.attention) | {"exact": weights.model.config.exact_heads},
        **error.result(),
        "linear_share": share.result(),
        "maps": maps.result(),
        "provenance": provenance(),
    }
    values = without_paths(values)
    write_text(folder / ANALYSIS_FILE, json.dumps(plain(values), indent=1) + "\n")
    return values
