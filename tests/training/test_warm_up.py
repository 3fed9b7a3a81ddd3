"""The first pass beside other work."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from lolcats.training import warm_up
from lolcats.training.warm_up import first_pass


def test_nothing_on_a_cpu(linearized, monkeypatch):
    monkeypatch.setattr(warm_up, "batch_losses", pytest.fail)
    with first_pass(linearized()[0], 2, 8):
        assert threading.current_thread() is threading.main_thread()


def test_what_fails_in_it_changes_nothing(monkeypatch):
    began = threading.Event()

    def zeros(*_, **__):
        began.set()
        raise RuntimeError("out of memory")

    monkeypatch.setattr(warm_up.torch, "zeros", zeros)
    with first_pass(SimpleNamespace(device=torch.device("cuda")), 2, 8):
        assert began.wait(5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_pass_draws_no_random_numbers(linearized):
    model = linearized(device="cuda")[0]
    states = torch.get_rng_state(), torch.cuda.get_rng_state()
    with first_pass(model, 2, 8):
        pass
    assert torch.equal(states[0], torch.get_rng_state())
    assert torch.equal(states[1], torch.cuda.get_rng_state())
