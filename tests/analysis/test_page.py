"""The report page: everything that the folder's files tell, in one file that asks for nothing."""

from __future__ import annotations

import base64
import json
import re
import shutil
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest

from lolcats.analysis.analyse import analyse
from lolcats.analysis.page import render, write_page
from lolcats.errors import UserError
from lolcats.report import REPORT_FILE

VOID = ("meta", "link", "img")
SVG = "{http://www.w3.org/2000/svg}"


def _model(name, score):
    return {
        "model": name,
        "tasks": {"piqa": {"value": score, "stderr": 0.011}, "arc_easy": {"value": 0.61, "stderr": None}},
        "averages": {},
        "passkey": [{"kind": "passkey", "length": 2048, "accuracy": 0.5, "stderr": 0.1}],
    }


EVALUATION = {
    "models": [_model("base", 0.7), _model("<b>out</b>", 0.69)],
    "settings": {"limit": 20},
}


class Page(HTMLParser):
    """Text that is seen, pictures by their title, and all attributes; every tag is closed where it should be."""

    def __init__(self, content):
        super().__init__()
        self.open, self.text, self.charts, self.attributes = [], [], {}, []
        self.feed(content)
        assert self.open == []
        self.shown = " ".join(" ".join(self.text).split())

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.attributes += [(tag, *pair) for pair in attrs.items()]
        if tag == "img":
            kind, _, data = attrs["src"].partition(",")
            assert kind == "data:image/svg+xml;base64"
            self.charts[attrs["alt"]] = ElementTree.fromstring(base64.b64decode(data))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text.append(data)

    def labels(self, chart):
        return [node.text for node in self.charts[chart].iter(f"{SVG}text")]


@pytest.fixture(scope="module")
def written(finished, held_out, tmp_path_factory):
    """The page of a finished run with everything beside it."""
    folder = tmp_path_factory.mktemp("page") / "model <i>one"
    shutil.copytree(finished, folder)
    analyse(folder, held_out)
    (folder / "eval.json").write_text(json.dumps(EVALUATION))
    return write_page(folder)


def test_the_page_holds_everything(written, finished):
    page = Page(written.read_text())
    report = json.loads((finished / REPORT_FILE).read_text())
    for value in report["perplexity"].values():
        assert f"{value:.3f}" in page.shown
    assert "model <i>one" in page.shown  # text, not markup
    assert "<b>out</b> 69.00" in page.shown
    for wanted in ("ARC-e", "70.00 ± 1.10", "torch", "window_size", "commit"):
        assert wanted in page.shown
    ids = {value for tag, name, value in page.attributes if (tag, name) == ("section", "id")}
    assert ids == {
        "results", "training", "layers", "evaluation", "configuration", "provenance"
    }  # fmt: skip
    assert {value for tag, name, value in page.attributes if name == "href"} == {f"#{name}" for name in ids}


def test_charts(written):
    page = Page(written.read_text())
    assert set(page.charts) == {
        "Attention transfer: loss", "Low-rank adjusting: validation perplexity", "Low-rank adjusting: loss",
        "Loss by layer", "Output error", "Share of the linear part", "Weight by distance",
    }  # fmt: skip
    assert [label for label in page.labels("Loss by layer") if label in ("before", "after")] == ["before", "after"]
    assert {"0", "2-3", "32-47", "softmax", "hybrid"} <= set(page.labels("Weight by distance"))


def test_the_page_asks_for_nothing_and_is_the_same_again(written):
    content = written.read_text()
    assert not re.search(r"<script|@import|url\(|https?://", content)
    assert "default-src 'none'" in content
    assert write_page(written.parent).read_text() == content


def _recalled(name, needle, copies):
    rows = [("needle", 1024, needle), ("needle", 2048, needle / 2), ("copy_900", 2048, copies)]
    measured = [{"kind": k, "length": n, "accuracy": a, "stderr": 0.01, "samples": 4} for k, n, a in rows]
    return {"model": name, "recall": measured}


def test_recall_is_also_in_the_model_card(finished, tmp_path):
    folder = tmp_path / "out"
    shutil.copytree(finished, folder)
    card = (folder / "README.md").read_text()
    models = [_recalled("base", 0.9, 0.8), _recalled(str(folder), 0.6, 0.5)]
    (folder / "eval.json").write_text(json.dumps({"models": models, "settings": {"limit": 4}}))
    page = Page(write_page(folder).read_text())
    assert "needle base 90.0 ± 1.0 45.0 ± 1.0 out 60.0 ± 1.0 30.0 ± 1.0" in page.shown.replace(
        f"needle {folder}", "out"
    ).replace(str(folder), "out")
    write_page(folder)
    written = (folder / "README.md").read_text()
    assert str(tmp_path) not in written
    assert written.startswith(card.rstrip("\n"))
    assert written.count("| copy_900 | base | - | 80.0 ± 1.0 |") == 1  # however often it is written


def test_a_page_needs_only_the_report(finished, tmp_path):
    report = json.loads((finished / REPORT_FILE).read_text())
    report["stages"]["adjust"]["curve"][0]["perplexity"] = float("inf")  # what JSON lacks is left out
    page = Page(render("plain", report))
    assert {"Loss by layer", "Low-rank adjusting: validation perplexity"} <= set(page.charts)
    assert "lolcats analyse" in page.shown
    assert not Page(render("control", report | {"stages": {}, "perplexity": {"teacher": 7.0}})).charts
    with pytest.raises(UserError, match=r"has no lolcats_report\.json"):
        write_page(tmp_path)
    (tmp_path / REPORT_FILE).write_text("{")
    with pytest.raises(UserError, match="cannot read"):
        write_page(tmp_path)
