"""The page's charts as plain values, drawn by the page's own script.

A chart is {id, kind, title, note, ...}. kind "line" and "scatter": series of [x, y] points, where a line's x may be
places in `categories`; "bars": categories and series of values; "maps": see `AttentionMaps`. `color` names a colour of
the style sheet, `log` the axes that start logarithmic, `choices` other series {name, series} to choose from.
"""

from __future__ import annotations

import itertools
from typing import Any

from lolcats.analysis.diagnostics import bin_names, mean_over_layers

STAGES = {
    "swapped": "swapped, untrained",
    "transfer": "after attention transfer",
    "adjust": "after adjusting",
    "trained": "trained model",
}
_PALETTE = ("c1", "c2", "c3", "c4", "c5", "c6")

Chart = dict[str, Any]


def training_charts(report: dict[str, Any]) -> list[Chart]:
    """Validation perplexity and losses over the updates of each stage."""
    charts = []
    for name, stage in report.get("stages", {}).items():
        curve = stage.get("curve", [])
        label = {"transfer": "Attention transfer", "adjust": "Low-rank adjusting"}.get(name, name)
        perplexity = _points(curve, "perplexity")
        if perplexity:
            best = f"Best at update {stage['best_step']:,}." if "best_step" in stage else ""
            series = [{"name": "validation perplexity", "color": name, "points": perplexity}]
            charts.append(_line(f"{name}-perplexity", f"{label}: validation perplexity", best, series, "perplexity"))
        training = [[entry["step"], entry["train"]["loss"]] for entry in curve if entry.get("train", {}).get("loss")]
        series = [{"name": "training", "color": "teacher", "points": training}] if training else []
        if validation := _points(curve, "loss"):
            series.append({"name": "validation", "color": name, "points": validation})
        if series:
            unit = "nats per token" if name == "adjust" else "mse_factor * MSE + xent_factor * cross-entropy"
            charts.append(_line(f"{name}-loss", f"{label}: loss", f"In {unit}.", series, "loss"))
    return charts


def report_layer_charts(report: dict[str, Any]) -> list[Chart]:
    """Stage 1's losses by layer, which every training report has."""
    stage = report.get("stages", {}).get("transfer", {})
    before, after = stage.get("layer_losses_before"), stage.get("layer_losses")
    if not (before and after):
        return []
    layers = sorted(before, key=int)
    series = [
        {"name": STAGES[key], "color": key, "values": [losses.get(layer) for layer in layers]}
        for key, losses in (("swapped", before), ("transfer", after))
    ]
    note = "Validation loss of attention transfer, before and after."
    return [_bars("layer-losses", "Loss by layer", note, layers, series, "loss", log=True)]


def layer_charts(analysis: dict[str, Any]) -> list[Chart]:
    """Errors, shares and updates by layer."""
    layers = [str(layer) for layer in analysis["layers"]]
    charts = [
        _bars(
            "mse",
            "Output error by layer",
            "Mean squared error of each layer's output against its own softmax attention. All stages read the same"
            " hidden states.",
            layers,
            _by_stage(analysis, analysis["mse"]),
            "MSE",
            log=True,
        )
    ]
    original = analysis["mse_original"].get("adjust")
    if original and "transfer" in analysis["mse"]:
        series = [
            {"name": STAGES["transfer"], "color": "transfer", "values": analysis["mse"]["transfer"]},
            {"name": "adjusted, against its own softmax", "color": "adjust", "values": analysis["mse"]["adjust"]},
            {"name": "adjusted, against the original's", "color": "c5", "values": original},
        ]
        note = "Adjusting trains for the next token, so a layer may leave the attention that it replaced."
        charts.append(_bars("mse-lora", "Error after adjusting", note, layers, series, "MSE", log=True))
    if blocks := analysis.get("mse_blocks"):
        size, count = analysis["block_layers"], len(next(iter(blocks.values())))
        names = [f"{block * size}+" for block in range(count)]
        charts.append(
            _bars(
                "mse-blocks", f"Error by blocks of {size} layers", "", names, _by_stage(analysis, blocks), "MSE", True
            )
        )
    charts.append(
        _bars(
            "share",
            "Share of the linear part by layer",
            "Part of the attention weights' sum that comes from beyond the window, mean over heads and queries.",
            layers,
            _by_stage(analysis, analysis["linear_share"]["share"]),
            "share",
        )
    )
    if "error_by_position" in analysis:
        charts.append(_position_chart(analysis))
    charts += [_distance_chart(analysis), _entropy_chart(analysis)]
    if analysis.get("lora"):
        charts.append(_lora_chart(analysis, layers))
    return charts


def map_chart(analysis: dict[str, Any]) -> Chart | None:
    maps = analysis.get("maps") or {}
    if not maps.get("maps"):
        return None
    panels = [{"key": "softmax", "name": "softmax (original)"}]
    panels += [{"key": stage, "name": STAGES.get(stage, stage)} for stage in analysis["stages"]]
    note = f"The last {maps['span']} queries (rows) with the first and last keys (columns) of one held-out sequence."
    return {"id": "maps", "kind": "maps", "title": "Attention weights", "note": note, "panels": panels, **maps}


