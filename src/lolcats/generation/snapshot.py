"""The state of one sequence, to continue from as often as wanted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Snapshot:
    """All that a sequence needs to continue.

    The last token is always outside the state: feeding it gives the logits of the next one, so that none
    need to be kept.

    Attributes:
        token_ids: all tokens so far.
        length: how many of them the state holds; fewer than all.
        tensors: the state of each layer, as `SlotCache.read` gives it. Its size does not depend on `length`,
            except for exact heads.
        model: which made it.
    """

    token_ids: list[int]
    length: int
    tensors: dict[str, Tensor]
    model: Any
