"""What the data of a linearized folder's training were like, and how text for a model is to begin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lolcats.config import DataSection
from lolcats.errors import UserError
from lolcats.report import read_report


def training_length(folder: str | Path) -> int | None:
    """Tokens of a training sequence, from a linearized folder's report; None if it has none."""
    try:
        return int(_trained_on(folder)["sequence_length"])
    except (KeyError, TypeError, ValueError):
        return None


def length_note(folder: str | Path, tokens: int | None = None) -> str | None:
    """What a user should know of a linearized folder's texts of `tokens` tokens, or of any (None), in one sentence.

    None if there is nothing to say: the texts are within the positions of the training sequences, or these are unknown.
    """
    length = training_length(folder)
    if length is None:
        return None
    positions = int(_report(folder).get("data", {}).get("positions", length))
    if tokens is not None and tokens <= positions:
        return None
    longer = "longer texts" if tokens is None else f"texts of {tokens:,} tokens"
    if positions > length:
        return f"trained on sequences of {length:,} tokens at positions up to {positions:,}: expect less of {longer}"
    return (
        f"trained on sequences of {length:,} tokens: expect less of {longer}, or train with data.position_offset=auto"
        " or a larger --sequence-length"
    )


def with_begin_token(data: DataSection, model: str | Path, tokenizer: Any) -> DataSection:
    """`data` with `begin_token` as it suits a model, unless `data` sets it.

    A linearized folder gets what it was trained with; any other model what its tokenizer does with a text.

    Args:
        model: folder or hub id of the model that will read the data.
        tokenizer: its own.
    """
    if "begin_token" in data.model_fields_set:
        return data
    trained = _trained_on(model)
    begins = trained.get("begin_token", False) if trained else _begins_texts(tokenizer)
    return data.model_copy(update={"begin_token": begins})


def _begins_texts(tokenizer: Any) -> bool:
    begin = tokenizer.bos_token_id
    return begin is not None and tokenizer("x", verbose=False)["input_ids"][:1] == [begin]


def _trained_on(folder: str | Path) -> dict[str, Any]:
    """The data section in a linearized folder's report; empty if there is none."""
    return dict(_report(folder).get("config", {}).get("data", {}))


def _report(folder: str | Path) -> dict[str, Any]:
    """A linearized folder's report; empty if there is none that can be read."""
    try:
        return read_report(Path(folder).expanduser()) or {}
    except UserError:
        return {}
