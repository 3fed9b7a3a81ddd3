"""benchmarks/recall_table.py: docs/what-we-learned.md says what the rows of its sweeps say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import recall_table

ROOT = Path(__file__).parents[2]


RESULTS = ROOT / "benchmarks" / "results"
WINDOWS, BOUNDED = (f"{name}_smollm2_h100_2026-11-25" for name in ("window128", "bounded"))
FURTHER, RATES, LARGE = (f"{name}_smollm2_h200_2026-11-26" for name in ("further_seeds", "rates", "32mib"))


@pytest.mark.parametrize(
    ("files", "method", "fact", "line"),
    [
        ([RATES], "softmax, LoRA of rank 32", ("100.0", "88.0"), "rank 32 (one seed) | 180 MiB | 100; 88 %"),
        ([WINDOWS], "25 %", ("98.9", "85.3"), "25 % of the heads exact | 51 MiB | 98.9; 85 %"),
        ([WINDOWS], "6 %", ("98.4", "77.3"), "with 6 % | 17 MiB | 98.4; 77 %"),
        ([BOUNDED, FURTHER], "6 %, window 64, 8 MiB in all", ("98.9", "74.0"), "8 bits | 8 MiB | 98.9; 74 %"),
        ([BOUNDED, FURTHER], "9 %, 16 MiB in all", ("98.4", "82.7"), "8 bits | 15 MiB | 98.4; 83 %"),
        ([LARGE], "25 %, 32 MiB in all", ("99.1", "85.3"), "8 bits | 30 MiB | 99.1; 85 %"),
        ([WINDOWS, FURTHER, RATES], "25 %, sequences of 8192", ("99.1", "90.7"), "in stage 2 | 51 MiB | 99.1; 91 %"),
    ],
)
def test_docs_have_the_means_of_the_rows(files, method, fact, line):
    texts = [(RESULTS / f"hybrid_{name}.jsonl").read_text() for name in files]
    rows = [json.loads(line) for text in texts for line in text.splitlines()]
    own = [row for row in rows if row["case"]["method"] == method]
    lengths = recall_table.SHORT, (8192,)
    assert tuple(f"{recall_table.share(own, 'needle', some):.1f}" for some in lengths) == fact
    assert line in (ROOT / "docs" / "what-we-learned.md").read_text()
    assert recall_table.table(rows).row_count == len({row["case"]["method"] for row in rows})
