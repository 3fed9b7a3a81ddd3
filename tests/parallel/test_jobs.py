"""Independent jobs over written hidden states equal joint training."""

import pytest
from rich.console import Console
from typer.testing import CliRunner

from lolcats.cli.app import app
from lolcats.config import merge
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
    """A job folder of two blocks; its sequences are moved."""
    folder = tmp_path_factory.mktemp("jobs")
    (folder / "recipe.yaml").write_text(configure(**MOVED).to_yaml())
    done = blocks("prepare", "--recipe", folder / "recipe.yaml", "-o", folder / "jobs")
    assert done.exit_code == 0, done.output
    return folder / "jobs"


def test_blocks_trained_in_any_order_equal_joint_training(configure, different_layers, prepared, tmp_path):
    assemble = "assemble", prepared, "-o", tmp_path / "out"
    unfinished = blocks(*assemble)
    assert (unfinished.exit_code, "2 of 2 blocks" in unfinished.output) == (1, True)
    for block in (1, 0, 1):  # finished: nothing to do
        assert blocks("train", prepared, "--block", block).exit_code == 0
    assert blocks(*assemble).exit_code == 0
    linearize(configure(**MOVED), tmp_path / "joint", console=QUIET)
    assert not different_layers(tmp_path / "out", tmp_path / "joint")

    taken = {"transfer": {"block_mode": "jobs", "job_folder": str(prepared)}, "adjust": ADJUST}
    report = linearize(configure(**merge(MOVED, taken)), tmp_path / "adjusted", console=QUIET)
    assert report["perplexity"].keys() == {"teacher", "transfer", "adjust"}
    assert len(report["stages"]["transfer"]["blocks"]) == 2
    other = configure(**merge(merge(MOVED, taken), {"attention": {"window_size": 8}}))
    with pytest.raises(UserError, match=r"attention.window_size"):
        linearize(other, tmp_path / "other", console=QUIET)


def test_foreign_and_incomplete_folders_are_refused(prepared, configure, tmp_path):
    with pytest.raises(UserError, match="no job folder"):
        jobs.train_one(tmp_path, 0, QUIET)
    taken = {"transfer": {"block_mode": "jobs", "job_folder": str(tmp_path)}}
    with pytest.raises(UserError, match="no job folder"):
        linearize(configure(**taken), tmp_path / "out", console=QUIET)
    with pytest.raises(UserError, match=r"--block 2: .* blocks 0 to 1"):
        jobs.train_one(prepared, 2, QUIET)
    with pytest.raises(UserError, match=r"other settings[\s\S]*transfer.lr"):
        jobs.prepare(configure(**merge(MOVED, {"transfer": {"lr": 1.0}})), prepared, QUIET)
    with pytest.raises(UserError, match="select_by=perplexity needs the whole model"):
        jobs.prepare(configure(transfer={"select_by": "perplexity"}), tmp_path / "jobs", QUIET)
    (tmp_path / "mine.txt").write_text("")
    with pytest.raises(UserError, match="not empty"):
        jobs.prepare(configure(), tmp_path, QUIET)


def test_damage_is_found_and_prepared_again(configure, tmp_path):
    folder = tmp_path / "jobs"
    config = configure(transfer={"block_layers": 2})
    jobs.prepare(config, folder, QUIET)
    tokens = folder / jobs.DATA_FILE
    tokens.write_bytes(tokens.read_bytes()[:-4])
    with pytest.raises(UserError, match=r"packed data .* cannot be read"):
        jobs.train_one(folder, 0, QUIET)
    (folder / "inputs" / "block-001-train.rows").unlink()
    jobs.prepare(config, folder, QUIET)
    jobs.train_one(folder, 1, QUIET)
