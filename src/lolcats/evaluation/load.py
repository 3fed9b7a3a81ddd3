"""Any model that commands work on, linearized or not: loading it, what it computes, and how its texts begin."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from lolcats.config import DataSection, LinearizeConfig
from lolcats.conversion import keep_softmax
from lolcats.errors import UserError
from lolcats.modeling.cache_size import cache_bytes
from lolcats.modeling.loading import load_base_model
from lolcats.modeling.model import LolcatsForCausalLM
from lolcats.report import read_report

CACHE_LENGTHS = (1024, 8192, 32768)


def load_model(
    path: str | Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    **attention: Any,
) -> tuple[PreTrainedModel, Any]:
    """A model in eval mode and its tokenizer, from a hub id or folder.

    Args:
        attention: settings of `AttentionConfig` (linear_length_cap, ...) for a linearized model
            that need no training; None, and other models, change nothing.
    """
    section = {"path": str(path), "dtype": dtype, "device": device, "trust_remote_code": trust_remote_code}
    config = LinearizeConfig.from_dict({"model": section})
    model, tokenizer = load_base_model(config.model, allow_linearized=True)
    attention = {name: value for name, value in attention.items() if value is not None}
    if attention and isinstance(model, LolcatsForCausalLM):
        try:
            model.set_attention(**attention)
        except ValueError as error:
            flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in attention.items())
            raise UserError(f"{flags}: {error}") from error
    return model.eval(), tokenizer


def describe(model: Any) -> dict[str, Any]:
    """Type, number of parameters, dtype and, of a linearized model, attention."""
    return {
        "type": model.config.model_type,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": str(model.dtype).removeprefix("torch."),
        **attention_of(model),
    }


def for_engine(model: Any) -> Any:
    """`model` as the engine runs it, with its own attention; unchanged if that cannot be reached."""
    try:
        return model if isinstance(model, LolcatsForCausalLM) else keep_softmax(model)
    except UserError:
        return model


def cache_bytes_of(model: Any) -> dict[str, dict[str, int]]:
    """{"cache_bytes": bytes of a sequence by its tokens}; {} of a model that the engine does not run."""
    if not isinstance(model, LolcatsForCausalLM):
        return {}
    return {"cache_bytes": {str(n): cache_bytes(model.config, n, model.dtype) for n in CACHE_LENGTHS}}


def attention_of(model: Any) -> dict[str, Any]:
    """{"attention": what a linearized model's layers compute, as it was loaded}; {} of other models."""
    if not isinstance(model, LolcatsForCausalLM):
        return {}
    settings = asdict(model.config.attention)
    return {"attention": {key: list(value) if isinstance(value, tuple) else value for key, value in settings.items()}}


def with_begin_token(data: DataSection, model: str | Path, tokenizer: Any) -> DataSection:
    """`data` with `begin_token` as it suits a model, unless `data` sets it.

    A linearized folder gets what it was trained with; any other model what its tokenizer does with a text.
    """
    if "begin_token" in data.model_fields_set:
        return data
    from lolcats.data.retrieval import begins_texts  # imports `datasets`, which `lolcats generate` does without

    trained = _trained_on(model)
    begins = trained.get("begin_token", False) if trained else begins_texts(tokenizer)
    return data.model_copy(update={"begin_token": begins})


def _trained_on(folder: str | Path) -> dict[str, Any]:
    """The data section in a linearized folder's report; empty if there is none that can be read."""
    try:
        report = read_report(Path(folder).expanduser()) or {}
    except UserError:
        return {}
    return report.get("config", {}).get("data", {})
