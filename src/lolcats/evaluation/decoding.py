"""Greedy continuations of many prompts, by the model's own forward pass and cache."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from lolcats.evaluation.cache import prefill


@torch.no_grad()
def greedy(
    model: Any,
    prompts: list[list[int]],
    max_new_tokens: int,
    *,
    end_tokens: Collection[int] = (),
    batch_size: int = 16,
    chunk: int = 2048,
    on_progress: Callable[[int], None] | None = None,
) -> list[list[int]]:
    """The likeliest next token, again and again, for each prompt.

    Args:
        prompts: token ids, each at least one.
        end_tokens: end a continuation, and are its last token.
        chunk: most prompt tokens of a row that go through the model at a time.
        on_progress: called with the number of prompts just finished.

    Returns:
        The new tokens of each prompt.
    """
    device = next(model.parameters()).device
    answers: list[list[int]] = [[] for _ in prompts]
    order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
    for begin in range(0, len(order), batch_size):
        picked = order[begin : begin + batch_size]
        ids_BT, mask_BT = pad_left([prompts[index] for index in picked], device)
        new_BN = _continue(model, ids_BT, mask_BT, max_new_tokens, end_tokens, chunk)
        for index, row in zip(picked, new_BN.tolist(), strict=True):
            answers[index] = cut(row, end_tokens)
        if on_progress is not None:
            on_progress(len(picked))
    return answers


def _continue(model: Any, ids_BT: Tensor, mask_BT: Tensor, new: int, end_tokens: Collection[int], chunk: int) -> Tensor:
    padded = not bool(mask_BT.all())
    logits_BV, cache = prefill(model, ids_BT, mask_BT=mask_BT if padded else None, chunk=chunk)
    ends = torch.tensor(sorted(end_tokens), dtype=torch.int64, device=ids_BT.device)
    tokens = [logits_BV.argmax(-1)]
    done_B = torch.isin(tokens[0], ends)
    position_B1 = mask_BT.sum(1, keepdim=True)
    while len(tokens) < new and not bool(done_B.all()):
        extra: dict[str, Any] = {}
        if padded:
            mask_BT = torch.cat([mask_BT, mask_BT.new_ones(len(mask_BT), 1)], dim=1)
            extra = {"attention_mask": mask_BT, "position_ids": position_B1}
        logits_BTV = model(input_ids=tokens[-1][:, None], past_key_values=cache, use_cache=True, **extra).logits
        tokens.append(logits_BTV[:, -1].argmax(-1))
        done_B |= torch.isin(tokens[-1], ends)
        position_B1 = position_B1 + 1
    return torch.stack(tokens, dim=1)


def pad_left(rows: list[list[int]], device: Any) -> tuple[Tensor, Tensor]:
    """Token ids and mask, both [B, T] int64; padding is 0 in both."""
    longest = max(map(len, rows))
    ids = [[0] * (longest - len(row)) + list(row) for row in rows]
    mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def cut(tokens: list[int], end_tokens: Collection[int]) -> list[int]:
    """The tokens up to and with the first end token."""
    for place, token in enumerate(tokens):
        if token in end_tokens:
            return tokens[: place + 1]
    return tokens


def end_tokens(model: Any) -> frozenset[int]:
    """The tokens that end a text by the model's generation configuration."""
    ids = getattr(model.generation_config, "eos_token_id", None)
    return frozenset() if ids is None else frozenset([ids] if isinstance(ids, int) else ids)
