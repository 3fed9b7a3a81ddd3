"""`lolcats plan`."""

from __future__ import annotations

import json
import shlex

import pytest
import yaml
from typer.testing import CliRunner

from lolcats.cli.app import app
from lolcats.cli.plan import parse_tokens
from lolcats.config import LinearizeConfig
from lolcats.errors import UserError


def run(*arguments: str):
    return CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "200"})


def test_a_plan_for_a_folder(model_dir, tmp_path):
    result = run(str(model_dir), "--gpus", "2", "--gpu", "a100", "--tokens", "1M", "--json", str(tmp_path / "p.json"))
    assert result.exit_code == 0, result.output
    assert "Ways to train" in result.stdout
    assert "That a100 reaches the same share of its peak is an assumption" in " ".join(result.stdout.split())
    assert f"lolcats linearize {model_dir}" in result.stdout
    report = json.loads((tmp_path / "p.json").read_text())
    assert report["request"]["gpu"]["name"] == "a100"
    assert report["commands"][0] in result.stdout


def test_only_some_modes_and_kept_layers(model_dir):
    result = run(str(model_dir), "--mode", "joint", "--exact", "1")
    assert result.exit_code == 0, result.output
    assert "1 of them keep softmax" in result.stdout
    assert "lora" not in result.stdout.split("Recommended")[0]
    assert "--no-adjust" in result.stdout


def test_a_budget_of_exact_heads(model_dir, tmp_path):
    options = (
        "--exact",
        "25%",
        "--set",
        "gates.max_steps=7",
        "--contexts",
        "512,4k",
        "--json",
        str(tmp_path / "p.json"),
    )
    result = run(str(model_dir), *options)
    assert result.exit_code == 0, result.output
    assert "1 of 4 KV heads exact" in " ".join(result.stdout.split())
    assert "have no kernel" in result.stdout
    report = json.loads((tmp_path / "p.json").read_text())
    assert report["request"]["gates"] == {"max_steps": 7}
    assert [list(map(int, arm["cache_bytes"])) for arm in report["attention"]] == [[512, 4000]] * 3
    resolved = CliRunner().invoke(app, [*shlex.split(report["commands"][0])[1:], "--dry-run"])
    assert resolved.exit_code == 0, resolved.output
    config = LinearizeConfig.from_dict(yaml.safe_load(resolved.stdout))
    assert (config.attention.exact_budget, config.gates.max_steps) == ("25%", 7)


def test_stage_2s_options_are_planned_and_repeated_in_the_command(model_dir, tmp_path):
    options = ("--distill", "0.5", "--set", "adjust.lora_alpha=32", "--lora-rank", "4")
    files = [tmp_path / name for name in ("plain.json", "compared.json")]
    for file, extra in zip(files, ((), options), strict=True):
        result = run(str(model_dir), "--mode", "joint,lora", "--json", str(file), *extra)
        assert result.exit_code == 0, result.output
    plain, compared = (json.loads(file.read_text()) for file in files)
    assert compared["plans"][-1]["flops"] > plain["plans"][-1]["flops"]
    expected = {
        "lora_rank": 4,
        "train_feature_maps": True,  # of the recipe that linearize starts from, as is feature_lr
        "feature_lr": 1e-3,
        "distill_factor": 0.5,
        "lora_alpha": 32.0,
    }
    assert expected.items() <= compared["request"]["adjust"].items()
    words = shlex.split(compared["commands"][0])
    resolved = CliRunner().invoke(app, [*words[1:], "--dry-run"])
    assert resolved.exit_code == 0, resolved.output
    adjust = LinearizeConfig.from_dict(yaml.safe_load(resolved.stdout)).adjust
    assert (adjust.distill_factor, adjust.lora_alpha, adjust.train_feature_maps) == (0.5, 32.0, True)
    assert adjust.lora_rank == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("no/such/model/here",), "model folder not found"),
        (("tiny", "--gpu", "abacus"), "no GPU named 'abacus'"),
        (("tiny", "--mode", "magic"), "no 'magic'"),
        (("tiny", "--tokens", "many"), "expected a number such as 20M"),
        (
            ("tiny", "--share-state", "no"),
            "attention.share_state: Input should be 'kv_head' or 'query_head' (got 'no')",
        ),
        (("tiny", "--distill", "2"), "adjust.distill_factor: Input should be less than or equal to 1 (got 2.0)"),
        (("tiny", "--set", "adjust.method=full"), "of adjust not enabled"),
        (("tiny", "--set", "data.begin_token=true"), "takes fields of attention, gates, adjust"),
        (("tiny", "--block-layers", "3"), "2 layers to linearize"),
        (("tiny", "--json", "/proc/nothing/plan.json"), "cannot write /proc/nothing/plan.json"),
    ],
)
def test_mistakes(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 1
    assert message in " ".join(result.stderr.split())


def test_tokens():
    assert [parse_tokens(text) for text in ("20M", "1.5k", "20_000", "2b")] == [20 * 10**6, 1500, 20000, 2 * 10**9]
    with pytest.raises(UserError):
        parse_tokens("-1")
