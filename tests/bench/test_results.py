"""benchmarks/results.py: docs/results.md is what its runs say."""

import json
import shutil
import sys
from pathlib import Path

import results

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "benchmarks" / "results"


def test_the_page_is_what_was_measured():
    page = (ROOT / "docs" / "results.md").read_text()
    assert results.fill(page, results.Results.read(MEASURED)) == page
    for name in (*results.TABLES, "hybrid", "provenance"):
        assert f"<!-- {name} -->" in page


def test_other_runs_give_another_page(tmp_path, monkeypatch):
    """A seed less, a failed run; pictures are drawn of what is left."""
    folder, docs = tmp_path / "measured", tmp_path / "docs"
    (folder / results.RUNS).mkdir(parents=True)
    (docs / "images").mkdir(parents=True)
    for file in MEASURED.glob("hybrid_*.jsonl"):
        shutil.copy(file, folder)
    shutil.copy(MEASURED / results.RUNS / "steps.json", folder / results.RUNS)
    shutil.copy(ROOT / "docs" / "results.md", docs)
    rows = [json.loads(line) for line in (MEASURED / results.RUNS / "rows.jsonl").read_text().splitlines()]
    rows = [row for row in rows if not (row["sweep"] == "main" and row["run"].endswith("-seed2"))]
    for row in rows:
        if row["sweep"] == "windows" and row["case"]["window"] == "4":
            row["status"] = "failed"
    (folder / results.RUNS / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(sys, "argv", ["results.py", str(folder), "--docs", str(docs)])
    results.main()
    written, before = (docs / "results.md").read_text(), (ROOT / "docs" / "results.md").read_text()
    changed = [line for line in written.splitlines() if line not in before.splitlines()]
    assert any(line.startswith("| LoLCATs | 6.0") for line in changed)
    assert "| 4 (not measured) | - | - / 73.3 |" in changed
    assert not any(line.startswith("| 16 |") for line in changed)
    pictures = {file.name for file in (docs / "images").iterdir()}
    assert pictures == {f"results_{name}.png" for name in ("ability", "recall", "curves", "layers", "esl")}
