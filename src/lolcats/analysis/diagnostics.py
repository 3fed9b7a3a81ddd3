"""What is measured in every layer: output error, entropy, the linear part's share, pictures of weights."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from lolcats.analysis.observe import Seen
from lolcats.config.attention import AttentionConfig

DIGITS = 4  # of the weights in pictures


class _Means:
    """Running means of tensors by key; every batch counts by its number of sequences or queries."""

    def __init__(self) -> None:
        self._sums: dict[Any, tuple[Tensor, int]] = {}

    def add(self, key: Any, mean: Tensor, count: int) -> None:
        total, before = self._sums.get(key, (torch.zeros_like(mean), 0))
        if mean.dim() == 1 and len(mean) != len(total):  # shorter rows have fewer bins of distance
            longer = max(len(mean), len(total))
            mean, total = pad(mean, (0, longer - len(mean))), pad(total, (0, longer - len(total)))
        self._sums[key] = (total + mean * count, before + count)

    def get(self, key: Any) -> Any:
        """The mean under `key`, as a number or nested lists."""
        total, count = self._sums[key]
        return (total / count).tolist()

    def keys(self) -> list[Any]:
        return list(self._sums)


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
        y = seen.y_hybrid_BHTD.float()
        for kind, target in (("own", seen.y_softmax_BHTD), ("original", seen.y_original_BHTD)):
            error_H = (y - target.float()).square().mean(dim=(0, 2, 3))
            self._means.add((kind, seen.stage, seen.layer), error_H, len(y))
        signal_H = seen.y_softmax_BHTD.float().square().mean(dim=(0, 2, 3))
        self._means.add(("own signal", seen.stage, seen.layer), signal_H, len(y))
        self._means.add(("signal", "", seen.layer), seen.y_original_BHTD.float().square().mean(dim=(0, 2, 3)), len(y))

    def result(self) -> dict[str, Any]:
        heads: dict[str, dict[str, list[list[float]]]] = {"own": {}, "original": {}, "own signal": {}, "signal": {}}
        for kind, stage, layer in sorted(self._means.keys(), key=lambda key: key[2]):
            heads[kind].setdefault(stage, []).append(self._means.get((kind, stage, layer)))
        return {
            "mse": {stage: _mean_rows(rows) for stage, rows in heads["own"].items()},
            "mse_original": {stage: _mean_rows(rows) for stage, rows in heads["original"].items()},
            "mse_heads": heads["own"],
            "signal_heads": heads["own signal"],
            "signal": _mean_rows(heads["signal"].get("", [])),
        }


def block_means(values: list[float], size: int) -> list[float]:
    """Means over blocks of `size` layers; the last block may be smaller."""
    blocks = [values[begin : begin + size] for begin in range(0, len(values), size)]
    return [sum(block) / len(block) for block in blocks]


class Entropy:
    """Entropy of the attention weights in nats, mean over queries, by layer and head.

    `result()`: softmax: layer -> heads, of the first stage; hybrid: stage -> layer -> heads; uniform: the
    entropy of uniform causal attention over the same queries, the largest possible.
    """

    def __init__(self) -> None:
        self._means = _Means()

    def see(self, seen: Seen) -> None:
        hybrid, softmax, length_N = seen.weights
        real_NT = _real(hybrid, length_N)
        count = int(real_NT.sum())
        self._means.add(("hybrid", seen.stage, seen.layer), _entropy_H(hybrid, real_NT), count)
        if seen.y_softmax_BHTD is seen.y_original_BHTD:
            self._means.add(("softmax", "", seen.layer), _entropy_H(softmax, real_NT), count)
        position_T = torch.arange(1, hybrid.shape[-1] + 1, device=hybrid.device, dtype=hybrid.dtype)
        uniform = (position_T.log() * real_NT).sum() / real_NT.sum()
        self._means.add(("uniform", "", -1), uniform, count)

    def result(self) -> dict[str, Any]:
        softmax: list[list[float]] = []
        hybrid: dict[str, list[list[float]]] = {}
        for kind, stage, layer in sorted(self._means.keys(), key=lambda key: key[2]):
            if kind == "softmax":
                softmax.append(self._means.get((kind, stage, layer)))
            elif kind == "hybrid":
                hybrid.setdefault(stage, []).append(self._means.get((kind, stage, layer)))
        return {"softmax": softmax, "hybrid": hybrid, "uniform": self._means.get(("uniform", "", -1))}


def correlation(first: list[float], second: list[float]) -> float | None:
    """Spearman's rank correlation; None for fewer than three pairs or constant values."""
    if len(first) < 3 or len(set(first)) < 2 or len(set(second)) < 2:
        return None
    ranks = torch.stack([_ranks(first), _ranks(second)])
    return float(torch.corrcoef(ranks)[0, 1])


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
        key = (seen.stage, seen.layer)
        self._means.add(("share", *key), _over_queries(linear.sum(-1), real_NT).mean(0), count)
        bin_TT = _distance_bins(tokens, hybrid.device)
        self._means.add(("hybrid", *key), _by_bin(hybrid, bin_TT, real_NT), count)
        self._means.add(("linear", *key), _by_bin(linear, bin_TT, real_NT), count)
        if seen.y_softmax_BHTD is seen.y_original_BHTD:
            self._means.add(("softmax", "", seen.layer), _by_bin(softmax, bin_TT, real_NT), count)

    def result(self) -> dict[str, Any]:
        tables: dict[str, dict[str, list[Any]]] = {"share": {}, "hybrid": {}, "linear": {}, "softmax": {}}
        for kind, stage, layer in sorted(self._means.keys(), key=lambda key: key[2]):
            tables[kind].setdefault(stage, []).append(self._means.get((kind, stage, layer)))
        return {
            "share": {stage: _mean_rows(rows) for stage, rows in tables["share"].items()},
            "share_heads": tables["share"],
            "distances": doubling_bins(self._tokens),
            "by_distance": tables["hybrid"],
            "linear_by_distance": tables["linear"],
            "softmax_by_distance": tables["softmax"].get("", []),
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
            if seen.y_softmax_BHTD is seen.y_original_BHTD and "softmax" not in entry:
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


def outside_window(spec: AttentionConfig, tokens: int, device: torch.device | str = "cpu") -> Tensor:
    """[T, T] bool: which keys (columns) of which queries (rows) belong to the linear part."""
    position_T = torch.arange(tokens, device=device)
    start_T1 = spec.window_start(position_T)[:, None]
    return (position_T[None] < start_T1) & (position_T[None] >= spec.sinks) & (position_T[None] <= position_T[:, None])


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


def _entropy_H(weight_NHTT: Tensor, real_NT: Tensor) -> Tensor:
    entropy_NHT = torch.special.entr(weight_NHTT).sum(-1)
    return _over_queries(entropy_NHT, real_NT)[0]


def _mean_rows(rows: list[list[float]]) -> list[float]:
    return [sum(row) / len(row) if row else math.nan for row in rows]


def _ranks(values: list[float]) -> Tensor:
    """Ranks, ties by their mean."""
    tensor = torch.tensor(values, dtype=torch.float64)
    less = (tensor[None] < tensor[:, None]).sum(1)
    equal = (tensor[None] == tensor[:, None]).sum(1)
    return less + (equal - 1) / 2
