"""Help, recipes, generate and perplexity."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest

from lolcats.recipes import list_recipes


@pytest.fixture
def loaded(replace_module, monkeypatch):
    """Arguments of each `load_model`; models are their own paths."""
    calls = []

    def load_model(path, **options):
        calls.append((path, options))
        return path, SimpleNamespace(bos_token_id=None)

    replace_module("lolcats.evaluation.load", load_model=load_model)
    return calls


def test_help_tells_the_story_in_order(cli):
    text = cli("--help").stdout
    places = [text.index(f"{number}. lolcats {name}") for number, name in enumerate(("linearize", "generate"), 1)]
    assert places == sorted(places)
    assert "from_pretrained" in text


def test_help_imports_nothing_heavy():
    code = "import sys, lolcats.cli.app; print([m for m in ('torch', 'transformers', 'datasets') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_recipes_are_listed_and_shown(cli):
    listing = cli("recipes").stdout
    assert all(name in listing for name in list_recipes())
    shown = cli("recipes", "show", "demo").stdout
    assert shown.startswith(f"# {list_recipes()['demo']}")
    result = cli("recipes", "show", "nothing")
    assert result.exit_code == 1
    assert "no recipe named 'nothing'" in result.stderr


def test_generate(cli, loaded, replace_module, tmp_path):
    options_seen = {}

    def generate_text(model, tokenizer, prompts, params, **options):
        options_seen.update(options, model=model, temperature=params.temperature)
        return [prompt.upper() for prompt in prompts]

    replace_module("lolcats.generation.decoding", generate_text=generate_text)
    file = tmp_path / "prompts.txt"
    file.write_text("two\n\nthree\n")
    result = cli("generate", "out/", "-p", "one", "--prompts-file", file, "--json", "--chat", "--temperature", 0.5)
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["text"] for row in rows] == ["ONE", "TWO", "THREE"]
    assert (options_seen["chat"], options_seen["temperature"], options_seen["model"]) == (True, 0.5, "out/")
    plain = cli("generate", "out/", "-p", "one")
    assert "oneONE" in plain.stdout


def test_generate_needs_a_prompt(cli, loaded, tmp_path):
    result = cli("generate", "out/")
    assert (result.exit_code, loaded) == (1, [])
    assert "no prompt" in result.stderr
    assert "cannot read" in cli("generate", "out/", "--prompts-file", tmp_path / "absent").stderr


def test_perplexity_of_several_models(cli, loaded, replace_module):
    seen = []

    def perplexity(model, tokenizer, data, *, batch_size):
        seen.append(data)
        return {"perplexity": 7.5, "loss": 2.0, "tokens": 1234}

    replace_module("lolcats.evaluation.perplexity", perplexity=perplexity)
    arguments = (
        "perplexity",
        "out/",
        "base",
        "--data",
        "held.jsonl,max_rows=3",
        "--loss-on",
        "all",
        "--dtype",
        "float32",
    )
    table = cli(*arguments)
    assert table.exit_code == 0, table.output
    assert "7.500" in table.stdout
    assert "1,234" in table.stdout
    assert [path for path, _ in loaded] == ["out/", "base"]
    assert loaded[0][1]["dtype"] == "float32"
    assert (seen[0].sources[0].max_rows, seen[0].loss_on, seen[0].begin_token) == (3, "all", False)
    rows = json.loads(cli(*arguments, "--json").stdout)
    assert [(row["model"], row["tokens"]) for row in rows] == [("out/", 1234), ("base", 1234)]
    assert cli(*arguments, "--begin-token").exit_code == 0
    assert seen[-1].begin_token


def test_perplexity_checks_its_data_first(cli, loaded):
    result = cli("perplexity", "out/", "--data", "held.jsonl", "--loss-on", "some")
    assert (result.exit_code, loaded) == (1, [])
    assert "data.loss_on" in result.stderr


def test_warnings_of_lolcats_are_shown_once_and_those_of_libraries_are_not(cli, replace_module):
    """A missing fused kernel, or decoding without CUDA graphs, must be seen."""

    def load_model(path, **_):
        for _ in range(2):
            warnings.warn("decoding without CUDA graphs, slower", stacklevel=1)
            warnings.warn_explicit("advice", UserWarning, "x.py", 1, module="transformers.models")
            warnings.warn("old", DeprecationWarning, stacklevel=1)
        return None, None

    replace_module("lolcats.evaluation.load", load_model=load_model)
    shown = cli("perplexity", "out/", "--data", "demo").stderr
    assert shown.count("warning: decoding without CUDA graphs, slower") == 1
    assert "advice" not in shown
    assert "old" not in shown
