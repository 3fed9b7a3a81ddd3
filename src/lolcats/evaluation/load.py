"""Any model that commands work on, linearized or not: loading it, what it computes, and how its texts begin."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from lolcats.config import DataSection, LinearizeConfig
from lolcats.conversion import keep_softmax
from lolcats.errors import UserError
from lolcats.modeling.loading import load_base_model
from lolcats.modeling.model import LolcatsForCausalLM
from lolcats.report import REPORT_FILE, read_optional

_LOG = logging.getLogger(__name__)


def load_model(
    path: str | Path, *, dtype: str = "auto", device: str = "auto", **attention: Any
) -> tuple[PreTrainedModel, Any]:
    """A model in eval mode and its tokenizer, from a hub id or folder.

    Args:
        attention: settings of `AttentionConfig` (linear_length_cap, ...) for a linearized model
            that need no training; of other models they change nothing.
    """
    config = LinearizeConfig.from_dict({"model": {"path": str(path), "dtype": dtype, "device": device}})
    model, tokenizer = load_base_model(config.model, allow_linearized=True)
    flags = " ".join(f"--{name.replace('_', '-')} {json.dumps(value)}" for name, value in attention.items())
    if attention and isinstance(model, LolcatsForCausalLM):
        try:
            model.set_attention(**attention)
        except ValueError as error:
            raise UserError(f"{flags}: {error}") from error
    elif attention:
        _LOG.warning("%s changes nothing: %s is not linearized", flags, path)
    return model.eval(), tokenizer


def describe(model: Any) -> dict[str, Any]:
    """Type, number of parameters, dtype and, of a linearized model, attention."""
    described = {
        "type": model.config.model_type,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": str(model.dtype).removeprefix("torch."),
    }
    if isinstance(model, LolcatsForCausalLM):
        settings = asdict(model.config.attention)
        described["attention"] = {
            key: list(value) if isinstance(value, tuple) else value for key, value in settings.items()
        }
    return described


def for_engine(model: Any) -> Any:
    """`model` as the engine runs it, with its own attention; unchanged if that cannot be reached."""
    try:
        return model if isinstance(model, LolcatsForCausalLM) else keep_softmax(model)
    except UserError:
        return model


def with_begin_token(data: DataSection, model: str | Path, tokenizer: Any) -> DataSection:
    """`data` with `begin_token` as it suits a model, unless `data` sets it.

    A linearized folder gets what it was trained with; any other model what its tokenizer does with a text.
    """
    if "begin_token" in data.model_fields_set:
        return data
    from lolcats.data.retrieval import begins_texts  # imports `datasets`, which `lolcats generate` does without

    try:
        report = read_optional(Path(model).expanduser() / REPORT_FILE) or {}
    except UserError:  # it cannot be read
        report = {}
    trained = report.get("config", {}).get("data", {})
    begins = trained.get("begin_token", False) if trained else begins_texts(tokenizer)
    return data.model_copy(update={"begin_token": begins})
