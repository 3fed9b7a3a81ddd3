"""Independent jobs over written hidden states equal joint training."""

import shutil

import pytest
from rich.console import Console
from typer.testing import CliRunner

from lolcats.cli.app import app
from lolcats.config import LinearizeConfig, merge, read_yaml
from lolcats.errors import UserError
from lolcats.parallel.blockwise import jobs
from lolcats.pipeline import linearize

QUIET = Console(quiet=True)
MOVED = {"data": {"position_offset": "auto", "position_jumps": 1}, "transfer": {"block_layers": 2}}
ADJUST = {"enabled": True, "max_steps": 2, "batch_size": 2, "micro_batch_size": 2}


def blocks(*words):
    return CliRunner().invoke(app, ["blocks", *map(str, words)])


@pytest.fixture(scope="module")
def prepared(configure, tmp_path_factory):
    """A run of two blocks with their inputs; its sequences are moved."""
    folder = tmp_path_factory.mktemp("jobs")
    (folder / "recipe.yaml").write_text(configure(**MOVED).to_yaml())
    done = blocks("prepare", "--recipe", folder / "recipe.yaml", "-o", folder / "out")
    assert done.exit_code == 0, done.output
    return folder / "out"


@pytest.mark.parametrize("trained", [(1, 0, 1), (1,)], ids=["all", "the run trains the others"])
def test_blocks_trained_in_any_order_equal_joint_training(trained, configure, different_layers, prepared, tmp_path):
    output = shutil.copytree(prepared, tmp_path / "out")
    for block in trained:  # once finished: nothing to do
        assert blocks("train", output, "--block", block).exit_code == 0
    before = {file: file.read_bytes() for file in (output / "run/transfer/block-001").rglob("*.json")}
    resumed = merge(read_yaml(output / "run" / "config.yaml"), {"adjust": ADJUST})
    report = linearize(LinearizeConfig.from_dict(resumed), output, resume=True, console=QUIET)
    assert before == {file: file.read_bytes() for file in before}  # with the seconds of training
    assert report["perplexity"].keys() == {"teacher", "transfer", "adjust"}
    assert len(report["stages"]["transfer"]["blocks"]) == 2
    linearize(configure(**MOVED), tmp_path / "joint", console=QUIET)
    assert not different_layers(output, tmp_path / "joint")


def test_foreign_and_incomplete_folders_are_refused(prepared, configure, tmp_path):
    with pytest.raises(UserError, match="holds no run"):
        jobs.train_one(tmp_path, 0, QUIET)
    with pytest.raises(UserError, match=r"--block 2: .* blocks 0 to 1"):
        jobs.train_one(prepared, 2, QUIET)
    for change in ({"transfer": {"lr": 1.0}}, {"attention": {"window_size": 8}}):
        with pytest.raises(UserError, match=r"other settings[\s\S]*(transfer.lr|attention.window_size)"):
            jobs.prepare(configure(**merge(MOVED, change)), prepared, QUIET)
    with pytest.raises(UserError, match="select_by=perplexity needs the whole model"):
        jobs.prepare(configure(transfer={"select_by": "perplexity"}), tmp_path / "out", QUIET)
    (tmp_path / "mine.txt").write_text("")
    with pytest.raises(UserError, match="not empty"):
        jobs.prepare(configure(), tmp_path, QUIET)


def test_damage_is_found_and_prepared_again(configure, tmp_path):
    output, config = tmp_path / "out", configure(transfer={"block_layers": 2})
    jobs.prepare(config, output, QUIET)
    tokens = output / "run" / "transfer" / jobs.DATA_FILE
    tokens.write_bytes(tokens.read_bytes()[:-4])
    (rows,) = (output / "run" / "transfer").rglob("block-001-train.rows")
    rows.unlink()
    with pytest.raises(UserError, match=r"inputs of block 1 .* not complete"):
        jobs.train_one(output, 1, QUIET)
    jobs.prepare(config, output, QUIET)
    jobs.train_one(output, 1, QUIET)
