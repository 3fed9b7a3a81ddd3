"""`lolcats linearize` up to the pipeline."""

from unittest.mock import Mock

import pytest
import yaml

from lolcats.config import LinearizeConfig
from lolcats.errors import Terminated, UserError


def test_options_reach_the_pipeline(cli, pipeline_calls, tmp_path):
    words = (
        *("linearize", "some/model", "--data", "a.jsonl,weight=3", "--data", "b.txt", "--linear-length-cap", "0"),
        *("--window-size", 16, "--exact", "0-2,5.1", "--exact", 7, "--set", "attention.feature_map=null"),
        *("--seed", 3, "--device", "cpu", "--dtype", "float32", "--no-transfer", "--set", "adjust.distill_factor=0.25"),
        *("--cache-bits", "null", "--max-tokens", 9000, "--set", "adjust.lr=0.5"),
    )
    result = cli(*words, "-o", tmp_path / "out", "--overwrite")
    assert result.exit_code == 0, result.output
    ((config, output, options),) = pipeline_calls
    assert output == tmp_path / "out"
    assert (options["resume"], options["overwrite"]) == (False, True)
    assert [(source.path, source.weight) for source in config.data.sources] == [("a.jsonl", 3), ("b.txt", 1)]
    attention = config.attention
    assert (attention.window_size, attention.feature_map, attention.cache_bits) == (16, None, None)
    assert attention.exact == ("0-2", "5.1", "7")
    assert (config.seed, config.data.max_train_tokens, config.adjust.lr) == (3, 9000, 0.5)
    assert (config.model.path, config.model.device, config.model.dtype) == ("some/model", "cpu", "float32")
    assert not config.transfer.enabled
    assert config.adjust.distill_factor == 0.25
    shown = cli(*words, "--dry-run")
    assert LinearizeConfig.from_dict(yaml.safe_load(shown.stdout)) == config
    assert len(pipeline_calls) == 1


@pytest.mark.parametrize(("options", "length"), [([], 2048), (["--sequence-length", 3000], 3000)])
def test_the_default_length_is_within_the_models_positions(cli, pipeline_calls, options, length):
    cli("linearize", "some/model", "--data", "a.jsonl", "-o", "out", *options)
    ((config, _, _),) = pipeline_calls
    lengths = [config.data_of(stage).sequence_length for stage in ("transfer", "adjust")]
    assert [*lengths, config.attention.linear_length_cap] == [length] * 3
    shown = cli("linearize", "some/model", "--data", "a.jsonl", *options, "--dry-run").stdout
    assert LinearizeConfig.from_dict(yaml.safe_load(shown)) == config


def test_resume_takes_the_runs_own_configuration(cli, pipeline_calls, tmp_path):
    saved = LinearizeConfig.from_dict({"model": {"path": "m"}, "data": {"sources": [{"path": "d"}]}, "seed": 8})
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(saved.to_yaml())
    result = cli("linearize", "-o", tmp_path, "--resume")
    assert result.exit_code == 0, result.output
    ((config, _, options),) = pipeline_calls
    assert config == saved
    assert options["resume"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["m", "--data", "d"], "no output folder"),
        (["m", "-o", "out", "--recipe", "lolcats"], "no data"),
        (["--data", "d", "-o", "out"], "no model"),
        (["--recipe", "lama", "-o", "out"], "no recipe named 'lama'; there are demo, gemma-3-270m,"),
        (["m", "--data", "d", "-o", "out", "--exact-window", "few"], "exact_window='few'"),
        (["m", "--data", "d", "-o", "out", "--set", "transfer.lr"], "expected section.key=value"),
        (["m", "--data", "d", "-o", "out", "--set", "transfer.rate=1"], "transfer.rate"),
        (["m", "--data", "d", "-o", "out", "--micro-batch-size", "3"], "not a multiple of micro_batch_size=3"),
        (["m", "--data", "d", "--dry-run", "--set", "data.sequence_length=256"], "data.sequence_length=256 in stage"),
        (["m", "--data", "d", "-o", "out", "--exact", "few"], "exact='few': expected a KV head"),
        (["--resume"], "--resume needs the folder"),
        (["-o", "nowhere", "--resume"], "nothing to resume"),
    ],
)
def test_mistakes_end_with_a_message(cli, pipeline_calls, arguments, message):
    result = cli("linearize", *arguments)
    assert result.exit_code == 1
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert pipeline_calls == []


def test_errors_of_the_pipeline_interruption_and_debug(cli, pipeline_calls, replace_module):
    full = UserError("the disk [is] full")
    raised = [KeyboardInterrupt(), Terminated("`x --resume` continues"), full, OSError(28, "No space"), full]
    replace_module("lolcats.pipeline", linearize=Mock(side_effect=raised))
    arguments = ["linearize", "m", "--data", "d", "-o", "out"]
    interrupted, terminated, failed, refused = (cli(*arguments) for _ in range(4))
    debugged = cli("--debug", *arguments)
    assert interrupted.exit_code == 130
    assert "--resume" not in interrupted.stderr  # the pipeline says whether there is anything to resume
    assert terminated.exit_code == 143
    assert "terminated `x --resume` continues" in terminated.stderr
    assert failed.exit_code == 1
    assert "error: the disk [is] full" in failed.stderr
    assert "error: [Errno 28] No space; mend that, and" in refused.stderr
    assert isinstance(debugged.exception, UserError)
