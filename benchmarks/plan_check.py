"""`lolcats plan` against measured training runs, as Markdown tables; and the throughput table that it plans with.

    python benchmarks/plan_check.py                          # the tables on stdout
    python benchmarks/plan_check.py --into docs/scaling.md   # between the file's plan_check and plan_scaling comments
    python benchmarks/plan_check.py --update                 # src/lolcats/plan/throughput.json anew

Reads the files of benchmarks/train.py, quality_smollm2.py and scaling.py in benchmarks/results. Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from lolcats.plan.check import markdown, read_runs, read_whole_runs, throughput_rows
from lolcats.plan.check_scaling import read_scaling, scaling_markdown
from lolcats.plan.throughput import FILE, measured

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--into", type=Path, help="Markdown file whose table is replaced")
    parser.add_argument("--update", action="store_true", help="write the throughput table instead")
    given = parser.parse_args()
    runs = read_runs(given.results.glob("train_*.json"))
    if given.update:
        rows = throughput_rows(runs)
        FILE.write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")
        print(f"{len(rows)} rows in {FILE}")
        return
    runs += read_whole_runs(given.results.glob("quality_smollm2_*_kernels.json"), "smollm2-135m")
    several = read_scaling(given.results.glob("scaling_*.json"))
    tables = {
        "plan_check": markdown(runs, measured()),
        "plan_scaling": scaling_markdown(several) if several else "*not measured*",
    }
    if given.into is None:
        print("\n\n".join(tables.values()))
        return
    text = given.into.read_text(encoding="utf-8")
    for name, table in tables.items():
        text = replaced(text, name, table, given.into)
    given.into.write_text(text, encoding="utf-8")


def replaced(text: str, name: str, table: str, file: Path) -> str:
    """`text` with another table between its two comments `name`."""
    between = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    text, found = between.subn(lambda match: f"{match[1]}{table}\n{match[2]}", text)
    if not found:
        raise SystemExit(f"{file} has no <!-- {name} --> ... <!-- /{name} -->")
    return text


if __name__ == "__main__":
    main()
