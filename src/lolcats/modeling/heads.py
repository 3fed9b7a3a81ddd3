"""Which heads of a layer keep softmax attention: taking them apart and putting them together again.

Shapes: [B, H, T, D] of query heads or [B, G, T, D] of KV heads; a KV head g has the query heads g * H / G and on.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor


class HeadSplit:
    """Exact and linear heads of one layer.

    The weights keep the order of the base model, in which heads of one kind mostly stand together; so a few slices
    are joined here, and any family's projections can stay as they are.

    Args:
        num_kv_heads: G.
        exact: KV heads that keep softmax attention.
    """

    def __init__(self, num_kv_heads: int, exact: Sequence[int] = ()) -> None:
        self.exact = tuple(exact)
        self.linear = tuple(head for head in range(num_kv_heads) if head not in self.exact)
        self.num_kv_heads = num_kv_heads
        kinds = groupby(range(num_kv_heads), key=lambda head: head in self.exact)
        self._runs = [(is_exact, len(list(heads))) for is_exact, heads in kinds]

    def __repr__(self) -> str:
        return f"exact={self.exact}"

    def take_exact(self, x: Tensor, dim: int = 1) -> Tensor:
        """The exact heads' part of `x`, which has all heads in `dim`."""
        return self._take(x, dim, exact=True)

    def take_linear(self, x: Tensor, dim: int = 1) -> Tensor:
        """The linear heads' part of `x`."""
        return self._take(x, dim, exact=False)

    def join(self, exact: Tensor, linear: Tensor) -> Tensor:
        """All heads in their order, from what both kinds computed [B, *, T, D]."""
        size = exact.shape[1] // len(self.exact)
        parts = {True: exact, False: linear}
        taken = {True: 0, False: 0}
        pieces = []
        for is_exact, count in self._runs:
            pieces.append(parts[is_exact].narrow(1, taken[is_exact], count * size))
            taken[is_exact] += count * size
        return torch.cat(pieces, 1)

    def _take(self, x: Tensor, dim: int, exact: bool) -> Tensor:
        size = x.shape[dim] // self.num_kv_heads
        pieces, begin = [], 0
        for is_exact, count in self._runs:
            if is_exact == exact:
                pieces.append(x.narrow(dim, begin * size, count * size))
            begin += count
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
