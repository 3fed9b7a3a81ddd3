"""Publishing a written folder on the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from lolcats.errors import UserError

LEFT_OUT = ["run/*", "run-old-*", "run-old-*/*", ".*"]
"""Patterns of files that are no part of the model: checkpoints and logs of its training."""


def push(
    folder: Path, repository: str, *, base: str | None = None, licence: str | None = None, private: bool = False
) -> tuple[str, str]:
    """Complete the card of a folder of `lolcats linearize` with base model and licence, and send folder and card.

    Args:
        repository: hub id, owner/name.
        base: hub id of the base model, for a model that was made from a local folder.
        licence: for a base model whose card names none.

    Returns:
        The licence, and the address of what was sent.
    """
    if not (folder / "README.md").is_file() or not any(folder.glob("*.safetensors")):
        raise UserError(f"{folder} holds no model with its card: give a folder that `lolcats linearize` wrote")
    api, card = HfApi(), ModelCard.load(folder / "README.md")
    base = base or card.data.base_model
    if base is None or base.count("/") != 1 or base.startswith((".", "/", "~")):
        raise UserError(f"{folder} was made from {base}, which is not a model on the hub: give --base OWNER/NAME")
    if licence is None:
        try:
            theirs = api.model_info(base).card_data
        except (HfHubHTTPError, HFValidationError, OSError) as error:
            raise UserError(f"cannot read the licence of {base} on the hub: {error}; give --license") from error
        found = None if theirs is None else theirs.get("license_name") or theirs.get("license")
        if not isinstance(found, str) or found == "other":
            raise UserError(f"the card of {base} names no licence: read its terms, then give --license NAME")
        licence = found
    card.data.base_model, card.data.license, card.data["base_model_relation"] = base, licence, "finetune"
    card.save(folder / "README.md")
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        sent = api.upload_folder(
            repo_id=repository, folder_path=folder, ignore_patterns=LEFT_OUT, commit_message="Linearized by lolcats"
        )
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise UserError(f"{repository} could not be written: {error}. `hf auth login` stores a token") from error
    return licence, str(sent.commit_url)
