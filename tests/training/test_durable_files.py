from __future__ import annotations

import errno
import os

import pytest
from toy_stage import folders

from lolcats.errors import UserError
from lolcats.training.durable_files import CorruptCheckpoint, read_json, write_json


def full_disk(*arguments, **options):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_json_round_trip_and_damage(tmp_path, monkeypatch):
    file = tmp_path / "done.json"
    write_json(file, {"value": 0.1}, what="the answer")
    assert read_json(file) == {"value": 0.1}
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        with pytest.raises(UserError, match=r"cannot write the answer \S*done\.json: No space left") as caught:
            write_json(file, {"value": 2}, what="the answer")
    assert "checkpoint" not in str(caught.value)
    assert read_json(file) == {"value": 0.1}
    assert folders(tmp_path) == ["done.json"]
    file.write_text(file.read_text().replace("0.1", "0.2"))
    with pytest.raises(CorruptCheckpoint, match="checksum"):
        read_json(file)
