"""Every recipe parses completely, and holds the values of the table it names."""

from __future__ import annotations

import pytest

from lolcats.config import LinearizeConfig
from lolcats.errors import UserError
from lolcats.recipes import DEFAULT, list_recipes, load_recipe, show_recipe

ALL = list(list_recipes())

ALPACA = {"data.sources.0.path": "yahma/alpaca-cleaned", "data.loss_on": "answer", "data.max_train_tokens": None}
REDPAJAMA = {
    "data.sources.0.path": "togethercomputer/RedPajama-Data-1T-Sample",
    "data.loss_on": "all",
    "data.max_train_tokens": 20_000_000,
}
# Rows that all three tables of the paper share.
SHARED = {
    "data.sequence_length": 1024,
    "adjust.enabled": True,
    "adjust.lr": 1e-4,
    "adjust.batch_size": 8,
    "adjust.clip_norm": 1.0,
    "adjust.schedule": "plateau",
    "adjust.lora_targets": ["q", "k", "v", "o"],
    "attention.window": "terraced",
    "attention.feature_map": "hedgehog",
}
STAGE_1 = {
    "transfer.enabled": True,
    "transfer.lr": 1e-2,
    "transfer.batch_size": 8,
    "transfer.clip_norm": 1.0,
    "transfer.schedule": "plateau",
    "adjust.train_feature_maps": False,
}
NO_STAGE_1 = {"transfer.enabled": False, "adjust.train_feature_maps": True}
RANK_8 = {"adjust.lora_rank": 8, "adjust.lora_alpha": 16, "adjust.lora_dropout": 0.0}
RANK_4 = {"adjust.lora_rank": 4, "adjust.lora_alpha": 8, "adjust.lora_dropout": 0.5}
MSE = {"transfer.mse_factor": 1000, "transfer.xent_factor": 0}
WIDE = {"attention.window_size": 64, "attention.feature_dim": 64}
NARROW = {"attention.window_size": 64, "attention.feature_dim": 32}
BF16, FP16 = {"model.dtype": "bfloat16"}, {"model.dtype": "float16"}
TWO = {"transfer.epochs": 2, "adjust.epochs": 2}
ONE = {"transfer.epochs": 1, "adjust.epochs": 1}
MAIN = SHARED | STAGE_1 | RANK_8 | MSE | TWO | BF16
SMOL = MAIN | NARROW | {"data.sources.0.path": "tatsu-lab/alpaca", "data.validation_rows": 200}
PLUS = (
    {key: value for key, value in MAIN.items() if key != "model.dtype"}
    | {"attention.window_size": 64, "attention.sinks": 1, "attention.window_gamma": 0.1}
    | {"attention.linear_length_cap": 1024}
    | {"adjust.train_feature_maps": True, "adjust.feature_lr": 1e-3}
    | {"data.position_offset": "auto", "data.position_jumps": "auto", "data.position_share": 0.25}
)

