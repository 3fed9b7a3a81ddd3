"""Perplexity of a trained model with one of its two parts taken away."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from lolcats.config.attention import AttentionConfig
from lolcats.data import PackedDataset
from lolcats.evaluation.perplexity import dataset_perplexity
from lolcats.modeling.call import AttentionCall
from lolcats.modeling.model import LolcatsForCausalLM

ABLATIONS = {
    "full": "the model as it is",
    "window_only": "linear part off",
    "linear_only": "window reduced to the query's own token, no sinks, no sparse cache",
    "softmax": "softmax attention in all layers, with the trained projections",
}


def part_ablations(model: LolcatsForCausalLM, dataset: PackedDataset, *, batch_size: int = 1) -> dict[str, Any]:
    """Perplexity of `model` by name of `ABLATIONS`; None where the model has no such part to leave.

    With the linear part off, the softmax of the window takes the whole weight. Nothing is trained again.
    """
    result: dict[str, float | None] = {}
    for name in ABLATIONS:
        spec = model.config.attention
        ablated = ablated_spec(spec, name)
        if ablated is None:
            result[name] = None
            continue
        call = AttentionCall(mode="softmax" if name == "softmax" else "hybrid")
        with _spec(model, ablated):
            measured = dataset_perplexity(model, dataset, batch_size=batch_size, attention_call=call)
            result[name] = measured["perplexity"]
    return result


def ablated_spec(spec: AttentionConfig, name: str) -> AttentionConfig | None:
    """The attention of an ablation; None if it has nothing left, or nothing to take away."""
    if name == "window_only":
        return (
            replace(spec, feature_map=None, sparse_cache=0, linear_length_cap=0)
            if spec.has_softmax and spec.feature_map is not None
            else None
        )
    if name == "linear_only":
        if not spec.has_softmax or spec.feature_map is None:
            return None
        return replace(spec, window="sliding", window_size=1, window_blocks=1, sinks=0, sparse_cache=0)
    return spec


@contextmanager
def _spec(model: LolcatsForCausalLM, spec: AttentionConfig) -> Iterator[None]:
    """All linearized layers compute `spec` within the block; their parameters stay."""
    before = [(module, module.config) for _, module in model.linear_layers()]
    try:
        for module, _ in before:
            module.config = spec
        yield
    finally:
        for module, old in before:
            module.config = old
