"""What joining refuses; no process is started."""

from __future__ import annotations

import pytest

from lolcats.errors import UserError
from lolcats.parallel.group import SINGLE
from lolcats.parallel.launch import open_group


def test_one_process_needs_no_torchrun(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    with open_group() as group:
        assert group is SINGLE
    error = ValueError("as it was")
    with pytest.raises(ValueError, match="as it was"), SINGLE.sync_errors():
        raise error


def test_incomplete_variables_are_named(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(UserError, match=r"WORLD_SIZE=2, but MASTER_ADDR is not set; start with torchrun"), open_group():
        pass


def test_a_gpu_per_process_cannot_be_named(monkeypatch):
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"model.device='cuda:1': with several processes"), open_group("cuda:1"):
        pass


def test_processes_that_do_not_meet(monkeypatch):
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"did not meet at 127.0.0.1:1 within 0.5 s"), open_group("cpu", 0.5):
        pass
