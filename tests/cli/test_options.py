"""From options to configuration."""

from __future__ import annotations

import pytest

from lolcats.cli.options import FIELDS, data_section, parse_layers, parse_source, resolve
from lolcats.config import LinearizeConfig, Section
from lolcats.errors import UserError


def test_every_option_sets_a_field_that_exists():
    for fields in FIELDS.values():
        for field in fields:
            section = LinearizeConfig()
            *path, last = field.split(".")
            for key in path:
                section = getattr(section, key)
            assert isinstance(section, Section)
            assert last in type(section).model_fields, field


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("yahma/alpaca-cleaned", {"path": "yahma/alpaca-cleaned"}),
        ("a.jsonl,weight=2.5", {"path": "a.jsonl", "weight": "2.5"}),
        ("a,b.jsonl,max_rows=3,split=test", {"path": "a,b.jsonl", "max_rows": "3", "split": "test"}),
        ("dir/x=1.txt", {"path": "dir/x=1.txt"}),
    ],
)
def test_parse_source(text, expected):
    assert parse_source(text) == expected


def test_parse_source_errors():
    with pytest.raises(UserError, match="'wieght' is not an option"):
        parse_source("a.jsonl,wieght=2")
    with pytest.raises(UserError, match="expected PATH"):
        parse_source(",weight=2")
    with pytest.raises(UserError, match=r"sources\.0\.weight"):
        data_section(["a.jsonl,weight=much"])


@pytest.mark.parametrize(
    ("text", "layers"),
    [("", []), ("3", [3]), ("0-3", [0, 1, 2, 3]), ("0-2, 20,1", [0, 1, 2, 20])],
)
def test_parse_layers(text, layers):
    assert parse_layers(text) == layers


@pytest.mark.parametrize("text", ["3-1", "all", "-1", "1-", "1.5"])
def test_parse_layers_errors(text):
    with pytest.raises(UserError, match="not a layer or a range"):
        parse_layers(text)


def test_later_settings_win():
    """Recipe, then options, then --set."""
    given = {"window_size": 32, "sinks": 2, "seed": None}
    config = resolve(given, recipe="smollm2-135m", overrides=["attention.sinks=4", "seed=9"])
    assert config.recipe == "smollm2-135m"
    assert (config.attention.window_size, config.attention.sinks, config.seed) == (32, 4, 9)
    assert config.attention.feature_dim == 32  # the recipe's


def test_without_a_recipe_there_is_the_default_one(tmp_path):
    config = resolve({"model": "m", "data": [{"path": "d"}]})
    assert (config.recipe, config.attention.sinks, config.attention.window_gamma) == ("lolcats-plus", 1, 0.1)
    saved = tmp_path / "config.yaml"
    saved.write_text("model: {path: m}\ndata: {sources: [{path: d}]}\n")
    assert resolve({}, saved=saved).attention.sinks == 0  # a run that is resumed has its own


def test_data_replaces_the_recipes_data():
    config = resolve({"data": [{"path": "mine.jsonl"}]}, recipe="smollm2-135m")
    assert [source.path for source in config.data.sources] == ["mine.jsonl"]


def test_both_stages_share_an_option():
    config = resolve({"model": "m", "data": [{"path": "d"}], "epochs": 0.5, "micro_batch_size": 2})
    assert config.transfer.epochs == config.adjust.epochs == 0.5
    assert config.transfer.micro_batch_size == config.adjust.micro_batch_size == 2


def test_model_and_data_are_needed():
    with pytest.raises(UserError, match="no model"):
        resolve({"data": [{"path": "d"}]})
    with pytest.raises(UserError, match="no data"):
        resolve({"model": "m"})
