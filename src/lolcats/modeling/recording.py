"""Going back: what a linearized layer keeps so that its latest tokens can be taken away again.

A token that was folded into a state cannot be told from the others. Assisted decoding takes back tokens that were
just drafted, and says beforehand that it will (`Cache.activate_past_recording`) and after each round how many
(`crop`). So a recording layer keeps the state of the last crop and the tokens since then, and after a crop takes in
those that stay once more.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lolcats.ops import HybridState

# Of a longer call, such as a prompt, only so many tokens can be taken back; drafts are shorter.
MOST_REMOVED = 256

# Queries, keys, values and padding mask of new tokens, a state -> outputs [B, H, T, D] and the state after them.
Attend = Callable[[tuple[Tensor | None, ...], HybridState | None], tuple[Tensor, HybridState]]


class Recording:
    """Of one layer, since its cache was last cropped.

    Attributes:
        state: before `parts`; None: nothing came before.
        parts: queries, keys, values [B, heads, T, D] and masks [B, T] or None of what came since.
        removed: of the last of these tokens, how many the next call is to be without.
    """

    def __init__(self) -> None:
        self.state: HybridState | None = None
        self.parts: list[tuple[Tensor | None, ...]] = []
        self.removed = 0

    @property
    def tokens(self) -> int:
        return sum(_length(part) for part in self.parts)

    def remove(self, tokens: int) -> None:
        """Take back the last `tokens` tokens; if none, and none before, those recorded can go no more.

        Raises:
            ValueError: more than are recorded.
        """
        if self.removed + tokens > self.tokens:
            left = self.tokens - self.removed
            raise ValueError(f"{tokens} tokens to remove, but the cache recorded the last {left} alone")
        self.removed += tokens
        if not self.removed:
            self.parts = []

    def attend(
        self, new: tuple[Tensor | None, ...], state: HybridState | None, run: Attend
    ) -> tuple[Tensor, HybridState]:
        """Outputs of new tokens and the state after them, with what was removed before gone.

        Args:
            new: queries, keys, values and mask.
            state: after all parts, also those that were removed.
        """
        state = self._settle(state, run)
        outputs = []
        if (early := _length(new) - MOST_REMOVED) > 0:
            y_BHTD, state = run(_part(new, 0, early), state)
            outputs.append(y_BHTD)
            self.state, self.parts, new = state.clone(), [], _part(new, early, _length(new))
        elif not self.parts:
            self.state = None if state is None else state.clone()
        self.parts.append(new)
        y_BHTD, state = run(new, state)
        return torch.cat([*outputs, y_BHTD], 2), state

    def _settle(self, state: HybridState | None, run: Attend) -> HybridState | None:
        """The state without the removed tokens; the recording begins anew there."""
        if not self.removed:
            return state
        stay, parts = self.tokens - self.removed, self.parts
        state, self.parts, self.removed = self.state, [], 0
        for part in parts:
            kept = _part(part, 0, min(stay, _length(part)))
            stay -= _length(kept)
            if _length(kept):
                state = run(kept, state)[1]
        return state


def _length(part: tuple[Tensor | None, ...]) -> int:
    assert part[0] is not None
    return part[0].shape[2]


def _part(part: tuple[Tensor | None, ...], begin: int, end: int) -> tuple[Tensor | None, ...]:
    """The tokens from `begin` to before `end`."""
    *tensors, mask = part
    return (*(x[:, :, begin:end] for x in tensors if x is not None), None if mask is None else mask[:, begin:end])
