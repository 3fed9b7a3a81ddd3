"""The report of a run: numbers as JSON, read and begun, as a table in the terminal, and as a model card."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from glob import glob
from pathlib import Path
from typing import Any

import yaml
from rich.table import Table

from lolcats.errors import UserError

REPORT_FILE, EVALUATION_FILE = "lolcats_report.json", "eval.json"
STEPS = {
    "teacher": "teacher (softmax, untouched)",
    "swapped": "swapped, untrained",
    "transfer": "after attention transfer",
    "gates": "with exact heads",
    "adjust": "after adjusting",
}
COST_COLUMNS = ["model", "validation perplexity", "training tokens", "time", "tokens/s", "peak GiB"]


def begin_report(config: Any, train: dict[str, Any], validation: Any) -> dict[str, Any]:
    """What is known before training: the `LinearizeConfig`, training data by stage and validation data."""
    first = next(iter(train), "transfer")
    offset = train[first].position_offset if train else 0
    length = train[first].input_ids.shape[1] if train else config.data.sequence_length
    report = {
        "base_model": config.model.path,
        "config": config.model_dump(mode="json"),
        "data": {
            **{stage: data.info for stage, data in train.items()},
            "validation": validation.info,
            "positions": length + offset,
        },
        "perplexity": {},
        "stages": {},
    }
    return without_paths(report)


def read_optional(file: Path) -> Any:
    """The content of a JSON file; None if there is no such file."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {file}: {error}") from error


def write_text(file: Path, text: str) -> None:
    """Write a file whole or not at all.

    Raises:
        UserError: it cannot be written; what was there before is untouched.
    """
    partial = file.with_name(f".{file.name}.unfinished")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, file)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UserError(f"cannot write {file}: {error}") from error


def stage_summary(result: Any) -> dict[str, Any]:
    """The part of a `TrainState` worth keeping: totals, and per-layer losses before and at the best step."""
    summary = {
        "steps": result.steps,
        "tokens": result.tokens,
        "seconds": round(result.seconds, 1),
        "update_seconds": round(result.update_seconds, 1),
        "evaluation_seconds": round(result.evaluation_seconds, 1),
        "tokens_per_second": round(result.tokens_per_second, 1),
        "peak_memory_gib": round(result.peak_memory_bytes / 2**30, 3),
        "best_step": result.best_step,
        "best_metric": result.best_metric,
        "curve": [
            {key: value for key, value in entry.items() if key not in ("layer_losses", "block_metrics")}
            for entry in result.history
        ],
    }
    by_step = {entry["step"]: entry for entry in result.history}
    if "layer_losses" in by_step[result.best_step]:
        summary["layer_losses_before"] = result.history[0]["layer_losses"]
        summary["layer_losses"] = by_step[result.best_step]["layer_losses"]
    return summary


