"""Any JSON value as tables and texts for a page, whatever its keys are."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal

MOST_ROWS = 200
LONG_TEXT = 60  # characters from which on a table's cell would be hard to read


@dataclass
class Block:
    """Something to show.

    Attributes:
        kind: "table": head and rows; "cards": one text after another, rows of (label, text) pairs.
        title: the path of keys that led here; may be empty.
        left_out: rows that are not shown.
    """

    kind: Literal["table", "cards"]
    title: str
    head: list[str] = field(default_factory=list)
    rows: list[list[Any]] = field(default_factory=list)
    left_out: int = 0


def blocks_of(value: Any, title: str = "") -> list[Block]:
    """Tables for mappings and for lists of mappings, cards for lists with long texts, in the order of the value."""
    if isinstance(value, dict):
        return _mapping(value, title)
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return _list(value, title)
    return [Block("table", title, [], [[text(value)]])] if value not in (None, [], {}) else []


def text(value: Any) -> str:
    """One cell: numbers rounded, nested values as JSON."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float) and value.is_integer():
        return f"{value:,.0f}"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.1f}"
    if isinstance(value, str):
        return value
    if _is_measurement(value):
        error = value.get("stderr")
        return text(value["value"]) + (f" ± {error:.2g}" if error is not None else "")
    return json.dumps(value, ensure_ascii=False)


def _mapping(value: dict[str, Any], title: str) -> list[Block]:
    plain = {key: item for key, item in value.items() if not _nested(item)}
    nested = {key: item for key, item in value.items() if _nested(item)}
    blocks = []
    if plain:
        blocks.append(_pairs(plain, title))
    rows = {
        key: item for key, item in nested.items() if isinstance(item, dict) and not any(map(_nested, item.values()))
    }
    if len(rows) == len(nested) > 1:  # a table with one row a key
        records = [{"": key, **item} for key, item in rows.items()]
        return [*blocks, _records(records, title)]
    for key, item in nested.items():
        blocks += blocks_of(item, f"{title} / {key}" if title else str(key))
    return blocks


def _list(records: list[dict[str, Any]], title: str) -> list[Block]:
    """Records as one table, and each of their nested values as a table of its own with one row a record."""
    nested = list(dict.fromkeys(key for record in records for key, item in record.items() if _nested(item)))
    if not nested:
        return [_records(records, title)]
    plain = [{key: item for key, item in record.items() if key not in nested} for record in records]
    labels = [text(next(iter(record.values()), number)) for number, record in enumerate(plain, 1)]
    blocks = [_records(plain, title)] if any(len(record) > 1 for record in plain) else []
    for key in nested:
        found = [(label, record[key]) for label, record in zip(labels, records, strict=True) if record.get(key)]
        if all(isinstance(item, dict) and not any(map(_nested, item.values())) for _, item in found):
            blocks.append(_records([{"": label, **item} for label, item in found], f"{title} / {key}".strip(" /")))
            continue
        for label, item in found:
            blocks += blocks_of(item, f"{label} / {key}")
    return blocks


def _is_measurement(value: Any) -> bool:
    """A number with its standard error: {"value": ..., "stderr": ..., ...}."""
    return isinstance(value, dict) and isinstance(value.get("value"), int | float) and "stderr" in value


def _pairs(value: dict[str, Any], title: str) -> Block:
    if any(isinstance(item, str) and len(item) > LONG_TEXT and "\n" in item for item in value.values()):
        return Block("cards", title, [], [[(key, text(item)) for key, item in value.items()]])
    return Block("table", title, [], [[key, text(item)] for key, item in value.items()])


def _records(records: list[dict[str, Any]], title: str) -> Block:
    head = list(dict.fromkeys(key for record in records for key in record))
    shown = records[:MOST_ROWS]
    left_out = len(records) - len(shown)
    if any(isinstance(item, str) and len(item) > LONG_TEXT for record in shown for item in record.values()):
        return Block("cards", title, head, [[(key, text(item)) for key, item in r.items()] for r in shown], left_out)
    rows = [[text(record[key]) if key in record else "" for key in head] for record in shown]
    return Block("table", title, head, rows, left_out)


def _nested(value: Any) -> bool:
    if isinstance(value, list):
        return any(isinstance(item, dict | list) for item in value)
    return isinstance(value, dict) and bool(value) and not _is_measurement(value)
