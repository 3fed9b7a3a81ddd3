"""From options to configuration."""

import pytest
from typer.testing import CliRunner

from lolcats.cli.app import app
from lolcats.cli.options import CONFIG_OPTIONS, MODEL_OPTIONS, data_section, parse_source, resolve
from lolcats.errors import UserError

SHARED = dict.fromkeys(("generate", "chat", "serve", "eval"), MODEL_OPTIONS)


@pytest.mark.parametrize(("command", "options"), [("linearize", CONFIG_OPTIONS), *SHARED.items()])
def test_commands_have_the_options_of_the_configuration(command, options):
    text = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).stdout
    assert all(f"--{name.replace('_', '-')}" in text for name in options)
    assert {"device", "dtype", "linear_length_cap"} <= set(MODEL_OPTIONS)


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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a.jsonl,wieght=2", "'wieght' is not an option"),
        (",weight=2", "expected PATH"),
        ("a.jsonl,weight=much", r"sources\.0\.weight"),
    ],
)
def test_wrong_sources(text, message):
    with pytest.raises(UserError, match=message):
        data_section([text], {})


def test_later_settings_win():
    """Recipe, then options, then --set."""
    given = {"window_size": 32, "sinks": 2}
    config = resolve(given, recipe="smollm2-135m", overrides=["attention.sinks=4", "seed=9"])
    assert config.recipe == "smollm2-135m"
    assert (config.attention.window_size, config.attention.sinks, config.seed) == (32, 4, 9)
    assert config.model.dtype == "bfloat16"  # the recipe's
    config = resolve({"model.path": "m", "data.sources": [{"path": "d"}]})
    assert (config.recipe, config.attention.sinks, config.attention.exact) == ("lolcats-hybrid", 1, ("25%",))


def given(options: dict, recipe: str | None = None, overrides: tuple[str, ...] = ()):
    return resolve(dict(options), model="m", data=["d"], recipe=recipe, overrides=overrides)


def test_the_users_data_may_be_the_demo_text():
    config = resolve({}, model="m", data=["demo"])
    for stage in ("transfer", "adjust"):
        section = config.data_of(stage)
        assert [(source.path, section.held_out(source)) for source in section.sources] == [
            ("demo", 200),
            ("demo", 200),  # not the 20 of the recipe's mixture: the result is measured on 200
            ("retrieval", 200),
        ]


def test_epochs_replace_a_recipes_max_steps():
    config = given({"epochs": 3.0}, "demo")
    assert [(stage.epochs, stage.max_steps) for stage in (config.transfer, config.adjust)] == [(3, None)] * 2
    config = given({}, "demo", ("transfer.epochs=2",))
    assert (config.transfer.max_steps, config.adjust.max_steps) == (None, 18)
    with pytest.raises(UserError, match=r"transfer\.epochs and transfer\.max_steps both say"):
        given({"epochs": 3.0, "max_steps": 5})


def test_options_for_both_stages_reach_a_stages_own_data_and_the_gates():
    config = given({"sequence_length": 640, "max_steps": 7, "batch_size": 2, "micro_batch_size": 2})
    assert [config.data_of(stage).sequence_length for stage in ("transfer", "adjust")] == [640, 640]
    assert config.gates.sequence_length == 640
    assert (config.transfer.max_steps, config.gates.max_steps, config.adjust.max_steps) == (7, 7, 7)
    assert (config.transfer.micro_batch_size, config.gates.micro_batch_size) == (2, 1)
    config = given({"sequence_length": 4096, "max_steps": 700, "batch_size": 4, "micro_batch_size": 4})
    assert (config.gates.sequence_length, config.gates.max_steps, config.gates.micro_batch_size) == (4096, 300, 1)
    assert given({"sequence_length": 128}, "lolcats-linear").gates.sequence_length == 512  # no less holds a table
    assert given({"max_steps": 7}, overrides=("gates.max_steps=9",)).gates.max_steps == 9  # --set wins
