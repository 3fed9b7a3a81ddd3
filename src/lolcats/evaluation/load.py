"""Loading any model that commands work on: linearized folders and the models they came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peft import PeftModel
from transformers import PreTrainedModel

from lolcats.config import LinearizeConfig
from lolcats.errors import UserError
from lolcats.modeling.loading import load_base_model
from lolcats.modeling.model import LolcatsForCausalLM


def load_model(
    path: str | Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    gguf_file: str | None = None,
    sparse_cache: int | None = None,
    cache_by: str | None = None,
    linear_length_cap: int | None = None,
) -> tuple[PreTrainedModel, Any]:
    """A model in eval mode and its tokenizer, from a hub id or folder.

    An adapter in the folder's `adapter/` (`--keep-adapter`) is merged in memory.

    Args:
        sparse_cache, cache_by, linear_length_cap: for a linearized model, see `set_attention`; None: as it was saved.

    Raises:
        UserError: no such model, bad dtype or device, ...
    """
    section = {
        "path": str(path),
        "dtype": dtype,
        "device": device,
        "trust_remote_code": trust_remote_code,
        "gguf_file": gguf_file,
    }
    config = LinearizeConfig.from_dict({"model": section})
    model, tokenizer = load_base_model(config.model, allow_linearized=True)
    adapter = Path(path).expanduser() / "adapter"
    if (adapter / "adapter_config.json").is_file():
        model = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    set_attention(model, sparse_cache=sparse_cache, cache_by=cache_by, linear_length_cap=linear_length_cap)
    return model.eval(), tokenizer


def set_attention(
    model: PreTrainedModel,
    *,
    sparse_cache: int | None = None,
    cache_by: str | None = None,
    linear_length_cap: int | None = None,
) -> None:
    """Give a linearized model what needs no training; None, and other models, change nothing.

    Args:
        sparse_cache, cache_by: size and choice, see `LolcatsForCausalLM.set_sparse_cache`.
        linear_length_cap: see `LolcatsForCausalLM.set_linear_length_cap`.

    Raises:
        UserError: the model's window does not allow it, a value out of range, or a choice and nothing to choose for.
    """
    given = {"--sparse-cache": sparse_cache, "--cache-by": cache_by, "--linear-length-cap": linear_length_cap}
    flags = " ".join(f"{flag} {value}" for flag, value in given.items() if value is not None)
    if not isinstance(model, LolcatsForCausalLM) or not flags:
        return
    if cache_by is not None and sparse_cache is None and model.config.sparse_cache == 0:
        raise UserError(f"--cache-by {cache_by}: the model has no sparse cache; give its size with --sparse-cache")
    try:
        if sparse_cache is not None or cache_by is not None:
            model.set_sparse_cache(model.config.sparse_cache if sparse_cache is None else sparse_cache, by=cache_by)
        if linear_length_cap is not None:
            model.set_linear_length_cap(linear_length_cap)
    except ValueError as error:
        raise UserError(f"{flags}: {error}") from error
