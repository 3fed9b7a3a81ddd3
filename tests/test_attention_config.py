"""AttentionConfig: what it refuses; every setting reaches saved models and their layers."""

import dataclasses
from typing import get_args, get_type_hints

import pytest
from transformers import AutoModelForCausalLM

from lolcats.config import LinearizeConfig
from lolcats.config.attention import AttentionConfig
from lolcats.conversion import convert
from lolcats.errors import UserError

FIELDS = {item.name: item for item in dataclasses.fields(AttentionConfig)}
# What else a setting's other value needs.
COMPANIONS = {"exact_window": {"window_size": 2}}


def another_value(name: str):
    """A value of a setting that is not its default, from its definition alone."""
    if name == "cache_bits":
        return 8
    hint, default = get_type_hints(AttentionConfig)[name], FIELDS[name].default
    if isinstance(default, bool):
        return not default
    if isinstance(default, int):
        return default + 3
    if isinstance(default, float):
        return default / 2
    if isinstance(default, tuple):
        return ("0", "1.1")
    choices = [choice for part in get_args(hint) for choice in (get_args(part) or (part,))]
    return 3 if int in choices else next(choice for choice in choices if choice != default)


@pytest.mark.parametrize("name", FIELDS)
def test_a_setting_goes_from_the_recipe_into_the_saved_model_and_to_its_layers(name, model_dir, tmp_path):
    """Through nothing that names it: a new setting needs its definition and its implementations alone."""
    value = another_value(name)
    as_written = list(value) if isinstance(value, tuple) else value
    section = COMPANIONS.get(name, {}) | {name: as_written}
    config = LinearizeConfig.from_dict({"attention": section})
    assert getattr(config.attention, name) == value
    assert config.model_dump(mode="json", exclude_defaults=True)["attention"] == section
    assert LinearizeConfig.from_dict(config.model_dump(mode="json")) == config

    convert(AutoModelForCausalLM.from_pretrained(model_dir), config.attention).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for module in [loaded, *(module for _, module in loaded.linear_layers())]:
        reached = module.config.attention if module is loaded else module.config
        assert getattr(reached, name) == value
        # "auto" is resolved by conversion: this model has no layers with a native window
        assert dataclasses.replace(reached, sliding_layers=config.attention.sliding_layers) == config.attention


def test_settings_can_be_overridden_on_loading(model_dir, tmp_path):
    convert(AutoModelForCausalLM.from_pretrained(model_dir), AttentionConfig(sinks=2)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="layer_heads say which"):
        AutoModelForCausalLM.from_pretrained(tmp_path, attention={"exact": ["0"]})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attention={"linear_length_cap": 4})
    assert (loaded.config.attention.linear_length_cap, loaded.config.attention.sinks) == (4, 2)
    assert {module.config for _, module in loaded.linear_layers()} == {loaded.config.attention}
    loaded.config.attention = {"linear_length_cap": 9}  # as vLLM's `--hf-overrides` assigns it
    assert (loaded.config.attention.linear_length_cap, loaded.config.attention.sinks) == (9, 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window": "terrace"}, "window='terrace': expected 'terraced' or 'sliding'"),
        ({"window_size": -1}, "window_size=-1: expected at least 0"),
        ({"window_size": "64"}, "window_size='64': expected int"),
        ({"window_blocks": 0}, "window_blocks=0: expected at least 1"),
        ({"sinks": True}, "sinks=True: expected int"),
        ({"window_gamma": 1}, "window_gamma=1.0: expected less than 1"),
        ({"window_gamma": 0}, "window_gamma=0.0: expected more than 0"),
        ({"feature_map": "relu"}, "feature_map='relu': expected 'hedgehog' or .* or None"),
        ({"exact": [1.5]}, "exact=1.5: expected int or str"),
        ({"exact": ["1.x"]}, r"exact='1.x': expected a KV head \(7.2\), a layer \(7\) or several \(0-7\)"),
        ({"window_size": 0, "feature_map": None}, "window_size=0 without a feature_map leaves nothing"),
        ({"window_size": 0, "feature_map": None, "sinks": 2}, "window_size=0 without a feature_map"),
        ({"linear_length_cap": 9, "feature_map": None}, "linear_length_cap .* needs both.*feature_map=None"),
        ({"linear_length_cap": 9, "window_size": 0}, "linear_length_cap .* needs both.*window_size=0 and sinks=0"),
    ],
)
def test_bad_settings_say_what_was_expected(settings, message):
    with pytest.raises(ValueError, match=message):
        AttentionConfig(**settings)
    if settings not in ({"window_size": "64"}, {"sinks": True}, {"exact": [1.5]}):  # YAML's own
        with pytest.raises(UserError, match="attention"):
            LinearizeConfig.from_dict({"attention": settings})


def test_a_number_of_a_command_line():
    """Where a setting takes text, too, digits are a number; elsewhere text is none."""
    assert AttentionConfig(exact_window="96").exact_tokens == 96
    assert AttentionConfig(exact_window="16MiB").exact_tokens is None
    with pytest.raises(ValueError, match="cache_bits=4: expected 8"):
        AttentionConfig(cache_bits=4)