def table(title: str | None, columns: Sequence[str], rows: Iterable[Sequence[Any]], *, names: int = 1) -> Table:
    """A table of numbers for a terminal, aligned right, after `names` columns of text."""
    found = Table(title=title, title_justify="left")
    for place, column in enumerate(columns):
        text = place < names
        found.add_column(column, justify="left" if text else "right", overflow="fold" if text else "ellipsis")
    for row in rows:
        found.add_row(*map(str, row))
    return found


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table in Markdown."""
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return [f"| {' | '.join(cell.strip().replace('|', chr(92) + '|') for cell in line)} |" for line in lines]


def public_name(path: str) -> str:
    """A hub id or URL as it is, local files and folders by their own name."""
    place = os.path.abspath(os.path.expanduser(path))
    local = path.startswith((".", "/", "~")) or path.count("/") > 1 or glob(place)
    return os.path.basename(place) if local and "://" not in path else path


def without_paths(value: Any) -> Any:
    """JSON that is published with a model: local files and folders by their own name, under whatever key."""
    if isinstance(value, dict):
        return {key: without_paths(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_paths(part) for part in value]
    is_path = isinstance(value, str) and "/" in value and (value[0] in "/~." or " " not in value)
    return public_name(value) if is_path else value


def card_head(base: str, *, control: bool = False) -> str:
    """Front matter that the hub reads, and title, of a model made from `base`."""
    base = public_name(base)
    matter = {"library_name": "transformers", "pipeline_tag": "text-generation", "base_model": base}
    tags = ["lolcats", "softmax-control" if control else "linear-attention"]
    front = yaml.safe_dump(matter | {"tags": tags}, sort_keys=False, allow_unicode=True)
    return f"---\n{front}---\n\n# {base.split('/')[-1]}, {'softmax control' if control else 'linearized'}"


def model_card(report: dict[str, Any]) -> str:
    """README.md of an exported folder: what was trained, on which data, and what it computes."""
    config, base, cache = report["config"], public_name(report["base_model"]), report["cache"]
    attention, adjust = config["attention"], config["adjust"]
    costs = "\n".join(markdown_table(COST_COLUMNS, cost_rows(report)))
    weights = f"- {report['weights']}\n" if report.get("weights") else ""
    names = {"transfer": "attention transfer", "gates": "head gates", "adjust": "low-rank adjusting"}
    control = adjust["softmax_control"] and "adjust" in report["stages"]
    trained = [stage for stage in names if stage in report["stages"] and (stage == "adjust" or not control)]

    def data(stage: str) -> str:
        section = config[stage].get("data") or config["data"]
        paths = [config["gates"]["haystack"]] if stage == "gates" else [x["path"] for x in section["sources"]]
        return ", ".join(dict.fromkeys(map(public_name, paths)))

    read = "".join(f"{names[stage]} on {data(stage)}; " for stage in trained)
    by = f"by {', '.join(names[stage] for stage in trained)}" if trained else "without training"
    kind = "partly linear" if report["exact_heads"] else "linear-time, constant-memory"
    made = f"""A {kind} version of `{base}`, made with lolcats {by}
([arXiv:2410.10254](https://arxiv.org/abs/2410.10254))."""
    bound = attention["exact_window"]
    grows = "whose cache grows with the text" if bound is None else f"bounded by exact_window={bound}"
    kept = "8 bits" if attention["cache_bits"] == 8 else "the model's type"
    described = f"""{attention["window"]} window of {attention["window_size"]}, sinks: {attention["sinks"]};
  feature map {attention["feature_map"]}, one state per {attention["share_state"].replace("_", " ")};
  KV heads with softmax attention, {grows}: {", ".join(report["exact_heads"]) or "none"};
  cache of {cache["tokens"]} tokens, windows and exact heads in {kept}: {cache["bytes"] / 2**20:.1f} MiB; all softmax
  {cache["softmax_bytes"] / 2**20:.1f}. Limits: facts that left the window are recalled mostly by exact heads, code
  behind long texts gets worse; more in lolcats' docs/limits.md"""
    if control:
        made = f"`{base}` finetuned with its own softmax attention: a control for versions that lolcats linearized."
        described = "softmax, as in the base model"
    return f"""{card_head(report["base_model"], control=control)}

{made}

```python
{"" if control else "import lolcats  # where it is not installed: trust_remote_code=True in both calls"}
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("PATH")
tokenizer = AutoTokenizer.from_pretrained("PATH")
```

{costs}

- Attention: {described}.
{weights}- Data: {read}validation on {report["data"]["validation"]["label_tokens"]} labelled tokens of {data("data")}.
- Seed {config["seed"]}; commit {report["provenance"]["commit"]}; versions and the resolved configuration are in
  `lolcats_report.json`.
"""


def cost_rows(report: dict[str, Any]) -> list[list[str]]:
    """`COST_COLUMNS` of the steps of the method, one row each."""
    rows = []
    for key, label in STEPS.items():
        stage = report["stages"].get(key)
        measured = report["perplexity"].get(key)
        if measured is None and stage is None:
            continue
        costs = ["", "", "", ""]
        if stage is not None:
            costs = [
                f"{stage['tokens']:,}",
                f"{stage['seconds']:.0f} s",
                f"{stage['tokens_per_second']:,.0f}",
                f"{stage['peak_memory_gib']:.2f}",
            ]
        rows.append([label, "" if measured is None else f"{measured:.3f}", *costs])
    return rows
