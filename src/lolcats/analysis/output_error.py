"""Where hybrid attention loses most: error by token position, and the worst layers and heads."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from lolcats.analysis.diagnostics import bin_numbers, doubling_bins
from lolcats.analysis.observe import Seen

WORST = 10  # layers and heads that are listed


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
