"""The tables and pictures of docs/results.md and paper.md, from benchmarks/results and paper_numbers.json.

    python benchmarks/results.py benchmarks/results

Each table stands between comments with its name; the text around them is written by hand. `hybrid_*.jsonl` hold a line
for each run of `lolcats sweep hybrid`. The folder of the paper's experiments holds `rows.jsonl`, a line for each run
with its `sweep`, and `steps.json`, the reports of `lolcats eval` by name.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from lolcats.evaluation.tables import AVERAGES
from lolcats.evaluation.tasks import KNOWN_TASKS, PAPER_NAMES

HERE = Path(__file__).parent
PAPER = json.loads((HERE / "paper_numbers.json").read_text(encoding="utf-8"))["tables"]
TASKS = {name: KNOWN_TASKS[name].title for name in PAPER_NAMES} | AVERAGES
AVERAGE = {"average_without_mmlu": TASKS["average_without_mmlu"]}
BOTH = {"mmlu": TASKS["mmlu"]} | AVERAGE
BEFORE, AFTER = {"perplexity transfer": "perplexity before LoRA"}, {"perplexity adjust": "perplexity"}


@dataclass(frozen=True)
class ResultTable:
    """Rows are runs of a sweep by their labels, joined by "|", or "teacher"; columns are names of `numbers_of`.

    papers: tables of paper_numbers.json; the first that has a number counts.
    """

    rows: dict[str, str]
    columns: dict[str, str]
    papers: tuple[str, ...] = ()


def same(*labels: str) -> dict[str, str]:
    return {label: label for label in labels}


PARTS = {
    f"{transfer}|{window}": f"{'' if transfer == 'yes' else 'no '}transfer, {'no ' if window == 'none' else ''}window"
    for transfer, window in (("no", "none"), ("yes", "none"), ("no", "64"), ("yes", "64"))
}
TABLES = {  # by sweep
    "main_15": ResultTable(
        {"teacher": "Qwen2.5-Coder-1.5B-Instruct (softmax)", "softmax + LoRA": "softmax + LoRA"}
        | {"lolcats-hybrid": "`lolcats-hybrid`"}
        | same("half of the layers softmax", "LoLCATs", "window only", "no transfer", "T2R", "Hedgehog"),
        {"tokens": "M tokens", "minutes": "minutes"} | AFTER | TASKS,
        ("main", "main-no-transfer", "seeds"),
    ),
    "components": ResultTable(
        {"teacher": "Qwen2.5-Coder-0.5B-Instruct (softmax)", "softmax + LoRA": "softmax + LoRA"}
        | {f"hedgehog|{part}": f"Hedgehog, {name}" for part, name in PARTS.items()}
        | {f"t2r|{part}": f"T2R, {name}" for part, name in PARTS.items()}
        | {"window only": "no linear part, window"},
        BEFORE | AFTER | BOTH,
        ("components", "components-perplexity"),
    ),
    "windows": ResultTable(
        same("4", "16", "64", "256", "terraced 16", "terraced 64", "terraced 128"), AFTER | BOTH, ("windows",)
    ),
    "lora-rank": ResultTable(same("4", "8", "16", "32", "64", "128"), AFTER | BOTH, ("lora-rank",)),
    "transfer-steps": ResultTable(
        same("0", "19", "48", "97") | {"all": "194"}, BEFORE | AFTER | BOTH, ("transfer-steps",)
    ),
    "changes_05": ResultTable(
        {"LoLCATs": "LoLCATs", "attention-loss: cross-entropy": "cross-entropy of weights in stage 1"}
        | {"attention-loss: both": "..., and squared errors"}
        | {"blocks: 6": "layers in four blocks", "blocks: 1": "each layer alone"}
        | {"data: textbooks": "textbooks, not Alpaca", "data: textbooks, longest": "..., longest effective lengths"}
        | {"data: multiple choice": "multiple-choice questions in MMLU's form"}
        | {"lora-projections: qkvo": "one epoch of LoRA on q, k, v and o"}
        | {f"lora-projections: {names}": f"..., on {' and '.join(names)}" for names in ("qv", "vo", "qk", "v", "o")},
        AFTER | BOTH,
    ),
    "blocks": ResultTable(
        {"none": "all layers jointly"} | {size: f"blocks of {size}" for size in ("15", "10", "5", "2", "1")},
        BEFORE | AFTER,
        ("blocks",),
    ),
}


CODERS = [f"paper_qwen2.5-coder-{name}_2026-11-28.jsonl" for name in ("1.5b_h100", "0.5b_h200")]
INSIDE, PASSKEYS = (f"{name}_qwen2.5-coder-0.5b_h200_2026-11-28.json" for name in ("inside", "passkeys"))
STATES = {"before LoRA": "-", "LoRA": "--", "LoRA on errors": ":"}  # of its errors, and their lines
RUNS, PAGES = "smollm2_h200_2026-11-21", ("results.md", "paper.md")
HYBRID = {  # rows of the table of exact heads -> file and method of their runs
    "teacher, untrained": ("ends_smollm2_h200_2026-11-23: softmax, untrained",),
    "softmax + LoRA, same data": (
        "default_smollm2_h100_2026-11-25: softmax",
        "rates_smollm2_h200_2026-11-26: softmax, as lolcats-hybrid",
    ),
    "25 % within 32 MiB, 8 bits": ("32mib_smollm2_h200_2026-11-26: 25 %, 32 MiB in all",),
    "all linear, Alpaca alone": ("ends_smollm2_h200_2026-11-23: all linear, instructions alone",),
}
KINDS = {"needle": "one fact", "needles": "one of four", "phone_book": "phone book", "pairs": "pairs"}
LENGTHS = (1024, 2048, 4096, 8192)


@dataclass(frozen=True)
class Results:
    """Finished runs, and the reports of `lolcats eval` by name.

    hybrid: runs of `lolcats sweep hybrid` by "file: method".
    ability: teachers of a size and models linearized from them, with what `benchmarks/ability.py` found.
    long: models of which it measured a part: recall and perplexity of long texts, and what further training leaves.
    passkeys: models with what `lolcats eval --tasks passkey` found.
    inside: what `benchmarks/inside.py` found.
    """

    rows: list[dict[str, Any]]
    steps: dict[str, Any]
    hybrid: dict[str, list[dict[str, Any]]]
    ability: dict[str, list[dict[str, Any]]]
    long: list[dict[str, Any]]
    passkeys: list[dict[str, Any]]
    inside: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> Results:
        hybrid: dict[str, list[dict[str, Any]]] = {}
        for file in sorted(folder.glob("hybrid_*.jsonl")):
            for row in _finished(file):
                hybrid.setdefault(f"{file.stem.removeprefix('hybrid_')}: {row['case']['method']}", []).append(row)
        steps = json.loads((folder / RUNS / "steps.json").read_text(encoding="utf-8"))
        ability = {}
        for size in ("0.5b", "1.5b"):
            files = sorted(folder.glob(f"ability_qwen2.5-coder-{size}_*.jsonl"))
            ability[size] = [json.loads(line) for file in files for line in file.read_text("utf-8").splitlines()]
        files = sorted(folder.glob("long_qwen2.5-coder-*.jsonl"))
        long = [json.loads(line) for file in files for line in file.read_text("utf-8").splitlines()]
        rows = [row for file in (f"{RUNS}/rows.jsonl", *CODERS) for row in _finished(folder / file)]
        keys, inside = (json.loads((folder / name).read_text(encoding="utf-8")) for name in (PASSKEYS, INSIDE))
        return cls(rows, steps, hybrid, ability, long, keys["runs"], inside)

    def of(self, sweep: str, case: str) -> list[dict[str, float]]:
        """The numbers of a table's row, one entry a seed."""
        runs = []
        for row in self.rows:
            tables = row.get("tables", {row["sweep"]: "|".join(row["case"].values())})
            if tables.get(sweep) == case:
                runs.append(row)
        return [numbers_of(row) for row in runs]


