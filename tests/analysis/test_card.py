"""What `lolcats report` writes into the model card."""

import json
import re
import shutil

import pytest
from typer.testing import CliRunner

from lolcats.analysis.card import write_card
from lolcats.cli.app import app
from lolcats.errors import UserError
from lolcats.report import REPORT_FILE


def _measured(name, score, needle):
    rows = [("needle", 1024, needle), ("needle", 2048, needle / 2)]
    return {
        "model": name,
        "tasks": {"piqa": {"value": score, "stderr": 0.011}, "arc_easy": {"value": 0.61, "stderr": None}},
        "averages": {},
        "recall": [{"kind": k, "length": n, "accuracy": a, "stderr": 0.01, "samples": 4} for k, n, a in rows],
    }


@pytest.fixture
def folder(finished, tmp_path):
    return shutil.copytree(finished[0], tmp_path / "out")


def charts(card):
    """Titles and pictures, which are there."""
    found = dict(re.findall(r"!\[(.*)\]\((.*)\)", card.read_text()))
    assert all((card.parent / picture).stat().st_size > 1000 for picture in found.values())
    return set(found)


TRAINING = {"Attention transfer: loss", "Low-rank adjusting: validation perplexity", "Low-rank adjusting: loss"}
TRAINING |= {"Loss by layer"}


def test_a_card_needs_only_the_report(folder):
    report = json.loads((folder / REPORT_FILE).read_text())
    report["stages"]["adjust"]["curve"][0]["perplexity"] = float("inf")  # is left out
    report["stages"]["gates"] = {"curve": [{"step": 0, "loss": 0.5}]}
    (folder / REPORT_FILE).write_text(json.dumps(report))
    before = (folder / "README.md").read_text()
    result = CliRunner().invoke(app, ["report", str(folder)])
    assert result.exit_code == 0, result.output
    assert charts(folder / "README.md") == TRAINING | {"Head gates: loss"}
    assert "penalty * mean gate" in (folder / "README.md").read_text()
    assert (folder / "README.md").read_text().startswith(before.rstrip("\n"))


def test_evaluations(folder):
    models = [_measured("base", 0.7, 0.9), _measured(str(folder), 0.69, 0.6)]
    (folder / "eval.json").write_text(json.dumps({"models": models, "settings": {"limit": 20}}))
    card = write_card(folder)
    text = card.read_text()
    assert charts(card) == TRAINING
    assert "| base | 70.00 ± 1.10 | 61.00 |" in text
    assert "| needle | out | 60.0 ± 1.0 | 30.0 ± 1.0 |" in text
    assert str(folder.parent) not in text
    assert write_card(folder).read_text() == text  # however often it is written


def test_other_folders_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"has no lolcats_report\.json"):
        write_card(tmp_path)
    (tmp_path / REPORT_FILE).write_text("{")
    with pytest.raises(UserError, match="cannot read"):
        write_card(tmp_path)
