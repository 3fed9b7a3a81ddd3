from __future__ import annotations

import pytest
from toy_stage import folders

from lolcats.training.checkpoint_folders import (
    checkpoint_path,
    list_checkpoints,
    remove_checkpoint,
    remove_unfinished,
    step_of,
)


def test_list_ignores_other_names(tmp_path):
    for step in (100, 20, 123456789):
        checkpoint_path(tmp_path, "step", step).mkdir()
    checkpoint_path(tmp_path, "best", 30).mkdir()
    (tmp_path / ".tmp-step-00000200").mkdir()
    (tmp_path / "step-7").mkdir()
    (tmp_path / "step-00000300").write_text("a file")
    assert [path.name for path in list_checkpoints(tmp_path, "step")] == [
        "step-00000020",
        "step-00000100",
        "step-123456789",
    ]
    assert list_checkpoints(tmp_path / "missing", "step") == []


def test_steps_are_in_the_names(tmp_path):
    assert step_of(checkpoint_path(tmp_path, "best", 123)) == 123
    with pytest.raises(ValueError, match="got step-7"):
        step_of(tmp_path / "step-7")


def test_only_what_is_asked_for_is_removed(tmp_path):
    for name in ("step-00000001", "step-00000002", "step-notes", ".tmp-step-00000003"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("")
    (tmp_path / ".tmp-done.json").write_text("")
    remove_checkpoint(tmp_path / "step-00000001")
    assert folders(tmp_path) == [".tmp-done.json", ".tmp-step-00000003", "step-00000002", "step-notes"]
    remove_unfinished(tmp_path)
    assert folders(tmp_path) == ["step-00000002", "step-notes"]