def _finished(file: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if row.get("status") == "finished"]


def numbers_of(row: dict[str, Any]) -> dict[str, float]:
    """ "perplexity STAGE", "perplexity on TEXT"; accuracies in percent by task; millions of tokens, minutes."""
    after = {name: value for name, value in row.get("perplexity", {}).items() if value is not None}
    if "swapped" in after:  # before LoRA, where nothing is transferred
        after.setdefault("transfer", after["swapped"])
    texts = {f"on {name}": value for name, value in row.get("held_out", {}).items()}
    found = {f"perplexity {name}": value for name, value in (after | texts).items()}
    if stages := row.get("stages", {}).values():
        found["tokens"] = sum(stage["tokens"] for stage in stages) / 1e6
        found["minutes"] = sum(stage["seconds"] for stage in stages) / 60
    measured = row.get("evaluation", {})
    for name, cell in (measured.get("tasks", {}) | measured.get("averages", {})).items():
        found[name] = 100 * cell["value"]
    return found


def markdown(columns: list[str], rows: list[list[str]]) -> list[str]:
    first, *others = (f"| {' | '.join(cells)} |" for cells in (columns, *rows))
    return [first, "|---" * len(columns) + "|", *others]


def table(name: str, results: Results) -> list[str]:
    """Markdown lines: `ours / the paper's` in each cell."""
    shown = TABLES[name]
    rows = []
    for case, title in shown.rows.items():
        seeds = results.of(name, case)
        cells = [title if seeds else f"{title} (not measured)"]
        for column in shown.columns:
            ours = _number([seed[column] for seed in seeds if column in seed])
            known = (PAPER[paper]["rows"].get(case, {}).get(column) for paper in shown.papers)
            paper = _papers_number(next((value for value in known if value is not None), None))
            cells.append(ours if paper == "-" else f"{ours} / {paper}")
        rows.append(cells)
    return markdown(["", *shown.columns.values()], rows)