def length_chart(evaluation: Any) -> Chart | None:
    """Distribution of the effective sequence length in the text of `lolcats eval --tasks esl`; a line a model."""
    models = evaluation.get("models", []) if isinstance(evaluation, dict) else []
    series: list[Chart] = []
    for row in models:
        found = row.get("esl")
        if not found:
            continue
        edges = found["histogram"]["edges"]
        middles = [(low + high) / 2 for low, high in itertools.pairwise(edges)]
        shares = [count / found["sequences"] for count in found["histogram"]["counts"]]
        color = _PALETTE[len(series) % len(_PALETTE)]
        name = str(row["model"]).rstrip("/").rpartition("/")[2]
        series.append(
            {"name": name, "color": color, "points": [list(pair) for pair in zip(middles, shares, strict=True)]}
        )
    if not series:
        return None
    note = "How far each sequence's queries look back, summed over its queries; share of sequences."
    chart = _line("esl", "Effective sequence length", note, series, "share of sequences")
    return chart | {"x": "effective sequence length (tokens)"}


def _position_chart(analysis: dict[str, Any]) -> Chart:
    found = analysis["error_by_position"]

    def choice(name: str, values: dict[str, Any]) -> Chart:
        bars = _by_stage(analysis, values)
        return {"name": name, "series": [bar | {"points": [list(x) for x in enumerate(bar["values"])]} for bar in bars]}

    stages = found["relative"].items()
    choices = [choice("mean", {stage: mean_over_layers(rows) for stage, rows in stages})]
    for place, layer in enumerate(analysis["layers"]):
        choices.append(choice(str(layer), {stage: rows[place] for stage, rows in stages}))
    note = "Mean squared error over the mean square of the softmax outputs, by position of the token."
    chart = _line("position", "Relative error by position", note, choices[0]["series"], "relative error")
    return chart | {"x": "position", "categories": bin_names(found["positions"]), "pick": "layer", "choices": choices}


def _distance_chart(analysis: dict[str, Any]) -> Chart:
    share = analysis["linear_share"]
    series = [
        {
            "name": "softmax (original)",
            "color": "teacher",
            "values": mean_over_layers(share["softmax_by_distance"]),
        }
    ]
    for stage in analysis["stages"]:
        values = mean_over_layers(share["by_distance"][stage])
        series.append({"name": STAGES.get(stage, stage), "color": stage, "values": values})
    last = analysis["stages"][-1]
    values = mean_over_layers(share["linear_by_distance"][last])
    series.append({"name": "its linear part", "color": "c5", "values": values})
    note = "Attention weight by distance between query and key, mean over layers, heads and queries."
    return _bars("distance", "Weight by distance", note, bin_names(share["distances"]), series, "weight")


def _entropy_chart(analysis: dict[str, Any]) -> Chart:
    series = []
    for stage in analysis["stages"]:
        points = [
            [entropy, error, f"layer {layer}, head {head}"]
            for layer, entropies, errors in zip(
                analysis["layers"], analysis["entropy"]["softmax"], analysis["mse_heads"][stage], strict=True
            )
            for head, (entropy, error) in enumerate(zip(entropies, errors, strict=True))
        ]
        series.append({"name": STAGES.get(stage, stage), "color": stage, "points": points})
    found = {stage: value for stage, value in analysis["entropy_against_mse"].items() if value is not None}
    note = "One point a head. Rank correlation: " + (
        ", ".join(f"{STAGES.get(stage, stage)} {value:+.2f}" for stage, value in found.items()) or "not defined"
    )
    return {
        "id": "entropy",
        "kind": "scatter",
        "title": "Entropy of softmax attention against error",
        "note": f"{note}.",
        "series": series,
        "x": "entropy (nats)",
        "y": "MSE",
        "log": True,
        "can_log": True,
    }


def _lora_chart(analysis: dict[str, Any], layers: list[str]) -> Chart:
    found = {(str(row["layer"]), row["projection"]): row["relative"] for row in analysis["lora"]}
    projections = sorted({row["projection"] for row in analysis["lora"]}, key=lambda name: "qkvo".find(name[0]))
    series = [
        {
            "name": projection,
            "color": _PALETTE[place % len(_PALETTE)],
            "values": [found.get((layer, projection)) for layer in layers],
        }
        for place, projection in enumerate(projections)
    ]
    note = "Size of the adapters' update relative to the weight, |scale · BA| / |W| (Frobenius)."
    return _bars("lora", "LoRA updates by layer", note, layers, series, "relative update")


def _by_stage(analysis: dict[str, Any], values: dict[str, list[float]]) -> list[Chart]:
    return [
        {"name": STAGES.get(stage, stage), "color": stage, "values": values[stage]}
        for stage in analysis["stages"]
        if stage in values
    ]


def _points(curve: list[dict[str, Any]], key: str) -> list[list[float]]:
    return [[entry["step"], entry[key]] for entry in curve if isinstance(entry.get(key), int | float)]


def _line(name: str, title: str, note: str, series: list[Chart], y: str) -> Chart:
    return {
        "id": name,
        "kind": "line",
        "title": title,
        "note": note,
        "series": series,
        "x": "update",
        "y": y,
        "log": False,
        "can_log": True,
    }


def _bars(
    name: str, title: str, note: str, categories: list[str], series: list[Chart], y: str, log: bool = False
) -> Chart:
    x = "distance" if name == "distance" else "layer"
    return {
        "id": name,
        "kind": "bars",
        "title": title,
        "note": note,
        "categories": categories,
        "series": series,
        "x": x,
        "y": y,
        "log": log,
        "can_log": True,
    }
