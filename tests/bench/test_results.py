"""benchmarks/results.py: its pages are what their runs say."""

import shutil
import sys
from pathlib import Path

import results

ROOT = Path(__file__).parents[2]


def test_the_pages_are_what_was_measured_and_have_their_pictures(tmp_path, monkeypatch):
    (tmp_path / "images").mkdir()
    before = {name: (ROOT / "docs" / name).read_text() for name in results.PAGES}
    for name in (*results.TABLES, "hybrid", "inside", "samples"):
        assert f"<!-- {name} -->" in "".join(before.values())
    for name in before:
        shutil.copy(ROOT / "docs" / name, tmp_path)
    monkeypatch.setattr(sys, "argv", ["results.py", str(ROOT / "benchmarks" / "results"), "--docs", str(tmp_path)])
    results.main()
    assert {name: (tmp_path / name).read_text() for name in before} == before
    pictures = {file.name for file in (tmp_path / "images").iterdir()}
    assert pictures == {f"results_{name}.png" for name in ("ability", "passkeys", "inside", "esl")}