def _number(values: list[float]) -> str:
    if not values:
        return "-"
    mean = statistics.fmean(values)
    digits = 2 if mean < 1000 else 0
    return f"{mean:.{digits}f}" + (f" ± {statistics.stdev(values):.{digits}f}" if len({*values}) > 1 else "")


def _papers_number(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value[0]:g} ± {value[1]:g}" if isinstance(value, list) else f"{value:g}"


def hybrid(results: Results) -> list[str]:
    """Exact heads: means over seeds, by length."""
    columns = ["", "seeds", "MiB at 8k", *KINDS.values(), "copy of 400", "WikiText-2", "Alpaca"]
    rows = []
    for title, names in HYBRID.items():
        runs = [run for name in names for run in results.hybrid[name]]
        cells = [title, str(len(runs)), f"{mib(runs):.0f}"]
        cells += [", ".join(f"{share(runs, kind, length):.0f}" for length in LENGTHS) for kind in KINDS]
        cells.append(f"{statistics.fmean(share(runs, 'copy_400', length) for length in LENGTHS):.1f}")
        for text in ("encyclopedia", "instructions"):
            measured = [run["held_out"][text] for run in runs if text in run["held_out"]]
            cells.append(f"{statistics.fmean(measured):.2f}" if measured else "-")
        rows.append(cells)
    return markdown(columns, rows)


Column = tuple[int, Callable[[dict[str, Any]], float | None]]  # digits, and what is shown of a run


def of_runs(runs: list[dict[str, Any]], columns: dict[str, Column]) -> list[str]:
    """A row for each title of runs: means over these, with how many measured it if not all did; "-": none."""
    rows = []
    first = ("teacher", "`lolcats-hybrid`")
    for title in sorted(dict.fromkeys(run["row"] for run in runs), key=lambda title: title not in first):
        same = [run for run in runs if run["row"] == title]
        cells = [title, str(len(same))]
        for digits, find in columns.values():
            values = [value for run in same if (value := find(run)) is not None]
            some = f" ({len(values)})" if title != "teacher" and len(values) < len(same) else ""
            cells.append(f"{statistics.fmean(values):.{digits}f}{some}" if values else "-")
        rows.append(cells)
    return markdown(["", "runs", *columns], rows)


