"""What is measured in every layer: output error, also by position, the linear part's share, maps of weights."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from lolcats.analysis.observe import Seen
from lolcats.config.attention import AttentionConfig

DIGITS = 4  # of the weights in pictures
WORST = 10  # layers and heads that are listed


class _Means:
    """Running means of tensors by kind, stage and layer; every batch counts by its number of sequences or queries."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str, int], tuple[Tensor, int]] = {}

    def add(self, kind: str, seen: Seen, mean: Tensor, count: int, stage: str | None = None) -> None:
        key = (kind, seen.stage if stage is None else stage, seen.layer)
        total, before = self._sums.get(key, (torch.zeros_like(mean), 0))
        longest = max(len(mean), len(total))  # shorter rows have fewer bins of distance
        mean, total = pad(mean, (0, longest - len(mean))), pad(total, (0, longest - len(total)))
        self._sums[key] = (total + mean * count, before + count)

    def by_stage(self, kind: str) -> dict[str, list[list[float]]]:
        """Stage -> layer, in order -> the mean."""
        rows: dict[str, list[list[float]]] = {}
        for (found, stage, _), (total, count) in sorted(self._sums.items(), key=lambda item: item[0][2]):
            if found == kind:
                rows.setdefault(stage, []).append((total / count).tolist())
        return rows

    def by_layer(self, kind: str) -> list[list[float]]:
        """Of what has no stage."""
        return self.by_stage(kind).get("", [])


class OutputError:
    """Mean squared error of hybrid attention's outputs, by stage, layer and head.

    `result()`:
        mse: stage -> one value per layer, against the stage's own softmax attention.
        mse_original: the same against softmax attention before stage 2, on the same hidden states: whether
            adjusted projections bring the layer nearer to the attention that it replaced.
        mse_heads: stage -> layer -> one value per head, against its own softmax.
        signal_heads: stage -> layer -> one value per head, the mean square of its own softmax outputs: what
            `mse_heads` compares to.
        signal: one value per layer, the mean square of the original outputs: what an error of 1 would compare to.
    """

    def __init__(self) -> None:
        self._means = _Means()

    def see(self, seen: Seen) -> None:
        y, own, original = (x.float() for x in (seen.y_hybrid_BHTD, seen.y_softmax_BHTD, seen.y_original_BHTD))
        for kind, squared in (("own", y - own), ("original", y - original), ("own signal", own)):
            self._means.add(kind, seen, squared.square().mean(dim=(0, 2, 3)), len(y))
        self._means.add("signal", seen, original.square().mean(dim=(0, 2, 3)), len(y), stage="")

    def result(self) -> dict[str, Any]:
        own, original = self._means.by_stage("own"), self._means.by_stage("original")
        return {
            "mse": {stage: _mean_rows(rows) for stage, rows in own.items()},
            "mse_original": {stage: _mean_rows(rows) for stage, rows in original.items()},
            "mse_heads": own,
            "signal_heads": self._means.by_stage("own signal"),
            "signal": _mean_rows(self._means.by_layer("signal")),
        }


class ErrorByPosition:
    """Mean squared error of hybrid attention's outputs against the stage's own softmax, by position of the token.

    A token's position is that in its own sequence or document; padding does not count.

    `result()`:
        positions: the bins [first, last], doubling.
        tokens: how many each bin has.
        mse: stage -> layer -> one value per bin, mean over tokens, heads and dimensions.
        signal: the same of the mean square of the stage's own softmax outputs.
        relative: their quotient.
    """

    def __init__(self) -> None:
        self._sums: dict[tuple[str, int], Tensor] = {}  # [3, bins]: of squared errors, of squares, of tokens
        self._tokens = 0  # of the longest sequence so far

    def see(self, seen: Seen) -> None:
        position_BT, real_BT = seen.position_BT, seen.real_BT
        y_softmax = seen.y_softmax_BHTD.float()
        error_BT = (seen.y_hybrid_BHTD.float() - y_softmax).square().mean(dim=(1, 3))
        signal_BT = y_softmax.square().mean(dim=(1, 3))
        value_3N = torch.stack([error_BT, signal_BT, torch.ones_like(error_BT)])[:, real_BT].double()
        position_N = position_BT[real_BT]
        self._tokens = max(self._tokens, int(position_N.max()) + 1 if len(position_N) else 0)
        sum_3K = self._sums.get((seen.stage, seen.layer), value_3N.new_zeros(3, 1))
        sum_3K = pad(sum_3K, (0, len(doubling_bins(self._tokens)) - sum_3K.shape[1]))  # shorter ones had fewer bins
        self._sums[seen.stage, seen.layer] = sum_3K.index_add(1, bin_numbers(position_N), value_3N)

    def result(self) -> dict[str, Any]:
        tables: dict[str, dict[str, list[list[float]]]] = {"mse": {}, "signal": {}, "relative": {}}
        tokens: list[int] = []
        for (stage, _), (error, signal, count) in sorted(self._sums.items(), key=lambda item: item[0][1]):
            mse, square = (error / count).tolist(), (signal / count).tolist()
            relative = [_relative(*pair) for pair in zip(mse, square, strict=True)]
            for kind, row in (("mse", mse), ("signal", square), ("relative", relative)):
                tables[kind].setdefault(stage, []).append(row)
            tokens = count.long().tolist()
        return {"positions": doubling_bins(self._tokens), "tokens": tokens, **tables}


