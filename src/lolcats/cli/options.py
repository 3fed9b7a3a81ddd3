"""From command line options to configuration values."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from lolcats.config import DataSection, DataSource, LinearizeConfig, merge, parse_override, read_yaml
from lolcats.errors import UserError
from lolcats.recipes import DEFAULT, load_recipe

# Options of several commands, to be given their defaults there.
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
Dtype = Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")]
GgufFile = Annotated[str | None, typer.Option("--gguf-file", help="GGUF file inside MODEL.", show_default=False)]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run Python code that comes with MODEL.")]
SequenceLength = Annotated[int, typer.Option(min=2, help="Tokens of a packed sequence.")]
LossOn = Annotated[str, typer.Option(help="answer (of instruction records) or all tokens.")]
HeldOut = Annotated[
    list[str],
    typer.Option(
        "--data",
        metavar="PATH[,KEY=VALUE]...",
        help="Text that was not trained on: hub id, local file, or `demo`; repeatable.",
        show_default=False,
    ),
]
SparseCache = Annotated[
    int | None,
    typer.Option(
        "--sparse-cache",
        min=0,
        help="Linearized models: keep this many tokens per head exact, whatever they were trained with.",
        show_default=False,
    ),
]
CacheBy = Annotated[
    Literal["recall", "leverage"] | None,
    typer.Option(
        "--cache-by",
        help="Which: those that the state would recall worst, or those whose keys are least like the others.",
        show_default=False,
    ),
]
Horizon = Annotated[
    int | None,
    typer.Option(
        "--linear-length-cap",
        min=0,
        help="Linearized models: the linear part weighs no more than it would at this many tokens.",
        show_default=False,
    ),
]
"""Options of commands that load a linearized model."""
BeginToken = Annotated[
    bool | None,
    typer.Option(
        "--begin-token/--no-begin-token",
        help="Packed sequences begin with the begin token, or not; without either as the model was trained"
        " (data.begin_token), or as the tokenizer of any other model begins a text.",
        show_default=False,
    ),
]
"""An option of commands that read text with a model."""

# Option of `lolcats linearize` -> the fields it sets. Everything else is reached with --set.
FIELDS: dict[str, tuple[str, ...]] = {
    "model": ("model.path",),
    "revision": ("model.revision",),
    "gguf_file": ("model.gguf_file",),
    "dtype": ("model.dtype",),
    "device": ("model.device",),
    "trust_remote_code": ("model.trust_remote_code",),
    "window": ("attention.window",),
    "window_size": ("attention.window_size",),
    "window_blocks": ("attention.window_blocks",),
    "sinks": ("attention.sinks",),
    "sparse_cache": ("attention.sparse_cache",),
    "cache_by": ("attention.cache_by",),
    "feature_map": ("attention.feature_map",),
    "feature_dim": ("attention.feature_dim",),
    "share_state": ("attention.share_state",),
    "keep_softmax": ("attention.keep_softmax",),
    "data": ("data.sources",),
    "sequence_length": ("data.sequence_length",),
    "max_tokens": ("data.max_train_tokens",),
    "loss_on": ("data.loss_on",),
    "epochs": ("transfer.epochs", "adjust.epochs"),
    "max_steps": ("transfer.max_steps", "adjust.max_steps"),
    "batch_size": ("transfer.batch_size", "adjust.batch_size"),
    "micro_batch_size": ("transfer.micro_batch_size", "adjust.micro_batch_size"),
    "block_layers": ("transfer.block_layers",),
    "block_mode": ("transfer.block_mode",),
    "job_folder": ("transfer.job_folder",),
    "transfer": ("transfer.enabled",),
    "adjust": ("adjust.enabled",),
    "train_feature_maps": ("adjust.train_feature_maps",),
    "lora_rank": ("adjust.lora_rank",),
    "distill": ("adjust.distill_factor",),
    "merge_lora": ("output.merge_lora",),
    "tensorboard": ("output.tensorboard",),
    "seed": ("seed",),
}

_SOURCE_KEYS = [name for name in DataSource.model_fields if name != "path"]
_SOURCE_OPTION = re.compile(rf",({'|'.join(_SOURCE_KEYS)})=([^,]*)$")


def resolve(
    given: dict[str, Any],
    *,
    recipe: str | None = None,
    overrides: Iterable[str] = (),
    saved: Path | None = None,
) -> LinearizeConfig:
    """A saved configuration or a recipe (neither: the default one), under options, under --set; validated once.

    Args:
        given: values of the options in `FIELDS`; None where an option was not given.
        saved: `run/config.yaml` of the run to resume.
    """
    if recipe is None and saved is not None:
        values = read_yaml(saved)
    else:
        recipe = recipe or DEFAULT
        values = load_recipe(recipe)
        values.setdefault("recipe", recipe)
    for option, value in given.items():
        if value is None:
            continue
        for field in FIELDS[option]:
            values = merge(values, _nested(field, value))
    for text in overrides:
        values = merge(values, parse_override(text))
    config = LinearizeConfig.from_dict(values)
    if config.model.path is None:
        raise UserError(
            "no model: give a hub id or a folder, as in `lolcats linearize HuggingFaceTB/SmolLM2-135M-Instruct`,"
            " or a recipe that names one (`lolcats recipes`)"
        )
    if not config.data.sources:
        raise UserError("no data: give --data, for example --data yahma/alpaca-cleaned or --data records.jsonl")
    return config


def data_section(sources: list[str], **fields: Any) -> DataSection:
    """A validated data section from --data options and other fields; None leaves a field's default."""
    values = {name: value for name, value in fields.items() if value is not None}
    values["sources"] = [parse_source(text) for text in sources]
    return LinearizeConfig.from_dict({"data": values}).data


def parse_source(text: str) -> dict[str, Any]:
    """`PATH[,key=value]...` -> fields of a `DataSource`.

    >>> parse_source("books.jsonl,weight=2,text_column=body")
    {'path': 'books.jsonl', 'weight': '2', 'text_column': 'body'}
    """
    path, options = text, []
    while match := _SOURCE_OPTION.search(path):
        options.append((match[1], match[2]))
        path = path[: match.start()]
    if not path:
        raise UserError(f"--data {text!r}: expected PATH[,key=value]..., for example records.jsonl,weight=2")
    unknown = re.search(r",(\w+)=", path)
    if unknown and not Path(path).exists():
        known = ", ".join(_SOURCE_KEYS)
        raise UserError(f"--data {text!r}: {unknown[1]!r} is not an option of a data source; known: {known}")
    return {"path": path, **dict(reversed(options))}


def parse_layers(text: str) -> list[int]:
    """`"0-15,20"` -> [0, ..., 15, 20]; an empty text is no layer.

    Raises:
        UserError: not a list of layer numbers and ranges.
    """
    layers: set[int] = set()
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None or (match[2] and int(match[2]) < int(match[1])):
            raise UserError(f"--keep-softmax {text}: {part!r} is not a layer or a range; expected e.g. 0-15,20")
        layers.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return sorted(layers)


def _nested(field: str, value: Any) -> dict[str, Any]:
    for key in reversed(field.split(".")):
        value = {key: value}
    return value


def chosen(option: str, text: str | None, known: tuple[str, ...]) -> tuple[str, ...] | None:
    """The names that a comma-separated option lists; None if it is not given.

    Raises:
        UserError: a name that is not in `known`.
    """
    if text is None:
        return None
    names = tuple(name.strip() for name in text.split(","))
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UserError(f"--{option}: there is no {unknown[0]!r}; choose of {', '.join(known)}")
    return names
