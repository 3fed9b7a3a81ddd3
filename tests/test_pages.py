"""README and docs: files that they name exist, no result is without a page, links between pages resolve."""

import re
from itertools import product
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md", *ROOT.glob("docs/*.md")]
FENCE = re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE)


def named_results(text: str) -> set[str]:
    """Paths below benchmarks/results between backticks; `a_{b,c}.json` are two."""
    spans = re.findall(r"`(?:benchmarks/results/)?([\w{},./-]+_20\d\d-\d\d-\d\d[\w{},./-]*)`", text)
    spans = [re.split("[{}]", span) for span in spans]
    return {"".join(parts) for span in spans for parts in product(*(part.split(",") for part in span))}


def anchors(text: str) -> set[str]:
    titles = re.findall(r"^#+ (.*)", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_results_and_pictures_are_on_pages_and_every_named_result_exists():
    shown = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert named_results(shown) == {file.name + "/" * file.is_dir() for file in RESULTS.iterdir()}
    assert all(f"images/{picture.name})" in shown for picture in (ROOT / "docs" / "images").iterdir())


def test_the_tour_names_files_that_exist():
    named = set(re.findall(r"[\w/]+\.py", (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")))
    assert not {name for name in named if not [*ROOT.glob(f"src/**/{name}"), *ROOT.glob(name)]}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page):
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for link in re.findall(r"\]\((?!https?://)([^)\s]+)\)", text):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), f"{page.name}: {link}"
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), f"{page.name}: {link}"


def prose(text: str) -> list[str]:
    """Sentences without tables, code, headings and what links point to; an item of a list is a sentence at least."""
    text = re.sub(r"<!-- ([\w-]+) -->.*?<!-- /\1 -->", "", FENCE.sub("", text), flags=re.DOTALL)
    text = re.sub(r"^(    \S.*|\s*\|.*|#.*|!\[.*)$", "", text, flags=re.MULTILINE)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]*`", "code", text)
    blocks = re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.) ", text)
    return [part for block in blocks for part in re.split(r"(?<=[.:;?!])\s+(?=\W*[A-Za-z0-9])", block) if part.strip()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_prose_is_short_and_its_numbers_stand_in_tables(page):
    """Sentences of at most 35 words, and at most 8 numbers in 100 words."""
    sentences = prose(page.read_text(encoding="utf-8"))
    long = [sentence for sentence in sentences if len(sentence.split()) > 35]
    assert not long, "\n\n".join(long)
    words = " ".join(sentences).split()
    numbers = [word for word in words if re.match(r"\W*\d", word)]
    assert len(numbers) <= 0.08 * len(words), f"{len(numbers)} numbers in {len(words)} words: {' '.join(numbers)}"