FOR_ANY_MODEL = ("lolcats", "lolcats-hybrid", "lolcats-linear", "lolcats-plus")
EXPECTED = {
    "lolcats": {key: value for key, value in MAIN.items() if key != "model.dtype"} | {"attention.feature_dim": None},
    "llama-3-8b": MAIN | WIDE | ALPACA | {"transfer.block_layers": None},
    "llama-3.1-8b": MAIN | WIDE | ALPACA | {"model.path": "meta-llama/Llama-3.1-8B"},
    "mistral-7b-v0.1": MAIN | WIDE | ALPACA | {"attention.sliding_layers": "linearize"},
    "llama-3-8b-hedgehog": MAIN
    | ALPACA
    | {"attention.window_size": 0, "transfer.mse_factor": 0, "transfer.xent_factor": 1},
    "llama-3-8b-t2r": MAIN | ALPACA | {"attention.window_size": 0, "attention.feature_map": "t2r"},
    "llama-3-8b-no-transfer": SHARED | RANK_8 | WIDE | ALPACA | BF16 | NO_STAGE_1 | {"adjust.epochs": 4},
    "llama-3-8b-hybrid": WIDE | ALPACA | {"attention.exact": ["0-15"], "adjust.enabled": False},
    "llama-3.1-70b": MAIN | WIDE | REDPAJAMA | ONE | {"transfer.block_layers": None},
    "llama-3.1-70b-no-transfer": SHARED | RANK_8 | WIDE | REDPAJAMA | BF16 | NO_STAGE_1 | {"adjust.epochs": 1},
    "llama-3.1-405b": MAIN
    | WIDE
    | REDPAJAMA
    | ONE
    | RANK_4
    | FP16
    | {"transfer.mse_factor": 1000, "transfer.xent_factor": 1, "transfer.block_layers": 9},
    "llama-3.1-405b-no-transfer": SHARED | RANK_4 | WIDE | REDPAJAMA | FP16 | NO_STAGE_1 | {"adjust.epochs": 1},
    "llama-3.2-1b": MAIN | NARROW | ALPACA,
    "phi-1.5": MAIN | NARROW | ALPACA | {"model.path": "microsoft/phi-1_5"},
    "gemma-3-270m": SMOL
    | {"attention.feature_dim": 128, "attention.sliding_layers": "linearize", "data.begin_token": True},
    "lolcats-linear": PLUS,
    "lolcats-hybrid": PLUS
    | {"attention.exact": ["12%"], "attention.window_size": 256, "gates.max_steps": 300}
    | ONE
    | {"data.sequence_length": 4096, "attention.linear_length_cap": 4096, "transfer.batch_size": 2}
    | {"transfer.data.sequence_length": 4096, "adjust.data.sequence_length": 4096, "adjust.distill_factor": 1.0}
    | {"adjust.lr": 5e-4, "adjust.batch_size": 2, "adjust.schedule": "cosine", "adjust.data.position_offset": "auto"},
    "lolcats-plus": {"attention.exact": ["12%"], "attention.exact_window": "16MiB", "attention.exact_bits": 8},
    "smollm2-135m": SMOL | {"attention.share_state": "kv_head"},
    "smollm2-135m-paper": SMOL | {"attention.share_state": "query_head"},
    "smollm2-135m-softmax-control": {"adjust.softmax_control": True, "transfer.enabled": False},
    "smollm2-135m-t2r": SMOL
    | {"attention.window_size": 0, "attention.feature_map": "t2r", "attention.feature_dim": 64},
    "smollm2-135m-hedgehog": SMOL | {"attention.window_size": 0, "transfer.mse_factor": 0, "transfer.xent_factor": 1},
    "smollm2-135m-no-transfer": {key: value for key, value in SMOL.items() if not key.startswith("transfer.")}
    | NO_STAGE_1
    | {"adjust.epochs": 4},
    "smollm2-135m-window-only": {"attention.feature_map": None, "attention.window_size": 64, "transfer.enabled": False},
    "demo": {"model.device": "cpu", "data.sources.0.path": "demo"},
}


def value_at(config: LinearizeConfig, field: str):
    value = config
    for key in field.split("."):
        value = value[int(key)] if key.isdigit() else getattr(value, key)
    return value


def test_every_recipe_has_expected_values():
    assert set(EXPECTED) == set(ALL)


@pytest.mark.parametrize("name", ALL)
def test_recipe_says_what_it_is_and_holds_the_papers_values(name):
    config = LinearizeConfig.from_dict(load_recipe(name))
    assert config.recipe == name
    named = bool(config.data.sources) and config.data.sources[0].path != "self"
    assert bool(config.model.path) == named == (name not in FOR_ANY_MODEL)
    values = {field: value_at(config, field) for field in EXPECTED[name]}
    assert {field: list(v) if isinstance(v, tuple) else v for field, v in values.items()} == EXPECTED[name]


