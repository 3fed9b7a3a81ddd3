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
    horizon: int | None = None,
) -> tuple[PreTrainedModel, Any]:
    """A model in eval mode and its tokenizer, from a hub id or folder.

    An adapter in the folder's `adapter/` (`--keep-adapter`) is merged in memory.

    Args:
        sparse_cache, cache_by: for a linearized model, see `keep_exact`; None: as it was saved.
        horizon: likewise, see `limit_linear_part`.

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
    keep_exact(model, sparse_cache, cache_by)
    limit_linear_part(model, horizon)
    return model.eval(), tokenizer


def keep_exact(model: PreTrainedModel, sparse_cache: int | None, cache_by: str | None = None) -> None:
    """Give a linearized model a sparse cache; None, and other models, change nothing.

    Args:
        sparse_cache, cache_by: its size and its choice, see `LolcatsForCausalLM.set_sparse_cache`.

    Raises:
        UserError: the model's window does not allow one, an unknown choice, or a choice and nothing to choose for.
    """
    if not isinstance(model, LolcatsForCausalLM) or (sparse_cache is None and cache_by is None):
        return
    tokens = model.config.sparse_cache if sparse_cache is None else sparse_cache
    if tokens == 0 and sparse_cache is None:
        raise UserError(f"--cache-by {cache_by}: the model has no sparse cache; give its size with --sparse-cache")
    try:
        model.set_sparse_cache(tokens, by=cache_by)
    except ValueError as error:
        given = {"--sparse-cache": sparse_cache, "--cache-by": cache_by}
        flags = " ".join(f"{flag} {value}" for flag, value in given.items() if value is not None)
        raise UserError(f"{flags}: {error}") from error


def limit_linear_part(model: PreTrainedModel, horizon: int | None) -> None:
    """Give a linearized model a horizon, see `LolcatsForCausalLM.set_horizon`; None, and other models, change nothing.

    Raises:
        UserError: negative, or the model lacks a linear part or a window.
    """
    if not isinstance(model, LolcatsForCausalLM) or horizon is None:
        return
    try:
        model.set_horizon(horizon)
    except ValueError as error:
        raise UserError(f"--horizon {horizon}: {error}") from error
