"""benchmarks/results.py: docs/results.md is what its runs say."""

import shutil
import sys
from pathlib import Path

import results

ROOT = Path(__file__).parents[2]


def test_the_page_is_what_was_measured_and_has_its_pictures(tmp_path, monkeypatch):
    (tmp_path / "images").mkdir()
    page = (ROOT / "docs" / "results.md").read_text()
    for name in (*results.TABLES, "hybrid", "provenance"):
        assert f"<!-- {name} -->" in page
    shutil.copy(ROOT / "docs" / "results.md", tmp_path)
    monkeypatch.setattr(sys, "argv", ["results.py", str(ROOT / "benchmarks" / "results"), "--docs", str(tmp_path)])
    results.main()
    assert (tmp_path / "results.md").read_text() == page
    pictures = {file.name for file in (tmp_path / "images").iterdir()}
    assert pictures == {f"results_{name}.png" for name in ("ability", "recall", "curves", "layers", "esl")}