@pytest.mark.parametrize("name", ALL)
def test_a_shown_recipe_is_a_complete_file_and_says_what_it_is_made_from(name, tmp_path):
    shown = tmp_path / "shown.yaml"
    shown.write_text(show_recipe(name))
    first, described = shown.read_text().splitlines()[:2]
    assert first.split(" over ")[0] == f"# {name}"
    assert described == f"# {list_recipes()[name]}"
    assert {"recipe": name, **load_recipe(shown)} == load_recipe(name)
    assert "\nbase:" not in shown.read_text()


def test_show_names_every_base():
    assert show_recipe("phi-1.5").startswith("# phi-1.5 over llama-3.2-1b over llama-3-8b over lolcats\n")


def test_a_file_of_the_users_has_a_base_by_name_or_relative_to_itself(tmp_path):
    (tmp_path / "mine.yaml").write_text("base: llama-3-8b\ntransfer: {lr: 0.5}\nadjust: {lora_targets: [q]}\n")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "other.yaml").write_text("base: ../mine.yaml\ntransfer: {epochs: 7}\n")
    values, base = load_recipe(tmp_path / "inner" / "other.yaml"), load_recipe("llama-3-8b")
    assert values["transfer"] == base["transfer"] | {"lr": 0.5, "epochs": 7}  # mappings merge
    assert values["adjust"]["lora_targets"] == ["q"]  # lists replace
    assert values["data"] == base["data"]
    assert "recipe" not in values


def test_unknown_bases_and_cycles_are_errors(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("base: llama-9\n")
    with pytest.raises(UserError, match=r"mine\.yaml: base: no recipe named 'llama-9'; there are demo"):
        load_recipe(file)
    file.write_text("base: absent.yaml\n")
    with pytest.raises(UserError, match=r"cannot read .*absent\.yaml"):
        load_recipe(file)
    file.write_text("base: other.yaml\n")
    (tmp_path / "other.yaml").write_text("base: mine.yaml\n")
    with pytest.raises(UserError, match=r"its own base: .*mine\.yaml -> .*other\.yaml -> .*mine\.yaml"):
        load_recipe(file)


def test_missing_and_broken_files(tmp_path):
    with pytest.raises(UserError, match=f"there are {', '.join(ALL)}"):
        load_recipe("llama-9")
    with pytest.raises(UserError, match=r"absent\.yaml"):
        load_recipe(tmp_path / "absent.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [1\n")
    with pytest.raises(UserError, match=r"broken\.yaml is not valid YAML"):
        load_recipe(broken)
    misspelt = tmp_path / "misspelt.yaml"
    misspelt.write_text("transfer: {learning_rate: 1}\n")
    with pytest.raises(UserError, match=r"transfer\.learning_rate"):
        LinearizeConfig.from_dict(load_recipe(misspelt))


def test_the_default_is_lolcats_linear_but_for_exact_heads_window_data_and_loss():
    linear, default = load_recipe("lolcats-linear"), load_recipe(DEFAULT)
    assert LinearizeConfig.from_dict({"gates": default.pop("gates")}).gates == LinearizeConfig().gates
    assert (default["attention"].pop("exact"), default["attention"].pop("window_size")) == ("12%", 256)
    assert default["data"].pop("sequence_length") > linear["data"].pop("sequence_length")
    assert default["transfer"]["data"]["sources"] == default["adjust"]["data"]["sources"]
    data, optimiser = {"data", "epochs", "batch_size", "micro_batch_size"}, {"lr", "schedule", "min_lr"}
    for stage, different in (("transfer", data), ("adjust", data | optimiser | {"distill_factor"})):
        assert {key for key, value in default[stage].items() if value != linear[stage].get(key)} <= different
        default[stage] = linear[stage]
    default["attention"]["window_size"] = linear["attention"]["window_size"]
    assert default | {"recipe": "lolcats-linear"} == linear
