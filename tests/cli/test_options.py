"""From options to configuration."""

from __future__ import annotations

import pytest
import yaml
from typer.testing import CliRunner

from lolcats.cli.app import app
from lolcats.cli.options import ATTENTION_OPTIONS, MODEL_OPTIONS, data_section, parse_source, resolve
from lolcats.config import LinearizeConfig
from lolcats.errors import UserError


def test_options_take_what_the_fields_take(tmp_path):
    words = ["linearize", "m", "--data", "d", "--dry-run", "--window-gamma", "0.25", "--feature-map", "none"]
    words += ["--linear-length-cap", "0", "--no-adjust", "--keep-adapter", "--exact", "0-2,5.1"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    config = LinearizeConfig.from_dict(yaml.safe_load(result.stdout))
    assert (config.attention.window_gamma, config.attention.feature_map) == (0.25, None)
    assert config.attention.exact == ("0-2", "5.1")
    assert (config.adjust.enabled, config.output.merge_lora) == (False, False)
    capped = CliRunner().invoke(app, ["linearize", "m", "--data", "d", "--dry-run", "--linear-length-cap", "auto"])
    assert yaml.safe_load(capped.stdout)["attention"]["linear_length_cap"] == 1024


SHARED = dict.fromkeys(("generate", "chat", "serve", "eval", "perplexity"), MODEL_OPTIONS)


@pytest.mark.parametrize(("command", "options"), [("linearize", ATTENTION_OPTIONS), *SHARED.items()])
def test_commands_have_the_options_of_the_configuration(command, options):
    text = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).stdout
    assert all(f"--{name.replace('_', '-')} " in text for name in options)
    assert {"device", "dtype", "gguf_file", "trust_remote_code", "linear_length_cap"} <= set(MODEL_OPTIONS)


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
        data_section(["a.jsonl,weight=much"], {})


def test_later_settings_win():
    """Recipe, then options, then --set."""
    given = {"window_size": 32, "sinks": 2}
    config = resolve(given, recipe="smollm2-135m", overrides=["attention.sinks=4", "seed=9"])
    assert config.recipe == "smollm2-135m"
    assert (config.attention.window_size, config.attention.sinks, config.seed) == (32, 4, 9)
    assert config.attention.feature_dim == 32  # the recipe's


def test_without_a_recipe_there_is_the_default_one(tmp_path):
    config = resolve({"model.path": "m", "data.sources": [{"path": "d"}]})
    assert (config.recipe, config.attention.sinks, config.attention.exact) == ("lolcats-hybrid", 1, ("12%",))
    saved = tmp_path / "config.yaml"
    saved.write_text("model: {path: m}\ndata: {sources: [{path: d}]}\n")
    assert resolve({}, saved=saved).attention.sinks == 0  # a run that is resumed has its own
