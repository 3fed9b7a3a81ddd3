"""All diagnostics of one model, written beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from lolcats.analysis.diagnostics import (
    AttentionMaps,
    ErrorByPosition,
    LinearShare,
    OutputError,
)
from lolcats.analysis.files import ANALYSIS_FILE, write_json
from lolcats.analysis.observe import measure
from lolcats.analysis.stages import StageWeights, load_stages
from lolcats.config import DataSection
from lolcats.config.attention import AttentionConfig
from lolcats.data import PackedDataset, build_evaluation_dataset
from lolcats.errors import UserError
from lolcats.evaluation.load import with_begin_token
from lolcats.evaluation.perplexity import dataset_perplexity
from lolcats.modeling.call import SOFTMAX, AttentionCall
from lolcats.modeling.model import LolcatsForCausalLM
from lolcats.provenance import provenance

FORMAT = 3  # of analysis.json; raise when a key changes its meaning
MAP_LAYERS, MAP_HEADS = 5, 4  # as the paper's appendix shows
ABLATIONS = {
    "full": "the model as it is",
    "window_only": "linear part off",
    "linear_only": "window reduced to the query's own token, no sinks",
    "softmax": "softmax attention in all layers, with the trained projections",
}


def analyse(
    folder: str | Path,
    data: DataSection,
    *,
    dtype: str = "auto",
    device: str = "auto",
    batch_size: int = 1,
    span: int = 32,
    output: Path | None = None,
    report: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Measure everything on the linearized model in `folder` and write `analysis.json` there.

    Args:
        data: text that was not trained on; all rows, or the first `validation_sequences` packed sequences. If it
            does not set `begin_token`, that is as the folder was trained.
        batch_size: sequences at a time; attention weights take batch * heads * T * T numbers.
        span: queries and keys of the attention maps.
        output: another file than `folder/analysis.json`.
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

    error, by_position, share = OutputError(), ErrorByPosition(), LinearShare()
    maps = AttentionMaps(_spread(layers, MAP_LAYERS), list(range(min(heads, MAP_HEADS))), span)
    measure(weights, dataset, [error, by_position, share, maps], batch_size=batch_size)
    report("perplexity of the stages and of the model without one of its parts")
    values = {
        "format": FORMAT,
        "model": str(folder),
        "stages": weights.names,
        "layers": layers,
        "notes": weights.notes,
        "data": dataset.info,
        "attention": asdict(weights.model.config.attention) | {"exact": weights.model.config.exact_heads},
        **error.result(),
        "error_by_position": by_position.result(),
        "linear_share": share.result(),
        "maps": maps.result(),
        "perplexity": stage_perplexities(weights, dataset, batch_size=batch_size),
        "ablations": part_ablations(weights.model, dataset, batch_size=batch_size),
        "ablations_described": ABLATIONS,
        "gamma": window_gammas(weights),
        "provenance": provenance(),
    }
    write_json(output or folder / ANALYSIS_FILE, values)
    return values


def stage_perplexities(weights: StageWeights, dataset: PackedDataset, *, batch_size: int = 1) -> dict[str, float]:
    """Perplexity after each stage, and of the teacher: softmax attention before stage 2, where that is known."""
    result: dict[str, float] = {}
    if weights.names[0] == "swapped":
        weights.use("swapped")
        measured = dataset_perplexity(weights.model, dataset, batch_size=batch_size, attention_call=SOFTMAX)
        result["teacher"] = measured["perplexity"]
    for stage in weights.names:  # the last one's weights are left
        weights.use(stage)
        result[stage] = dataset_perplexity(weights.model, dataset, batch_size=batch_size)["perplexity"]
    return result


def part_ablations(model: LolcatsForCausalLM, dataset: PackedDataset, *, batch_size: int = 1) -> dict[str, Any]:
    """Perplexity of `model` by name of `ABLATIONS`; None where the model has no such part to leave.

    With the linear part off, the softmax of the window takes the whole weight. Nothing is trained again.
    """
    result: dict[str, float | None] = dict.fromkeys(ABLATIONS)
    for name in ABLATIONS:
        ablated = ablated_attention(model.config.attention, name)
        if ablated is not None:
            call = SOFTMAX if name == "softmax" else AttentionCall(attention=ablated)
            measured = dataset_perplexity(model, dataset, batch_size=batch_size, attention_call=call)
            result[name] = measured["perplexity"]
    return result


def ablated_attention(attention: AttentionConfig, name: str) -> AttentionConfig | None:
    """The attention of an ablation; None if it has nothing left, or nothing to take away."""
    if name in ("window_only", "linear_only") and not attention.has_both_parts:
        return None
    if name == "window_only":
        return replace(attention, feature_map=None, linear_length_cap=0)
    if name == "linear_only":
        return replace(attention, window="sliding", window_size=1, window_blocks=1, sinks=0)
    return attention


def window_gammas(weights: StageWeights) -> dict[str, list[list[float]]]:
    """The window's factor gamma, stage -> layer -> heads."""
    result = {}
    for stage in weights.names:
        weights.use(stage)
        modules = sorted(weights.model.linear_layers(), key=lambda item: item[0])
        result[stage] = [torch.sigmoid(module.window_factor).tolist() for _, module in modules]
    return result


def _spread(layers: list[int], count: int) -> list[int]:
    """`count` of the layers, evenly spaced, the first and the last among them."""
    if len(layers) <= count:
        return layers
    return [layers[round(place * (len(layers) - 1) / (count - 1))] for place in range(count)]