def percent(name: str) -> Column:
    return 1, lambda run: run["found"].get(name, {}).get("percent")


def wikitext(length: int, teacher: dict[str, Any]) -> Column:
    """Perplexity as a multiple of the teacher's, on the same text."""
    name = f"perplexity_{length}"

    def find(run: dict[str, Any]) -> float | None:
        before = run.get("teacher", teacher).get(name)
        return run["found"][name] / before if before and name in run["found"] else None

    return 2, find


def fact(kind: str, tokens: int, *measures: str) -> Column:
    """Facts found in texts of so many tokens, per cent, in the first of the measures that has them."""

    def find(run: dict[str, Any]) -> float | None:
        entries = [entry for name in measures for entry in run["found"].get(name, ())]
        known = (100 * e["accuracy"] for e in entries if (e["kind"], e["length"]) == (kind, tokens))
        return next(known, None)

    return 0, find


def ability(runs: list[dict[str, Any]]) -> list[str]:
    """What a model still does."""
    tasks = {"HumanEval": "humaneval", "behind 1k": "humaneval_1024", "4k": "humaneval_4096"}
    tasks |= {"4k of other": "humaneval_4096_front1", "GSM8K": "gsm8k", "8-shot": "gsm8k_8shot", "MMLU": "mmlu"}
    tasks["120 labels"] = "labels_120shot"
    sizes = {"MiB at 1k": "1024", "8k": "8192", "32k": "32768"}
    columns: dict[str, Column] = {title: (0, lambda run, n=n: run["cache_mib"].get(n)) for title, n in sizes.items()}
    columns |= {title: percent(name) for title, name in tasks.items()}
    runs = [run for run in runs if run["row"] not in ON_THE_WAY and {*tasks.values()} & run["found"].keys()]
    texts = {"WikiText-2, 1k": 1024, "at 4k": 4096, "at 8k": 8192}
    return of_runs(runs, columns | {title: wikitext(n, runs[0]["found"]) for title, n in texts.items()})


def far(runs: list[dict[str, Any]]) -> list[str]:
    """What is found in texts of up to 32k tokens."""
    titles = {run["row"] for run in runs if {"perplexity_32768", "recall_long"} & run["found"].keys()} - {*ON_THE_WAY}
    runs = [run for run in runs if run["row"] in titles and {"recall", "recall_long"} & run["found"].keys()]
    columns: dict[str, Column] = {}
    for title, kind in (("one fact", "needle"), ("one of four", "needles")):
        for tokens in (8192, 16384, 32768):
            columns[f"{title}, {tokens // 1024}k"] = fact(kind, tokens, "recall_long", "recall")
    teacher = runs[0]["found"] if runs[0]["row"] == "teacher" else {}  # of the same text
    columns |= {f"WikiText-2, {n // 1024}k": wikitext(n, teacher) for n in (16384, 32768)}
    return of_runs(runs, columns)


def trained(results: Results) -> list[str]:
    """What training on other data leaves of a model and of its original."""
    # Of what was trained; None: all runs.
    seeds = {"teacher": None, "`lolcats-hybrid`, heads by gates alone": None, "25 %, 8 bits, gates on 8192 tokens": 1}
    runs = [run for run in results.ability["0.5b"] if seeds.get(run["row"], -1) in (None, run["seed"])]
    columns, both = {"HumanEval": percent("humaneval"), "GSM8K": percent("gsm8k")}, ("recall_long", "recall")
    columns |= {"one fact, 8k": fact("needle", 8192, *both), "one of four, 8k": fact("needles", 8192, *both)}
    return of_runs([*runs, *(run for run in results.long if "humaneval" in run["found"])], columns)


