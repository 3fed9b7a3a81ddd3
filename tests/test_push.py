"""What `lolcats push` sends, and what it refuses to."""

from types import SimpleNamespace

import pytest
from huggingface_hub import ModelCard, ModelCardData
from typer.testing import CliRunner

from lolcats.checkpoint.push import push
from lolcats.cli.app import app
from lolcats.errors import UserError
from lolcats.report import card_head


class Hub:
    """Stands in for the hub: model cards by hub id; remembers what it is sent."""

    cards = {
        "owner/open": ModelCardData(license="apache-2.0"),
        "owner/closed": ModelCardData(license="other", license_name="llama9"),
        "owner/silent": None,
    }

    def __init__(self):
        self.sent = []

    def model_info(self, name):
        return SimpleNamespace(card_data=self.cards[name])

    def create_repo(self, name, **options):
        self.sent.append((name, options))

    def upload_folder(self, **options):
        self.sent.append(options)
        return SimpleNamespace(commit_url="https://hub/commit/1")


@pytest.fixture
def hub(monkeypatch):
    hub = Hub()
    monkeypatch.setattr("lolcats.checkpoint.push.HfApi", lambda: hub)
    return hub


@pytest.fixture
def folder(tmp_path):
    def make(base):
        (tmp_path / "README.md").write_text(card_head(base) + "\n\nText.\n")
        (tmp_path / "model.safetensors").write_bytes(b"")
        return tmp_path

    return make


def run(*words):
    return CliRunner().invoke(app, ["push", *map(str, words)])


def test_the_card_gets_base_model_and_licence(hub, folder):
    result = run(folder("owner/open"), "me/mine", "--private")
    assert result.exit_code == 0, result.output
    (name, options), sent = hub.sent
    assert (name, options["private"], sent["repo_id"]) == ("me/mine", True, "me/mine")
    card = ModelCard.load(sent["folder_path"] / "README.md")
    assert (card.data.base_model, card.data.license) == ("owner/open", "apache-2.0")
    assert card.text.strip().endswith("Text.")
    assert {"run/*", "run-old-*/*"} <= set(sent["ignore_patterns"])


def test_refused(hub, folder, tmp_path):
    with pytest.raises(UserError, match="names no licence"):
        push(folder("owner/silent"), "me/mine")
    with pytest.raises(UserError, match="not a model on the hub"):
        push(folder("/models/base"), "me/mine")
    with pytest.raises(UserError, match="holds no model"):
        push(tmp_path / "absent", "me/mine")
    assert hub.sent == []
    assert push(folder("owner/silent"), "me/mine", licence="mit")[0] == "mit"
    assert push(folder("/models/base"), "me/mine", base="owner/closed")[0] == "llama9"
