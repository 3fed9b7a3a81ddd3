"""Start, recipes, perplexity and report."""

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


def test_help_imports_nothing_heavy():
    code = "import sys, lolcats.cli.app; print([m for m in ('torch', 'transformers', 'datasets') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_recipes_are_listed_and_shown(cli):
    listing = cli("recipes").stdout
    assert all(name in listing for name in list_recipes())
    shown = cli("recipes", "show", "demo").stdout
    assert shown.startswith(
        f"# demo over smollm2-135m over smollm2-135m-paper over lolcats\n# {list_recipes()['demo']}"
    )
    result = cli("recipes", "show", "nothing")
    assert result.exit_code == 1
    assert "no recipe named 'nothing'" in result.stderr


def test_models_are_listed(cli):
    listing = cli("models").stdout
    assert all(name in listing for name in ("padded batch", "llama3.1", "gemma3_text"))


def test_perplexity_of_several_models(cli, loaded, replace_module, tmp_path):
    seen = []

    def dataset_perplexity(model, data, *, batch_size):
        seen.append(data)
        return {"perplexity": 7.5, "loss": 2.0, "tokens": 1234}

    replace_module("lolcats.data", build_evaluation_dataset=lambda data, tokenizer: data)
    replace_module("lolcats.evaluation.perplexity", dataset_perplexity=dataset_perplexity)
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
    refused = cli(*arguments, "--loss-on", "some")
    assert (refused.exit_code, loaded) == (1, [])  # before any model is loaded
    assert "data.loss_on" in refused.stderr
    table = cli(*arguments)
    assert table.exit_code == 0, table.output
    assert "7.500" in table.stdout
    assert "1,234" in table.stdout
    assert [path for path, _ in loaded] == ["out/", "base"]
    assert loaded[0][1]["dtype"] == "float32"
    assert (seen[0].sources[0].max_rows, seen[0].loss_on, seen[0].begin_token) == (3, "all", False)
    rows = json.loads(cli(*arguments, "--json").stdout)
    assert [(row["model"], row["tokens"]) for row in rows] == [("out/", 1234), ("base", 1234)]
    assert cli(arguments[0], tmp_path, *arguments[3:], "--begin-token", "-o", tmp_path / "found.json").exit_code == 0
    assert json.loads((tmp_path / "found.json").read_text())[0]["model"] == tmp_path.name
    assert seen[-1].begin_token


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


def test_report(cli, tmp_path):
    result = cli("report", tmp_path)
    assert result.exit_code == 1
    assert "has no lolcats_report.json" in result.stderr
    (tmp_path / "lolcats_report.json").write_text(
        json.dumps({"base_model": "a/b", "perplexity": {"teacher": 7.25}, "stages": {}})
    )
    assert cli("report", tmp_path).exit_code == 0
    assert "7.250" in (tmp_path / "report.html").read_text()
    assert cli("report", tmp_path, "-o", tmp_path / "sub" / "page.html").exit_code == 0
    assert (tmp_path / "sub" / "page.html").is_file()
