"""The table of exact heads in docs/what-we-learned.md, from rows of `lolcats sweep hybrid`: means over seeds.

cd benchmarks/results
python ../recall_table.py hybrid_{,default_,window128_,bounded_,further_seeds_,rates_,32mib_}smollm2_h*.jsonl
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

SHORT, ALL = (1024, 2048, 4096), (1024, 2048, 4096, 8192)
COLUMNS: dict[str, Sequence[tuple[str, Sequence[int]]]] = {
    "one fact, 1k to 4k; 8k": [("needle", SHORT), ("needle", (8192,))],
    "one of four, 1k to 8k": [("needles", ALL)],
    "phone book": [("phone_book", SHORT), ("phone_book", (8192,))],
    "pairs": [("pairs", SHORT), ("pairs", (8192,))],
    "copy of 400; 900": [("copy_400", ALL), ("copy_900", ALL)],
}


def share(rows: Sequence[dict[str, Any]], kind: str, lengths: Sequence[int]) -> float:
    """Mean accuracy of a kind of question at the lengths, in percent; every length and seed counts the same."""
    entries = [entry for row in rows for entry in row["evaluation"].get("recall", [])]
    found = [100 * entry["accuracy"] for entry in entries if entry["kind"] == kind and entry["length"] in lengths]
    return fmean(found) if found else math.nan


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """One line for each method; perplexities are those of the texts that a run held out."""
    shown = Table("method", "seeds", "MiB at 8k", *COLUMNS, "encyclopedia", "instructions", "passkeys at 8k")
    rows = [row for row in rows if row["status"] == "finished"]
    for method in dict.fromkeys(row["case"]["method"] for row in rows):
        own = [row for row in rows if row["case"]["method"] == method]
        cells = ["; ".join(f"{share(own, *part):.1f}" for part in parts) for parts in COLUMNS.values()]
        for text in ("encyclopedia", "instructions"):
            measured = [row["held_out"][text] for row in own if text in row["held_out"]]
            cells.append(f"{fmean(measured):.2f}" if measured else "")
        keys = [e["accuracy"] for row in own for e in row["evaluation"].get("passkey", []) if e["length"] == max(ALL)]
        cells.append(" ".join(f"{100 * accuracy:.0f}" for accuracy in keys))
        size = fmean(row["cache"]["bytes"] for row in own) / 2**20
        shown.add_row(method, str(len(own)), f"{size:.0f}", *cells)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, nargs="+", help="files of rows")
    texts = [path.read_text(encoding="utf-8") for path in parser.parse_args().rows]
    Console().print(table([json.loads(line) for text in texts for line in text.splitlines()]))


if __name__ == "__main__":
    main()
