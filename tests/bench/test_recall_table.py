"""benchmarks/recall_table.py: docs/what-we-learned.md says what the rows of its sweeps say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import recall_table

ROOT = Path(__file__).parents[2]


RESULTS = ROOT / "benchmarks" / "results"
DEFAULT, WINDOWS, BOUNDED = (
    RESULTS / f"hybrid_{name}_smollm2_h100_2026-11-25.jsonl" for name in ("default", "window128", "bounded")
)


@pytest.mark.parametrize(
    ("file", "method", "fact", "line"),
    [
        (DEFAULT, "softmax", ("99.3", "90.0"), "(one seed) | 180 MiB | 99.3; 90 %"),
        (WINDOWS, "25 %", ("98.9", "85.3"), "25 % of the heads exact | 51 MiB | 98.9; 85 %"),
        (WINDOWS, "6 %", ("98.4", "77.3"), "with 6 % | 17 MiB | 98.4; 77 %"),
        (BOUNDED, "6 %, window 64, 8 MiB in all", ("99.0", "74.0"), "8 bits (two seeds) | 8 MiB | 99.0; 74 %"),
        (BOUNDED, "9 %, 16 MiB in all", ("98.7", "86.0"), "8 bits (one seed) | 15 MiB | 98.7; 86 %"),
        (WINDOWS, "25 %, sequences of 8192", ("99.3", "90.0"), "stage 2 (one seed) | 51 MiB | 99.3; 90 %"),
    ],
)
def test_docs_have_the_means_of_the_rows(file, method, fact, line):
    rows = [json.loads(text) for text in file.read_text().splitlines()]
    own = [row for row in rows if row["case"]["method"] == method]
    lengths = recall_table.SHORT, (8192,)
    assert tuple(f"{recall_table.share(own, 'needle', some):.1f}" for some in lengths) == fact
    assert line in (ROOT / "docs" / "what-we-learned.md").read_text()
    assert recall_table.table(rows).row_count == len({row["case"]["method"] for row in rows})
