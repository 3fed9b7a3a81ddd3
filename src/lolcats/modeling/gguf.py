"""Corrections to what transformers makes of a GGUF file."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import cached_file

from lolcats.errors import UserError
from lolcats.modeling.quantised import forget_quantisation

WORD_LETTERS = 5
LOOKED_AT = 2000  # entries of the vocabulary
ENOUGH_WORDS = 50  # fewer say nothing of the others
WHOLE_SHARE = 0.9


def dequantizing() -> dict[str, Any]:
    """Argument of `from_pretrained`: transformers from 5.19 on keeps GGUF weights quantized unless asked not to."""
    if not hasattr(transformers, "GgufConfig"):
        return {}
    return {"quantization_config": transformers.GgufConfig(dequantize=True)}


def fix(model: PreTrainedModel, tokenizer: Any, path: str, name: str, revision: str | None) -> None:
    """Make model and tokenizer what the file `name` in `path` says.

    Raises:
        UserError: this version of transformers misreads the file's tokenizer.
    """
    forget_quantisation(model)
    check_words(tokenizer, name)
    take_end_token(tokenizer, model.config)
    take_begin_token(tokenizer, _metadata(path, name, revision).get("tokenizer.ggml.add_bos_token"))


def check_words(tokenizer: Any, name: str) -> None:
    """Refuse a tokenizer that splits words which are tokens.

    transformers 5.17 loses the merges of SentencePiece vocabularies: of Gemma 3's words, 1 in 200 stays whole, and the
    model's perplexity is 50 times too high.

    Raises:
        UserError: as said.
    """
    words = whole = 0
    for token in range(0, len(tokenizer), max(1, len(tokenizer) // LOOKED_AT)):
        text = tokenizer.decode([token])
        word = text.strip()
        if len(word) >= WORD_LETTERS and word.isascii() and word.isalpha():
            words += 1
            whole += len(tokenizer(text, add_special_tokens=False)["input_ids"]) == 1
    if words >= ENOUGH_WORDS and whole < WHOLE_SHARE * words:
        raise UserError(
            f"transformers {transformers.__version__} misreads the tokenizer of {name}: {words - whole} of {words}"
            " words in its vocabulary are split. Use transformers 5.18 or newer, or the model's own repository instead"
            " of a GGUF file"
        )


def take_end_token(tokenizer: Any, config: PreTrainedConfig) -> None:
    """Let the tokenizer end texts with the token that the file names; some versions guess another."""
    end = config.get_text_config().eos_token_id
    if isinstance(end, int) and tokenizer.eos_token_id != end:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)


def take_begin_token(tokenizer: Any, wanted: bool | None) -> None:
    """Let the tokenizer begin texts with the begin token if the file says so, which transformers leaves out.

    Gemma 3 without it is lost: a text of 83 tokens has a perplexity of 177 instead of 16.
    """
    if wanted is not None and tokenizer.bos_token_id is not None and tokenizer.add_bos_token != wanted:
        tokenizer.add_bos_token = wanted


def _metadata(path: str, name: str, revision: str | None) -> dict[str, Any]:
    """What a GGUF file says of itself; long arrays may be omitted."""
    file = cached_file(path, name, revision=revision)
    assert file is not None  # else it has raised: the weights come from it
    try:
        from transformers.integrations.gguf.reader import read_gguf_metadata
    except ImportError:  # before transformers 5.19
        from gguf import GGUFReader

        fields = GGUFReader(file).fields
        return {name: field.contents() for name, field in fields.items() if len(field.data) == 1}
    return read_gguf_metadata(file)[0]
