"""Token ids of texts, with little work of the host beside the tokenizer's own."""

from __future__ import annotations

from typing import Any


def token_ids(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Of each text by itself, without special tokens around it."""
    if getattr(tokenizer, "is_fast", False):
        # What transformers calls, without offsets and the conversion of what is not used: half of the host's time.
        backend, split_special = tokenizer.backend_tokenizer, bool(getattr(tokenizer, "split_special_tokens", False))
        if backend.truncation is not None:
            backend.no_truncation()
        if backend.padding is not None:
            backend.no_padding()
        if backend.encode_special_tokens != split_special:
            backend.encode_special_tokens = split_special
        return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]
    return tokenizer(
        texts,
        add_special_tokens=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,  # no warning about texts longer than the model's positions: they are cut later
    )["input_ids"]
