"""analyse and report: what reaches the functions behind them, and what is printed."""

from __future__ import annotations

import json


def test_analyse(cli, replace_module, monkeypatch, tmp_path):
    seen = {}

    def analyse(folder, data, *, report, **options):
        seen.update(options, folder=folder, data=data)
        return {
            "notes": ["something is missing"],
            "stages": ["swapped", "transfer"],
            "layers": [3, 7],
            "mse": {"swapped": [0.5, 0.25], "transfer": [0.125, 0.0625]},
            "linear_share": {"share": {"swapped": [0.1, 0.2], "transfer": [0.25, 0.75]}},
        }

    replace_module("lolcats.analysis.analyse", analyse=analyse)
    arguments = ["--data", "demo,max_rows=3", "--max-sequences", 5, "--batch-size", 2]
    result = cli("analyse", tmp_path, *arguments)
    assert result.exit_code == 0, result.output
    assert (seen["folder"], seen["batch_size"]) == (tmp_path, 2)
    assert (seen["data"].sources[0].max_rows, seen["data"].validation_sequences) == (3, 5)
    for wanted in ("0.0625", "75.0%"):
        assert wanted in result.stdout
    assert "something is missing" in result.stderr


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
