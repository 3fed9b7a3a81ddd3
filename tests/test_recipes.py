"""Every recipe parses completely; bases, names and mistakes."""

import pytest

from lolcats.config import LinearizeConfig
from lolcats.errors import UserError
from lolcats.recipes import list_recipes, load_recipe, show_recipe

ALL = list(list_recipes())

FOR_ANY_MODEL = ("lolcats", "lolcats-hybrid", "lolcats-linear", "lolcats-plus")


# Rows that all tables of the paper share, and its main table's; other recipes say what they change.
PAPER = {
    "attention": {"window": "terraced", "window_size": 64, "feature_map": "hedgehog", "share_state": "query_head"},
    "data": {"sequence_length": 1024},
    "transfer": {"lr": 1e-2, "batch_size": 8, "epochs": 2, "mse_factor": 1000, "xent_factor": 0},
    "adjust": {"lr": 1e-4, "batch_size": 8, "epochs": 2, "lora_rank": 8, "lora_alpha": 16, "lora_dropout": 0.0},
}
SHARED = {"enabled": True, "clip_norm": 1.0, "schedule": "plateau"}
PAPER |= {stage: PAPER[stage] | SHARED for stage in ("transfer", "adjust")}


def test_the_base_of_all_recipes_has_the_papers_values():
    values = LinearizeConfig.from_dict(load_recipe("lolcats")).model_dump()
    for section, expected in PAPER.items():
        assert {name: values[section][name] for name in expected} == expected
    assert values["adjust"]["lora_targets"] == ["q", "k", "v", "o"]
    assert not values["adjust"]["train_feature_maps"]


@pytest.mark.parametrize("name", ALL)
def test_a_recipe_is_complete_and_valid(name):
    config = LinearizeConfig.from_dict(load_recipe(name))
    assert config.recipe == name
    named = bool(config.data.sources) and config.data.sources[0].path != "self"
    assert bool(config.model.path) == named == (name not in FOR_ANY_MODEL)


@pytest.mark.parametrize("name", ALL)
def test_a_shown_recipe_is_a_complete_file_and_says_what_it_is_made_from(name, tmp_path):
    shown = tmp_path / "shown.yaml"
    shown.write_text(show_recipe(name))
    first, described = shown.read_text().splitlines()[:2]
    assert first.split(" over ")[0] == f"# {name}"
    assert described == f"# {list_recipes()[name]}"
    assert {"recipe": name, **load_recipe(shown)} == load_recipe(name)
    assert "\nbase:" not in shown.read_text()


def test_a_file_of_the_users_has_a_base_by_name_or_relative_to_itself(tmp_path):
    (tmp_path / "mine.yaml").write_text("base: llama-3-8b\ntransfer: {lr: 0.5}\nadjust: {lora_targets: [q]}\n")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "other.yaml").write_text("base: ../mine.yaml\ntransfer: {epochs: 7}\n")
    values, base = load_recipe(tmp_path / "inner" / "other.yaml"), load_recipe("llama-3-8b")
    assert values["transfer"] == base["transfer"] | {"lr": 0.5, "epochs": 7}  # mappings merge
    assert values["adjust"]["lora_targets"] == ["q"]  # lists replace
    assert values["data"] == base["data"]
    assert "recipe" not in values


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base: llama-9", f"mine.yaml: base: no recipe named 'llama-9'; there are {', '.join(ALL)}"),
        ("base: absent.yaml", r"cannot read .*absent\.yaml"),
        ("base: other.yaml", r"its own base: .*mine\.yaml -> .*other\.yaml -> .*mine\.yaml"),
        ("a: [1", r"mine\.yaml is not valid YAML"),
        ("transfer: {learning_rate: 1}", r"transfer\.learning_rate"),
    ],
)
def test_mistakes_in_files(tmp_path, text, message):
    (tmp_path / "other.yaml").write_text("base: mine.yaml\n")
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(UserError, match=message):
        LinearizeConfig.from_dict(load_recipe(tmp_path / "mine.yaml"))
