"""Corrections to what transformers makes of a GGUF file."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import PreTrainedModel
from transformers.utils import cached_file

from lolcats.errors import UserError
from lolcats.modeling.quantised import forget_quantisation

FIRST_RELEASE = 5, 19
"""Of transformers that reads all tokenizers; 5.17 loses the merges of SentencePiece vocabularies."""


def dequantizing() -> dict[str, Any]:
    """Argument of `from_pretrained`, without which GGUF weights stay quantized."""
    if tuple(map(int, transformers.__version__.split(".")[:2])) < FIRST_RELEASE:
        raise UserError(
            f"transformers {transformers.__version__} misreads the tokenizers of some GGUF files: use 5.19 or newer, or"
            " the model's own repository instead of a GGUF file"
        )
    return {"quantization_config": transformers.GgufConfig(dequantize=True)}


def fix(model: PreTrainedModel, tokenizer: Any, path: str, name: str, revision: str | None) -> None:
    """Make model and tokenizer what the file `name` in `path` says.

    The tokenizer ends texts with the file's token, where some releases guess another, and begins them with the begin
    token if the file says so, which transformers leaves out: without it Gemma 3 has a perplexity of 177 instead of 16.
    """
    from transformers.integrations.gguf.reader import read_gguf_metadata

    forget_quantisation(model)
    end = model.config.get_text_config().eos_token_id
    if isinstance(end, int) and tokenizer.eos_token_id != end:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
    file = cached_file(path, name, revision=revision)
    assert file is not None  # else it has raised: the weights come from it
    begins = read_gguf_metadata(file)[0].get("tokenizer.ggml.add_bos_token")
    if begins is not None and tokenizer.bos_token_id is not None and tokenizer.add_bos_token != begins:
        tokenizer.add_bos_token = begins