def inside(results: Results) -> list[str]:
    """Errors of attention, rank correlations of those before LoRA, maps beyond the window, and LoRA's change of W."""
    entropy, square = (np.array(results.inside["original"][name]) for name in ("entropy", "square"))
    maps = {head: np.array(bins) for head, bins in results.inside["original"]["map"].items()}
    far = np.tri(64, k=-9, dtype=bool) & (np.arange(64) > 0)  # bins of 16 keys over 128 tokens away, without the first
    heads = [head for head, bins in maps.items() if bins[far].sum() > 0.05 * bins.sum()]
    columns = ["perplexity", "after LoRA", "error", "after LoRA", "after LoRA on errors", "with entropy"]
    columns += ["with depth", "share of output with depth", "far keys"]
    rows = []
    for name, run in results.inside["runs"].items():
        found, errors = run["perplexity"], {state: np.array(error) for state, error in run["mse"].items()}
        before = found.get("transfer", found["swapped"] if errors else found["teacher"])
        cells = [name, f"{before:.2f}", f"{found['adjust']:.2f}"]
        cells += [f"{errors[state].mean():.4f}" if state in errors else "-" for state in STATES]
        if errors:
            layers = errors["before LoRA"].mean(1)
            shares = layers, layers / square.mean(1)
            correlations = [(entropy, errors["before LoRA"]), *((range(len(layers)), share) for share in shares)]
            cells += [f"{ranked(*pair):.2f}" for pair in correlations]
            near = [np.corrcoef(maps[head][far], np.array(run["map"][head])[far])[0, 1] for head in heads]
            cells.append(f"{np.mean(near):.2f}")
        cells += ["-"] * (len(columns) + 1 - len(cells))
        rows.append([*cells, ", ".join(f"{100 * np.mean(run['travel'][p]['change']):.1f}" for p in "qkvo")])
    return markdown(["", *columns, "change of W, %"], rows)


def samples(results: Results) -> list[str]:
    """How answers to the first prompt begin."""
    answers = {"original": results.inside["original"], **results.inside["runs"]}
    rows = [[name, " ".join(run["written"][0].split()[:12]) + " ..."] for name, run in answers.items()]
    return markdown(["", results.inside["prompts"][0]], rows)


def ranked(*pair: Any) -> float:
    """Rank correlation."""
    return float(np.corrcoef(*(np.ravel(values).argsort().argsort() for values in pair))[0, 1])


def share(runs: list[dict[str, Any]], kind: str, length: int) -> float:
    """Mean accuracy over runs, in percent."""
    entries = [entry for run in runs for entry in run["evaluation"]["recall"]]
    return 100 * statistics.fmean(e["accuracy"] for e in entries if (e["kind"], e["length"]) == (kind, length))


def mib(runs: list[dict[str, Any]]) -> float:
    """Cache of a sequence of 8192 tokens."""
    return statistics.fmean(run["cache"]["bytes"] for run in runs) / 2**20


def fill(page: str, results: Results) -> str:
    """The page with new lines between its comments `<!-- NAME -->` and `<!-- /NAME -->`."""

    def block(match: re.Match[str]) -> str:
        name = match[1]
        own = {"hybrid": hybrid, "trained": trained, "inside": inside, "samples": samples}
        if shown := {"ability": ability, "far": far}.get(name.removesuffix("_15")):
            lines = shown(results.ability["1.5b" if name.endswith("_15") else "0.5b"])
        else:
            lines = own[name](results) if name in own else table(name, results)
        return "\n".join([f"<!-- {name} -->", *lines, f"<!-- /{name} -->"])

    return re.sub(r"<!-- ([\w-]+) -->\n.*?<!-- /\1 -->", block, page, flags=re.DOTALL)


