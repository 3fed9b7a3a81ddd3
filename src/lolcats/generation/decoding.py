"""Continuations of many prompts by the forward pass and cache of any causal language model, in padded batches.

The engine is faster, but runs linearized models only; this is the one decoder for the others and for evaluation,
which compares a linearized model with its teacher.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from lolcats.errors import UserError
from lolcats.generation.sampling import SamplingParams, choose
from lolcats.generation.text import end_tokens, prompt_tokens


@torch.no_grad()
def continuations(
    model: Any,
    prompts: list[list[int]],
    params: SamplingParams,
    *,
    ends: Collection[int] = (),
    batch_size: int = 16,
    chunk: int = 2048,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[list[int]]:
    """The new tokens of each prompt.

    Args:
        model: a transformers causal language model.
        prompts: token ids, each at least one.
        params: temperature, top_k, top_p, min_p, max_new_tokens, and the seed of the first prompt, to which each
            later prompt adds one. Penalties, stop strings and log-probabilities are the engine's alone.
        ends: tokens that end a continuation, and are its last.
        chunk: most prompt tokens of a row in one forward pass.
        on_progress: called with (prompts done, prompts in all).

    Raises:
        UserError: the model's logits are not finite.
    """
    answers: list[list[int]] = [[] for _ in prompts]
    order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
    for begin in range(0, len(order), batch_size):
        picked = order[begin : begin + batch_size]
        generators = [random.Random(None if params.seed is None else params.seed + index) for index in picked]
        rows = [prompts[index] for index in picked]
        for index, tokens in zip(picked, _continue(model, rows, params, generators, ends, chunk), strict=True):
            answers[index] = tokens
        if on_progress is not None:
            on_progress(begin + len(picked), len(prompts))
    return answers


def _continue(
    model: Any,
    prompts: list[list[int]],
    params: SamplingParams,
    generators: list[random.Random],
    ends: Collection[int],
    chunk: int,
) -> list[list[int]]:
    ids_BT, mask_BT = pad_left(prompts, model.device)
    padded = not bool(mask_BT.all())
    logits_BV, cache = prefill(model, ids_BT, mask_BT=mask_BT if padded else None, chunk=chunk)
    each = [params] * len(prompts)
    position_B1 = mask_BT.sum(1, keepdim=True)
    answers: list[list[int]] = [[] for _ in prompts]
    running = set(range(len(prompts)))
    while True:
        uniforms = [generator.random() if params.temperature > 0 else 0.0 for generator in generators]
        tokens = choose(logits_BV, each, uniforms).tokens
        for row in list(running):
            if tokens[row] < 0:
                raise UserError("the model's logits are not finite (NaN or infinite)")
            answers[row].append(tokens[row])
            if tokens[row] in ends or len(answers[row]) == params.max_new_tokens:
                running.remove(row)
        if not running:
            return answers
        extra: dict[str, Any] = {}
        if padded:
            mask_BT = torch.cat([mask_BT, mask_BT.new_ones(len(mask_BT), 1)], dim=1)
            extra = {"attention_mask": mask_BT, "position_ids": position_B1}
        token_B1 = torch.tensor(tokens, device=ids_BT.device).clamp_min(0)[:, None]
        logits_BV = model(input_ids=token_B1, past_key_values=cache, use_cache=True, **extra).logits[:, -1]
        position_B1 = position_B1 + 1


def new_cache(model: Any) -> Any:
    """An empty cache for `model`; linearized layers put their states in place of the empty layers."""
    return DynamicCache(config=model.config.get_text_config())


@torch.no_grad()
def prefill(model: Any, ids_BT: Tensor, *, mask_BT: Tensor | None = None, chunk: int = 2048) -> tuple[Tensor, Any]:
    """Feed prompts in pieces, so that activations need memory for `chunk` tokens only.

    Args:
        ids_BT: token ids, padded on the left.
        mask_BT: 0 for padding; None: no padding.

    Returns:
        Logits after the last token [B, V], and the cache.
    """
    cache = new_cache(model)
    positions_BT = None if mask_BT is None else (mask_BT.cumsum(1) - 1).clamp_min(0)
    logits = torch.empty(0)
    for begin in range(0, ids_BT.shape[1], chunk):
        end = min(begin + chunk, ids_BT.shape[1])
        extra: dict[str, Any] = {}
        if mask_BT is not None and positions_BT is not None:
            extra = {"attention_mask": mask_BT[:, :end], "position_ids": positions_BT[:, begin:end]}
        output = model(input_ids=ids_BT[:, begin:end], past_key_values=cache, use_cache=True, logits_to_keep=1, **extra)
        logits = output.logits[:, -1]
    return logits, cache


@contextmanager
def logits_at(model: Any, position_M: Tensor) -> Iterator[None]:
    """Within the block `model` gives logits [1, M, V] at some of the B * T positions, counted row by row.

    `logits_to_keep` picks the same columns of all rows, and the logits of all positions would fill memory.
    """

    def pick(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        features_BTD = args[0]
        return (features_BTD.flatten(0, 1)[position_M.to(features_BTD.device)][None],)

    hook = model.get_output_embeddings().register_forward_pre_hook(pick)
    try:
        yield
    finally:
        hook.remove()


def pad_left(rows: list[list[int]], device: Any) -> tuple[Tensor, Tensor]:
    """Token ids and mask, both [B, T] int64; padding is 0 in both."""
    longest = max(map(len, rows))
    ids = [[0] * (longest - len(row)) + list(row) for row in rows]
    mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def generate_text(
    model: Any, tokenizer: Any, prompts: list[str], params: SamplingParams, *, chat: bool = False, batch_size: int = 8
) -> list[str]:
    """The text of `continuations`, without the prompts and without special tokens.

    Args:
        chat: put each prompt into the tokenizer's chat template as a user's message.

    Raises:
        UserError: an empty prompt, a missing chat template, or not enough memory.
    """
    ids = [prompt_tokens(tokenizer, prompt, chat) for prompt in prompts]
    for prompt, tokens in zip(prompts, ids, strict=True):
        if not tokens:
            raise UserError(f"prompt {prompt!r} has no tokens; give it at least one word")
    try:
        answers = continuations(model, ids, params, ends=end_tokens(model), batch_size=batch_size)
    except torch.OutOfMemoryError as error:
        raise UserError(f"out of memory while generating {len(ids)} prompts; lower --batch-size") from error
    return tokenizer.batch_decode(answers, skip_special_tokens=True)
