"""`lolcats plan` against measured training runs, as a Markdown table; and the throughput table that it plans with.

    python benchmarks/plan_check.py                          # the table on stdout
    python benchmarks/plan_check.py --into docs/scaling.md   # between the file's two plan_check comments
    python benchmarks/plan_check.py --update                 # src/lolcats/plan/throughput.json anew

Reads the files of benchmarks/train.py and benchmarks/quality_smollm2.py in benchmarks/results. Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from lolcats.plan.check import markdown
from lolcats.plan.check import read_runs
from lolcats.plan.check import read_whole_runs
from lolcats.plan.check import throughput_rows
from lolcats.plan.throughput import FILE
from lolcats.plan.throughput import measured

RESULTS = Path(__file__).parent / "results"
BETWEEN = re.compile(r"(<!-- plan_check -->\n).*?(<!-- /plan_check -->)", re.DOTALL)


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
    table = markdown(runs, measured())
    if given.into is None:
        print(table)
        return
    text, found = BETWEEN.subn(lambda match: f"{match[1]}{table}\n{match[2]}", given.into.read_text(encoding="utf-8"))
    if not found:
        raise SystemExit(f"{given.into} has no <!-- plan_check --> ... <!-- /plan_check -->")
    given.into.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