def looks(results: Results) -> Figure:
    """Attention's error and what goes with it, how far LoRA went, and attention maps."""
    original, runs = results.inside["original"], results.inside["runs"]
    figure = Figure(figsize=(8, 10), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=(5, 6))
    heads, depth, quality, lora = upper.subplots(2, 2).flat
    for number, (name, run) in enumerate(runs.items()):
        color, found = f"C{number}", run["perplexity"]
        norms = [np.mean(run["travel"][p][part]) for part in "ab" for p in "qkvo"]
        lora.bar(np.arange(8) + 0.2 * number, norms, 0.2, color=color, label=name)
        if not run["mse"]:
            continue
        for state, errors in run["mse"].items():
            depth.plot(np.mean(errors, 1), STATES[state], color=color)
        heads.plot(np.ravel(original["entropy"]), np.ravel(run["mse"]["before LoRA"]), f"{color}.", alpha=0.4, mew=0)
        perplexities = found.get("transfer", found["swapped"]), found["adjust"]
        place = [np.mean(run["mse"][state]) for state in ("before LoRA", "LoRA")]
        quality.annotate("", *zip(place, perplexities, strict=True), arrowprops={"arrowstyle": "<-", "color": color})
        quality.plot(place, perplexities, f"{color}o")
    lora.set_xticks(np.arange(8) + 0.3, [f"{part} of {p}" for part in "AB" for p in "qkvo"], fontsize=8)
    depth.legend([Line2D([], [], color="black", linestyle=style) for style in STATES.values()], STATES, fontsize=8)
    lora.legend(fontsize=8)
    lora.set(title="how far LoRA went")
    for row in results.rows:  # other runs on the same data, by the error that stage 1 found
        error = row.get("stages", {}).get("transfer", {}).get("layer_loss")
        if error and {"components", "windows", "transfer-steps"} & {*row["tables"]}:
            quality.plot(error / 1000, row["perplexity"]["adjust"], "k.", alpha=0.5)
    quality.set(title="perplexity, and where LoRA moves it", xlabel="squared error", xscale="log", yscale="log")
    heads.set(title="squared error of heads", xlabel="entropy of softmax weights (nats)", yscale="log", ylim=(1e-6, 4))
    depth.set(title="squared error of layers", xlabel="layer", yscale="log")
    maps = {"softmax": original["map"]}
    for name, run in runs.items():
        maps |= {name if "transfer" in run["perplexity"] else "untrained": run["map"]} if "map" in run else {}
    for axes, (name, shown) in zip(lower.subplots(len(maps), len(original["map"])), maps.items(), strict=True):
        for axis, (place, weights) in zip(axes, shown.items(), strict=True):
            axis.imshow(np.sqrt(weights), vmin=0, vmax=50, cmap="magma", interpolation="nearest")
            axis.set(xticks=[], yticks=[])
            axis.set_title("layer {}, head {}".format(*place.split(".")) if name == "softmax" else "", fontsize=8)
        axes[0].set_ylabel(name, fontsize=8)
    return figure


ON_THE_WAY = {  # to the default, one pass a stage: not shown
    "12 %, 4096, no linear part",
    "12 %, 4096",
    "25 %",
    "25 %, 8 bits",
    "..., no linear part",
    "25 %, 8 bits, gates on 8192 tokens",
    "..., 4096, window of 256",
    "..., 4096, penalty 1, keys not balanced",
}
ABLE = {  # of the table of abilities, drawn: rows of one way
    "exact heads, window and linear part": ("12 %, window 128", "`lolcats-hybrid`", "..., 48 % of the heads"),
    "no linear part": (
        "..., no linear part, a window of 576",
        "..., no linear part, a window of 640",
        "`lolcats-hybrid` with 12 %, a window of 1024, no linear part",
    ),
    "window alone": tuple(
        f"window of {tokens} in {blocks} blocks alone, same data" for tokens, blocks in ((512, 2), (704, 4), (768, 4))
    ),
    "softmax": ("teacher", "softmax + LoRA, same data, next token"),
    "controls": ("12 % exact, untrained, no linear part", "`lolcats-linear`"),  # the paper's recipe lies far below
}