class LinearShare:
    """How much of the output comes from the linear part: its share of the denominator.

    Rows of the hybrid weights sum to 1, so a sum over the keys outside the window is that share.

    `result()`:
        share: stage -> one value per layer (mean over heads and queries).
        share_heads: stage -> layer -> heads.
        distances: the bins [first, last] of query position - key position, doubling.
        by_distance: stage -> layer -> mean weight in each bin, and linear_by_distance the part of it that the
            linear part gives. softmax_by_distance: layer -> the first stage's softmax weight in each bin.
    """

    def __init__(self) -> None:
        self._means = _Means()
        self._tokens = 0

    def see(self, seen: Seen) -> None:
        hybrid, softmax, length_N = seen.weights
        real_NT = _real(hybrid, length_N)
        tokens, count = hybrid.shape[-1], int(real_NT.sum())
        self._tokens = max(self._tokens, tokens)
        outside_TT = outside_window(seen.module.config, tokens, hybrid.device)
        linear = hybrid * outside_TT
        self._means.add("share", seen, _over_queries(linear.sum(-1), real_NT).mean(0), count)
        bin_TT = _distance_bins(tokens, hybrid.device)
        self._means.add("hybrid", seen, _by_bin(hybrid, bin_TT, real_NT), count)
        self._means.add("linear", seen, _by_bin(linear, bin_TT, real_NT), count)
        if seen.is_original:
            self._means.add("softmax", seen, _by_bin(softmax, bin_TT, real_NT), count, stage="")

    def result(self) -> dict[str, Any]:
        share = self._means.by_stage("share")
        return {
            "share": {stage: _mean_rows(rows) for stage, rows in share.items()},
            "share_heads": share,
            "distances": doubling_bins(self._tokens),
            "by_distance": self._means.by_stage("hybrid"),
            "linear_by_distance": self._means.by_stage("linear"),
            "softmax_by_distance": self._means.by_layer("softmax"),
        }


class AttentionMaps:
    """Weights between the last queries and the first and last keys of the first sequence, as in the paper's appendix.

    Args:
        layers, heads: which; those that there are not are passed over.
        span: queries, and keys at either end.

    `result()`: span, queries [first, last], keys (positions), maps: a list of {layer, head, softmax, and one
    entry a stage}, each [span, 2 * span] with rows of increasing query position; fewer keys in short sequences.
    """

    def __init__(self, layers: list[int], heads: list[int], span: int = 32) -> None:
        self.layers, self.heads, self.span = layers, heads, span
        self._maps: dict[tuple[int, int], dict[str, Any]] = {}
        self._length = 0
        self._done: set[tuple[int, str]] = set()

    def see(self, seen: Seen) -> None:
        if seen.layer not in self.layers or (seen.layer, seen.stage) in self._done:
            return
        self._done.add((seen.layer, seen.stage))
        hybrid, softmax, length_N = seen.weights
        longest = int(length_N.argmax())
        self._length = int(length_N[longest])
        for head in self.heads:
            if head >= hybrid.shape[1]:
                continue
            entry = self._maps.setdefault((seen.layer, head), {"layer": seen.layer, "head": head})
            if seen.is_original and "softmax" not in entry:
                entry["softmax"] = self._cut(softmax[longest, head])
            entry[seen.stage] = self._cut(hybrid[longest, head])

    def result(self) -> dict[str, Any]:
        length, span = self._length, min(self.span, self._length)
        return {
            "span": span,
            "queries": [length - span, length - 1],
            "keys": self._keys(),
            "maps": [self._maps[key] for key in sorted(self._maps)],
        }

    def _keys(self) -> list[int]:
        ends = {*range(min(self.span, self._length)), *range(max(self._length - self.span, 0), self._length)}
        return sorted(ends)

    def _cut(self, weight_TT: Tensor) -> list[list[float]]:
        rows = weight_TT[max(self._length - self.span, 0) : self._length][:, self._keys()].float()
        return [[float(f"{value:.{DIGITS}g}") for value in row] for row in rows.tolist()]


