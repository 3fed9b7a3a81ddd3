"""The report page: complete, self-contained, and right in a real browser where there is one."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from lolcats.analysis.analyse import analyse
from lolcats.analysis.blocks import blocks_of, text
from lolcats.analysis.page import render, write_page
from lolcats.errors import UserError
from lolcats.report import REPORT_FILE

html5lib = pytest.importorskip("html5lib")


def _model(name, score, texts):
    return {
        "model": name,
        "tasks": {"piqa": {"value": score, "stderr": 0.011}, "arc_easy": {"value": 0.61, "stderr": None}},
        "passkey": [{"length": 2048, "deciles": [0.5] * 10, "value": 0.5}],
        "esl": {"sequences": 4, "mean": 12.5, "histogram": {"counts": [1, 3], "edges": [0.0, 10.0, 20.0]}},
        "generation": {
            "prompts": 2,
            "repetition": 0.031,
            "samples": [
                {"prompt": prompt, "answer": None, "text": found}
                for prompt, found in zip(("Why <b>is</b> the sky blue?", "Count."), texts, strict=True)
            ],
        },
    }


EVALUATION = {
    "teacher": "base",
    "models": [_model("base", 0.7, ["Because " * 20, "1 2"]), _model("out", 0.69, ["</script> " * 20, "1 2 3"])],
    "settings": {"limit": 20},
}
GENERATION = {"samples": [{"prompt": "Say something long. " * 5, "text": "Something."}], "agreement": {"64": 0.41}}


@pytest.fixture(scope="module")
def page(finished, held_out, tmp_path_factory):
    """The page of a finished run with everything beside it."""
    folder = tmp_path_factory.mktemp("page") / "model <i>one</i>".replace("/", "")
    shutil.copytree(finished, folder)
    analyse(folder, held_out, span=8)
    (folder / "eval.json").write_text(json.dumps(EVALUATION))
    (folder / "generation.json").write_text(json.dumps(GENERATION))
    return write_page(folder)


def parse(content):
    parser = html5lib.HTMLParser(namespaceHTMLElements=False)
    document = parser.parse(content)
    return document, parser.errors


def visible(document):
    return " ".join(" ".join(document.find("body").itertext()).split())


def test_the_page_is_valid_and_holds_everything(page, finished):
    document, errors = parse(page.read_text())
    assert errors == []
    shown = visible(document)
    report = json.loads((finished / "lolcats_report.json").read_text())
    for value in report["perplexity"].values():
        assert f"{value:.3f}" in shown
    assert "Why <b>is</b> the sky blue?" in shown  # text, not markup
    assert shown.index("Why <b>") < shown.index("base Because") < shown.index("out </script>")  # side by side
    for wanted in ("arc_easy", "0.7 ± 0.011", "torch", "window_size", "linear part off", "commit", "Largest relative"):
        assert wanted in shown
    ids = {section.get("id") for section in document.iter("section")}
    assert ids == {
        "results", "training", "layers", "attention", "evaluation", "generation", "configuration", "provenance"
    }  # fmt: skip
    assert {link.get("href") for link in document.find("body").iter("a")} == {f"#{name}" for name in ids}


def test_every_chart_has_its_values(page):
    document, _ = parse(page.read_text())
    charts = json.loads(next(x for x in document.iter("script") if x.get("id") == "charts").text)
    assert {figure.get("data-chart") for figure in document.iter("figure")} == set(charts)
    assert set(charts) == {
        "transfer-loss", "adjust-perplexity", "adjust-loss", "mse", "mse-lora", "share", "position", "distance",
        "entropy", "lora", "maps", "esl",
    }  # fmt: skip
    assert [item["name"] for item in charts["mse"]["series"]] == [
        "swapped, untrained", "after attention transfer", "after adjusting"
    ]  # fmt: skip
    assert len(charts["mse"]["series"][0]["values"]) == len(charts["mse"]["categories"]) == 2
    assert [point[0] for point in charts["adjust-perplexity"]["series"][0]["points"]] == [0, 3, 6]
    position = charts["position"]
    assert position["categories"] == ["0", "1", "2-3", "4-7", "8-15", "16-31", "32-47"]
    assert [choice["name"] for choice in position["choices"]] == ["mean", "0", "1"]
    mean, *layers = [[item["points"] for item in choice["series"]] for choice in position["choices"]]
    assert mean[2][6] == [6, pytest.approx((layers[0][2][6][1] + layers[1][2][6][1]) / 2)]
    assert [item["name"] for item in charts["esl"]["series"]] == ["base", "out"]
    assert charts["esl"]["series"][0]["points"] == [[5.0, 0.25], [15.0, 0.75]]
    assert "12.5" in visible(document)


def test_the_page_asks_for_nothing(page):
    content = page.read_text()
    document, _ = parse(content)
    for element in document.iter():
        if isinstance(element.tag, str):
            assert element.get("src") is None
            assert element.get("href", "#").startswith(("#", "data:"))
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|https?://(?!www\.w3\.org/2000/svg)", content)
    assert "default-src 'none'" in content


def test_a_page_needs_only_the_report(finished, tmp_path):
    report = json.loads((finished / "lolcats_report.json").read_text())
    document, errors = parse(render("plain", report))
    assert errors == []
    assert {figure.get("data-chart") for figure in document.iter("figure")} >= {"layer-losses", "adjust-loss"}
    assert "lolcats analyse" in visible(document)
    control = report | {"stages": {}, "perplexity": {"teacher": 7.0}}
    assert parse(render("control", control))[1] == []
    with pytest.raises(UserError, match=r"has no lolcats_report\.json"):
        write_page(tmp_path)
    (tmp_path / REPORT_FILE).write_text("{")
    with pytest.raises(UserError, match="cannot read"):
        write_page(tmp_path)


def test_numbers_that_json_lacks_do_not_break_the_page(finished):
    report = json.loads((finished / "lolcats_report.json").read_text())
    report["stages"]["adjust"]["curve"][0]["perplexity"] = float("inf")
    document, _ = parse(render("infinite", report))
    charts = json.loads(next(x for x in document.iter("script") if x.get("id") == "charts").text)
    assert charts["adjust-perplexity"]["series"][0]["points"][0] == [0, None]


def test_blocks_of_any_json():
    tasks, *others = blocks_of(EVALUATION["models"])
    assert (tasks.title, tasks.head) == ("tasks", ["", "piqa", "arc_easy"])
    assert tasks.rows == [["base", "0.7 ± 0.011", "0.61"], ["out", "0.69 ± 0.011", "0.61"]]
    assert others[0].title == "base / passkey"
    samples, agreement = blocks_of(GENERATION)
    assert (samples.kind, samples.title, len(samples.rows)) == ("cards", "samples", 1)
    assert (agreement.title, agreement.rows) == ("agreement", [["64", "0.41"]])
    assert blocks_of({"x": {"a": 1}, "y": {"a": 2, "b": 3}})[0].rows == [["x", "1", ""], ["y", "2", "3"]]
    assert blocks_of([{"a": 1}] * 250)[0].left_out == 50
    assert blocks_of(None) == blocks_of({}) == []
    assert [text(value) for value in (1234567, 0.123456, True, None, [1])] == ["1,234,567", "0.1235", "yes", "-", "[1]"]


# --- in a browser ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    """Headless Chromium: playwright's own, or one that is installed."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    installed = [shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome", "chrome")]
    choices = [os.environ.get("LOLCATS_CHROMIUM"), *installed, None]
    with playwright.sync_playwright() as driver:
        for path in dict.fromkeys(choices[:1] + [x for x in installed if x] + [None]):
            try:
                running = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
            except playwright.Error:
                continue
            yield running
            running.close()
            return
    pytest.skip("no Chromium: `playwright install chromium`, a system package, or LOLCATS_CHROMIUM=PATH")


