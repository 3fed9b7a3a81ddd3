"""Prompts in, texts out, through the model's own `generate()`."""

from __future__ import annotations

from typing import Any

import torch

from lolcats.errors import UserError
from lolcats.generation.prompts import chat_text


@torch.no_grad()
def generate_text(
    model: Any,
    tokenizer: Any,
    prompts: list[str],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    chat: bool = False,
    batch_size: int = 8,
) -> list[str]:
    """Continue every prompt, in batches padded on the left.

    Args:
        model: a transformers model with `generate()`.
        temperature: 0 takes the likeliest token; otherwise samples, repeatably for one `seed` and batch size.
        chat: put each prompt into the tokenizer's chat template as a user's message.

    Returns:
        The new text of each prompt, without the prompt and without special tokens.

    Raises:
        UserError: an empty prompt, a missing chat template, or not enough memory.
    """
    texts = [chat_text(tokenizer, prompt) for prompt in prompts] if chat else prompts
    # A chat template writes the special tokens itself.
    ids = [tokenizer(text, add_special_tokens=not chat)["input_ids"] for text in texts]
    for prompt, tokens in zip(prompts, ids, strict=True):
        if not tokens:
            raise UserError(f"prompt {prompt!r} has no tokens; give it at least one word")
    sampling: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    torch.manual_seed(seed)
    answers: list[str] = []
    for begin in range(0, len(ids), batch_size):
        input_ids, mask = _pad_left(ids[begin : begin + batch_size], _pad_id(model, tokenizer))
        try:
            output = model.generate(
                input_ids.to(model.device),
                attention_mask=mask.to(model.device),
                max_new_tokens=max_new_tokens,
                pad_token_id=_pad_id(model, tokenizer),
                **sampling,
            )
        except torch.OutOfMemoryError as error:
            raise UserError(f"out of memory while generating {len(input_ids)} prompts; lower --batch-size") from error
        answers += tokenizer.batch_decode(output[:, input_ids.shape[1] :], skip_special_tokens=True)
    return answers


def _pad_id(model: Any, tokenizer: Any) -> int:
    """Any token will do, because padding is masked."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id, model.generation_config.eos_token_id):
        if isinstance(token, int):
            return token
    return 0


def _pad_left(ids: list[list[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask, both [B, T] int64."""
    longest = max(map(len, ids))
    rows = [[pad] * (longest - len(row)) + row for row in ids]
    mask = [[0] * (longest - len(row)) + [1] * len(row) for row in ids]
    return torch.tensor(rows), torch.tensor(mask)