def worst_first(
    layers: list[int], mse_heads: list[list[float]], signal_heads: list[list[float]], count: int = WORST
) -> dict[str, list[dict[str, Any]]]:
    """The layers and the heads with the largest error relative to the mean square of what they should give.

    Args:
        layers: their indices in the model.
        mse_heads, signal_heads: layer -> heads, as `OutputError` gives them for one stage.
        count: of layers, and of heads.

    Returns:
        layers: {layer, mse, signal, relative}, worst first; heads: the same, with `head`. A layer's values are
        means over its heads.
    """
    of_layers, of_heads = [], []
    for layer, errors, signals in zip(layers, mse_heads, signal_heads, strict=True):
        of_layers.append({"layer": layer, **_values(sum(errors) / len(errors), sum(signals) / len(signals))})
        for head, pair in enumerate(zip(errors, signals, strict=True)):
            of_heads.append({"layer": layer, "head": head, **_values(*pair)})
    return {
        name: sorted(entries, key=lambda entry: -entry["relative"])[:count]
        for name, entries in (("layers", of_layers), ("heads", of_heads))
    }


def worst_rows(worst: dict[str, Any]) -> list[list[str]]:
    """A table of what `worst_first` gives: rank, layer, its relative error, layer/head, its relative error."""
    layers = [[str(entry["layer"]), _percent(entry["relative"])] for entry in worst["layers"]]
    heads = [[f"{entry['layer']}/{entry['head']}", _percent(entry["relative"])] for entry in worst["heads"]]
    pairs = itertools.zip_longest(layers, heads, fillvalue=["", ""])
    return [[str(rank), *layer, *head] for rank, (layer, head) in enumerate(pairs, start=1)]


def _values(mse: float, signal: float) -> dict[str, float]:
    return {"mse": mse, "signal": signal, "relative": _relative(mse, signal)}


def _relative(mse: float, signal: float) -> float:
    if mse == 0:
        return 0.0
    return mse / signal if signal > 0 and math.isfinite(mse) else math.inf  # what is broken counts as worst


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"  # JSON has no infinity


def outside_window(attention: AttentionConfig, tokens: int, device: torch.device | str = "cpu") -> Tensor:
    """[T, T] bool: which keys (columns) of which queries (rows) belong to the linear part."""
    position_T = torch.arange(tokens, device=device)
    start_T1 = attention.window_start(position_T)[:, None]
    return (
        (position_T[None] < start_T1)
        & (position_T[None] >= attention.sinks)
        & (position_T[None] <= position_T[:, None])
    )


def doubling_bins(tokens: int) -> list[list[int]]:
    """[first, last] of bins of doubling width, of distances or positions: 0, 1, 2-3, 4-7, ... below `tokens`."""
    bins, first = [[0, 0]], 1
    while first < tokens:
        bins.append([first, min(2 * first, tokens) - 1])
        first *= 2
    return bins


def bin_names(bins: list[list[int]]) -> list[str]:
    """ "0", "1", "2-3", ... of `doubling_bins`."""
    return [str(first) if first == last else f"{first}-{last}" for first, last in bins]


def mean_over_layers(rows: list[list[float]]) -> list[float | None]:
    """Of layer -> values; None where a layer has no number."""
    return [None if None in column else sum(column) / len(rows) for column in zip(*rows, strict=True)]


def bin_numbers(value: Tensor) -> Tensor:
    """Where in `doubling_bins` each whole number >= 0 is."""
    return torch.where(value == 0, 0, torch.floor(torch.log2(value.clamp_min(1).double())).long() + 1)


def _distance_bins(tokens: int, device: torch.device) -> Tensor:
    """[T, T] number of the bin of every query and key; -1 above the diagonal."""
    position_T = torch.arange(tokens, device=device)
    distance_TT = position_T[:, None] - position_T[None]
    return bin_numbers(distance_TT).masked_fill(distance_TT < 0, -1)


def _by_bin(weight_NHTT: Tensor, bin_TT: Tensor, real_NT: Tensor) -> Tensor:
    """[bins] mean over real queries and heads of the weight in each bin."""
    mean_TT = (weight_NHTT.mean(1) * real_NT[..., None]).sum(0) / real_NT.sum()
    bins = len(doubling_bins(weight_NHTT.shape[-1]))
    total = torch.zeros(bins, dtype=torch.float64, device=mean_TT.device)
    causal = bin_TT >= 0
    return total.index_add_(0, bin_TT[causal], mean_TT[causal].double())


def _real(weight_NHTT: Tensor, length_N: Tensor) -> Tensor:
    return torch.arange(weight_NHTT.shape[-1], device=weight_NHTT.device) < length_N[:, None]


def _over_queries(value_NHT: Tensor, real_NT: Tensor) -> Tensor:
    """[1, H] mean over real queries of all sequences."""
    return ((value_NHT * real_NT[:, None]).sum((0, 2)) / real_NT.sum())[None]


def _mean_rows(rows: list[list[float]]) -> list[float]:
    return [sum(row) / len(row) if row else math.nan for row in rows]
