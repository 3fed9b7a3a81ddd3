"""Publishing a written folder on the Hugging Face Hub."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from lolcats.errors import UserError

PERMISSIVE = ("apache-2.0", "mit", "bsd-2-clause", "bsd-3-clause", "cc0-1.0", "cc-by-4.0", "openrail")
"""Licences under which a changed model may be published as it is; others are shown, and to be agreed to."""
LEFT_OUT = ["run/*", "run-old-*", "run-old-*/*", ".*"]
"""Patterns of files that are no part of the model: checkpoints and logs of its training."""


@dataclass(frozen=True)
class Publication:
    """What is to be published, and under which conditions.

    Attributes:
        base: hub id of the model that this one was made from.
        licence: identifier, as in the base model's card.
        terms: where it can be read.
    """

    folder: Path
    repository: str
    base: str
    licence: str
    terms: str

    @property
    def is_permissive(self) -> bool:
        return self.licence in PERMISSIVE


def prepare(
    folder: Path, repository: str, *, base: str | None = None, licence: str | None = None, api: HfApi | None = None
) -> Publication:
    """Find the licence that a folder of `lolcats linearize` is under; nothing is changed or sent.

    Args:
        repository: hub id, owner/name.
        base: hub id of the base model, for a model that was made from a local folder.
        licence: for a base model whose card names none.

    Raises:
        UserError: not such a folder, a base model that is not on the hub, or no licence.
    """
    if not (folder / "README.md").is_file() or not any(folder.glob("*.safetensors")):
        raise UserError(f"{folder} holds no model with its card: give a folder that `lolcats linearize` wrote")
    named = ModelCard.load(folder / "README.md").data.base_model
    base = base or (named if isinstance(named, str) else None)
    if base is None or base.count("/") != 1 or base.startswith((".", "/", "~")):
        raise UserError(f"{folder} was made from {base}, which is not a model on the hub: give --base OWNER/NAME")
    if licence is None:
        try:
            card = (api or HfApi()).model_info(base).card_data
        except (HfHubHTTPError, HFValidationError, OSError) as error:
            raise UserError(f"cannot read the licence of {base} on the hub: {error}; give --license") from error
        found = None if card is None else card.get("license_name") or card.get("license")
        if not isinstance(found, str) or found == "other":
            raise UserError(f"the card of {base} names no licence: read its terms, then give --license NAME")
        licence = found
    return Publication(folder, repository, base, licence, f"https://huggingface.co/{base}")


def publish(publication: Publication, *, private: bool = False, api: HfApi | None = None) -> str:
    """Complete the folder's card, and send folder and card. Returns the address.

    Raises:
        UserError: the hub refuses: no token, no such owner, or no connection.
    """
    api = api or HfApi()
    card = ModelCard.load(publication.folder / "README.md")
    card.data.base_model, card.data.license = publication.base, publication.licence
    card.data["base_model_relation"] = "finetune"
    card.save(publication.folder / "README.md")
    try:
        api.create_repo(publication.repository, private=private, exist_ok=True)
        sent = api.upload_folder(
            repo_id=publication.repository,
            folder_path=publication.folder,
            ignore_patterns=LEFT_OUT,
            commit_message="Linearized by lolcats",
        )
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise UserError(
            f"{publication.repository} could not be written on the hub: {error}. `hf auth login` stores a token"
        ) from error
    return str(sent.commit_url)