def frontier(results: Results) -> Figure:
    """What bytes buy: means over seeds. Seven tasks of `ability` weigh the same; facts far away."""
    figure = Figure(figsize=(13, 4), layout="constrained")
    names = ("humaneval", "humaneval_1024", "humaneval_4096", "gsm8k", "gsm8k_8shot", "mmlu", "labels_120shot")
    tasks, facts = [percent(name)[1] for name in names], [fact("needle", 32768, "recall_long", "recall")[1]]
    panels = [(size, "8192", 2, tasks, f"mean of seven tasks (%), {size.upper()}") for size in ("0.5b", "1.5b")]
    panels.append(("0.5b", "32768", 4, facts, "one fact found in 32768 tokens (%), 0.5B"))
    for axis, (size, length, least, measures, title) in zip(figure.subplots(1, 3), panels, strict=True):
        named = []
        for (label, titles), style in zip(ABLE.items(), ("C0o", "C1s", "C2v", "k^", "C7x"), strict=True):
            axis.plot([], [], style, label=label)
            for row in titles:
                runs = [run for run in results.ability[size] if run["row"] == row]
                found = [[value for run in runs if (value := find(run)) is not None] for find in measures]
                if all(found):
                    place = runs[0]["cache_mib"][length], statistics.fmean(map(statistics.fmean, found))
                    axis.plot(*place, style)
                    words = r"[`.]+,? ?|lolcats-hybrid` with |,? ?no linear part,?( a )?| in . blocks.*|, same data.*"
                    named.append((place, re.sub(words, "", row), "1024" in row or "alone" in row))
        span = 100 if length == "32768" else 14
        top = max(y for (_, y), *_ in named) + span / 20
        for is_left in (False, True):
            free = top
            for place, name, _ in sorted((each for each in named if each[2] == is_left), key=lambda each: -each[0][1]):
                free = min(place[1] + span / 80, free - span / 26)  # no label over another
                at, side = (place[0] * (0.88 if is_left else 1.14), free), "right" if is_left else "left"
                axis.annotate(name, at, fontsize=8, ha=side, va="center")
        axis.set(xscale="log", xlabel=f"MiB of a sequence of {length} tokens", title=title, ylim=(top - span, top))
        axis.set(xlim=(0.7 * least, 300 * least))
        axis.set_xticks([8, 16, 32, 64, 128, 256], ["8", "16", "32", "64", "128", "256"])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    figure.axes[2].legend(fontsize=8, loc="center right")
    return figure


def passkeys(results: Results) -> Figure:
    """Share of numbers found by depth and length of the text, three models."""
    figure = Figure(figsize=(10, 2.6), layout="constrained")
    for axis, run in zip(figure.subplots(1, 3, sharey=True), results.passkeys, strict=True):
        found = run["passkey"]
        image = axis.imshow([cell["depths"] for cell in found], cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
        axis.set(title=run["run"], xlabel="depth (tenths)")
        axis.set_yticks(range(len(found)), [f"{cell['length']} tokens" for cell in found])
    figure.colorbar(image, ax=figure.axes, label="found")
    return figure


def lengths(results: Results) -> Figure:
    """Histograms of the effective sequence length, one line a source."""
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axis = figure.subplots()
    for name, step in results.steps.items():
        if name.startswith("esl "):
            esl = step["result"]["models"][0]["esl"]
            shares = [count / esl["sequences"] for count in esl["histogram"]["counts"]]
            label = f"{name.removeprefix('esl ')} (mean {esl['mean']:,.0f})"
            axis.stairs(shares, esl["histogram"]["edges"], label=label)
    axis.set(xlabel="effective sequence length (sum over queries, tokens)", ylabel="share of sequences")
    axis.legend(fontsize=8)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--docs", type=Path, default=HERE.parent / "docs", help="folder of these pages and images/")
    given = parser.parse_args()
    results = Results.read(given.folder)
    for page in (given.docs / name for name in PAGES):
        page.write_text(fill(page.read_text(encoding="utf-8"), results), encoding="utf-8")
    for name, draw in (
        ("ability", frontier),
        ("passkeys", passkeys),
        ("inside", looks),
        ("esl", lengths),
    ):
        draw(results).savefig(given.docs / "images" / f"results_{name}.png", dpi=130)


if __name__ == "__main__":
    main()
