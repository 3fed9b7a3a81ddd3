"""benchmarks/results.py: docs/results.md is what its runs say."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import results

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "benchmarks" / "results" / "smollm2_h200_2026-11-21"


def test_the_page_is_what_was_measured():
    page = (ROOT / "docs" / "results.md").read_text()
    assert results.fill(page, results.Results.read(MEASURED)) == page
    for name in results.TABLES:
        assert f"<!-- {name} -->" in page


def test_other_runs_give_another_page(tmp_path, monkeypatch):
    """A seed less, a failed run; pictures are drawn of what is left."""
    folder, docs = tmp_path / "measured", tmp_path / "docs"
    folder.mkdir()
    (docs / "images").mkdir(parents=True)
    shutil.copy(MEASURED / "steps.json", folder)
    shutil.copy(ROOT / "docs" / "results.md", docs)
    rows = [json.loads(line) for line in (MEASURED / "rows.jsonl").read_text().splitlines()]
    rows = [row for row in rows if not (row["sweep"] == "main" and row["run"].endswith("-seed2"))]
    for row in rows:
        if row["sweep"] == "windows" and row["case"]["window"] == "4":
            row["status"] = "failed"
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(sys, "argv", ["results.py", str(folder), "--docs", str(docs)])
    results.main()
    written, before = (docs / "results.md").read_text(), (ROOT / "docs" / "results.md").read_text()
    changed = [line for line in written.splitlines() if line not in before.splitlines()]
    assert any(line.startswith("| LoLCATs | 6.0") for line in changed)
    assert any(line.startswith("| 4 (not measured) | - | - / 80.7 |") for line in changed)
    assert not any(line.startswith("| 16 |") for line in changed)
    pictures = {file.name for file in (docs / "images").iterdir()}
    assert pictures == {f"results_{name}.png" for name in ("curves", "layers", "maps", "esl")}