@pytest.fixture
def opened(browser, page):
    """`opened(width, scheme)` -> the page in a tab, with the requests, errors and messages that it made."""
    contexts = []

    def open_page(width: int, scheme: str = "light"):
        context = browser.new_context(viewport={"width": width, "height": 850}, color_scheme=scheme)
        contexts.append(context)
        tab, seen = context.new_page(), {"requests": [], "errors": []}
        tab.on("request", lambda request: seen["requests"].append(request.url))
        tab.on("pageerror", lambda error: seen["errors"].append(str(error)))
        tab.on("console", lambda message: seen["errors"].append(message.text))
        tab.goto(Path(page).as_uri())
        tab.wait_for_selector("html[data-ready=yes]", state="attached")
        tab.wait_for_selector("[data-chart=mse] svg rect")
        return tab, seen

    yield open_page
    for context in contexts:
        context.close()


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_in_a_browser(opened, page, width, scheme):
    tab, seen = opened(width, scheme)
    assert seen["errors"] == []
    assert [url for url in seen["requests"] if not url.startswith("data:")] == [page.as_uri()]
    assert tab.evaluate("document.documentElement.scrollWidth") <= width  # nothing sticks out sideways
    for figure in tab.query_selector_all("figure[data-chart]"):
        name = figure.get_attribute("data-chart")
        marks = figure.query_selector_all("canvas" if name == "maps" else "svg rect, svg path, svg circle")
        assert marks, name
        box = figure.bounding_box()
        assert box["x"] >= 0, name
        assert box["x"] + box["width"] <= width, name
    # Figures, text and background differ in both schemes.
    ink, paper = tab.evaluate(
        "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
    )
    brightness = [sum(map(int, re.findall(r"\d+", value)[:3])) for value in (ink, paper)]
    assert (brightness[0] < brightness[1]) == (scheme == "light")
    assert abs(brightness[0] - brightness[1]) > 400


def test_charts_answer(opened):
    tab, seen = opened(1280)
    tab.hover("[data-chart=adjust-perplexity] svg")
    tip = tab.inner_text("#tip")
    assert "validation perplexity" in tip
    assert re.search(r"update: \d", tip)
    bars = "[data-chart=mse] svg rect[style]"
    before = len(tab.query_selector_all(bars))
    tab.click("[data-chart=mse] .legend button >> nth=0")
    assert len(tab.query_selector_all(bars)) == before - 2  # two layers of one stage
    heights = (
        "Array.from(document.querySelectorAll('[data-chart=mse] svg rect[style]'), bar => bar.getAttribute('height'))"
    )
    logarithmic = tab.evaluate(heights)
    tab.click("[data-chart=mse] input[type=checkbox]")
    assert tab.evaluate(heights) != logarithmic
    pixels = "document.querySelector('[data-chart=maps] canvas:last-of-type').toDataURL()"
    first = tab.evaluate(pixels)
    tab.select_option("[data-chart=maps] select >> nth=0", "1")
    assert tab.evaluate(pixels) != first
    tab.click("[data-chart=position] summary")
    line = "[data-chart=position] svg path >> nth=0"
    mean, table = tab.get_attribute(line, "d"), tab.inner_text("[data-chart=position] table")
    assert "32-47" in table
    tab.select_option("[data-chart=position] select", "1")
    assert tab.get_attribute(line, "d") != mean
    assert tab.inner_text("[data-chart=position] table") != table
    tab.hover("[data-chart=position] svg")
    assert "position: " in tab.inner_text("#tip")
    tab.click("[data-chart=lora] summary")
    assert "q_proj" in tab.inner_text("[data-chart=lora] table")
    assert seen["errors"] == []
