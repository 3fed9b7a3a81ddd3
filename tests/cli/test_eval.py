"""`lolcats eval`."""

import json

import pytest

from lolcats.errors import UserError

REPORT = {
    "teacher": "base",
    "models": [
        {"model": name, "tasks": {"piqa": {"value": value, "stderr": 0.01, "metric": "acc"}}, "averages": {}}
        for name, value in (("base", 0.5), ("out/", 0.25))
    ],
    "settings": {"limit": None},
    "provenance": {"versions": {"torch": "2"}, "time": "now", "device": "cpu", "commit": None},
}


@pytest.fixture
def calls(replace_module, monkeypatch):
    """What `evaluate_models` was asked for; nothing is measured."""
    from lolcats.evaluation import suite

    seen = []

    def evaluate_models(models, load, options, *, note, keep):
        seen.append((models, options))
        note(f"{models[0]}: [tasks]")
        return REPORT

    monkeypatch.setattr(suite, "evaluate_models", evaluate_models)
    monkeypatch.setattr(suite, "check", lambda options: None)
    return seen


def test_models_are_compared_with_the_teacher_and_the_report_is_kept(cli, calls, tmp_path):
    result = cli("eval", "base", "out/")
    assert result.exit_code == 0, result.output
    assert calls[0][1].tasks == ("piqa", "arc_easy", "arc_challenge", "hellaswag", "winogrande", "mmlu")
    assert all(shown in result.stdout for shown in ("50.00", "-25.00", "% of the Transformer"))
    file = tmp_path / "report.json"
    words = "out/ base --teacher base --tasks passkey,recall --lengths 512,64 --limit 5 --run-code --data x.jsonl"
    result = cli("eval", *words.split(), "--no-apply-chat-template", "-o", file, "--json")
    assert result.exit_code == 0, result.output
    models, options = calls[1]
    assert models == ["base", "out/"]  # the teacher first, and once
    assert (options.tasks, options.lengths, options.limit) == (("passkey", "recall"), (512, 64), 5)
    assert (options.apply_chat_template, options.run_code) == (False, True)
    assert options.data.sources[0].path == "x.jsonl"
    assert json.loads(result.stdout) == json.loads(file.read_text()) == REPORT


def test_what_was_measured_before_an_error_is_shown(cli, calls, monkeypatch, tmp_path):
    from lolcats.evaluation import suite

    def fails(*_, keep, **__):
        keep(REPORT | {"unfinished": True})
        raise UserError("ruler_vt does not fit")

    monkeypatch.setattr(suite, "evaluate_models", fails)
    result = cli("eval", "base", "out/", "-o", tmp_path / "report.json")
    assert result.exit_code == 1
    assert "ruler_vt does not fit" in result.stderr
    assert "-25.00" in result.stdout
    assert json.loads((tmp_path / "report.json").read_text())["unfinished"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--lengths", "2k"), "expected numbers separated by commas"),
        (("--tasks", ","), "expected names"),
        (("-o", "/no/such/place/report.json"), "there is no folder"),
        (("-o", "/"), "it is a folder"),
    ],
)
def test_mistakes(cli, calls, arguments, message):
    result = cli("eval", "out/", *arguments)
    assert result.exit_code == 1
    assert message in result.stderr
    assert calls == []
