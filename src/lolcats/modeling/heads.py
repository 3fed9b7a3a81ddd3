"""Which heads of a layer keep softmax attention: taking them apart and putting them together again.

Shapes: [B, H, T, D] of query heads or [B, G, T, D] of KV heads; a KV head g has the query heads g * H / G and on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor

from lolcats.errors import UserError


class HeadSplit:
    """Exact and linear heads of one layer.

    The weights keep the order of the base model, in which heads of one kind mostly stand together; so a few slices
    are joined here, and any family's projections can stay as they are.
    """

    def __init__(self, num_kv_heads: int, exact: Sequence[int] = ()) -> None:
        self.exact = tuple(exact)
        self.linear = tuple(head for head in range(num_kv_heads) if head not in self.exact)
        self.num_kv_heads = num_kv_heads
        kinds = groupby(range(num_kv_heads), key=lambda head: head in self.exact)
        self._runs = [len(list(heads)) for _, heads in kinds]  # of heads of one kind, which take turns
        self._exact = slice(0 if 0 in self.exact else 1, None, 2)
        self._linear = slice(1 - self._exact.start, None, 2)

    def split(self, x: Tensor, dim: int = 1) -> tuple[Tensor, Tensor]:
        """The exact and the linear heads' parts of `x`, which has all heads in `dim`."""
        pieces = _pieces(x, self._runs, self.num_kv_heads, dim)
        return _joined(pieces[self._exact], dim), _joined(pieces[self._linear], dim)

    def take_linear(self, x: Tensor, dim: int = 1) -> Tensor:
        """The linear heads' part of `x`."""
        return _joined(_pieces(x, self._runs, self.num_kv_heads, dim)[self._linear], dim)

    def join(self, exact: Tensor, linear: Tensor) -> Tensor:
        """All heads in their order, from what both kinds computed [B, *, T, D]."""
        pieces = [exact] * len(self._runs)
        for kind, x, heads in ((self._exact, exact, self.exact), (self._linear, linear, self.linear)):
            pieces[kind] = _pieces(x, self._runs[kind], len(heads), 1)
        return torch.cat(pieces, 1)


def _pieces(x: Tensor, runs: list[int], heads: int, dim: int) -> tuple[Tensor, ...]:
    """`x`, which has `heads` KV heads in `dim`, taken apart into runs of heads."""
    if len(runs) == 1:
        return (x,)
    size = x.shape[dim] // heads
    # one split, whose backward is one concatenation, and not a slice for each piece
    return tuple(torch.split_with_sizes(x, [count * size for count in runs], dim))


def _joined(pieces: tuple[Tensor, ...], dim: int) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def named_heads(names: Iterable[str], num_kv_heads: Mapping[int, int], model: str) -> dict[int, set[int]]:
    """The heads of each layer that are named as in `AttentionConfig.exact`: 7.2, 7, 0-7."""
    found: dict[int, set[int]] = {index: set() for index in num_kv_heads}
    for name in names:
        layer, _, head = name.partition(".")
        first, _, last = layer.partition("-")
        layers = range(int(first), int(last or first) + 1)
        if not layers or not num_kv_heads.keys() >= set(layers):
            most = max(num_kv_heads)
            known = f"0 to {most}" if len(num_kv_heads) > most else ", ".join(map(str, num_kv_heads))
            raise UserError(f"exact={name}: {model} has attention in the layers {known}")
        if head and int(head) >= num_kv_heads[layers[0]]:
            raise UserError(
                f"exact={name}: layer {layer} of {model} has the KV heads 0 to {num_kv_heads[layers[0]] - 1}"
            )
        for index in layers:
            found[index] |= {int(head)} if head else set(range(num_kv_heads[index]))
    return found
