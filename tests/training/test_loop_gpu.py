"""What only a CUDA device can show."""

import pytest
import torch
from toy_stage import ToyStage, run

from lolcats.errors import UserError
from lolcats.training.checkpoint import list_checkpoints, read_checkpoint

pytestmark = pytest.mark.gpu


def test_updates_do_not_wait_for_the_gpu(tmp_path):
    """From the second micro-step to the last of an update, nothing may synchronise."""
    stage = ToyStage(per_block=True, dropout=0.2, device="cuda")

    def watch(count):
        # updates 2 to 8 lie between two readings; the first one initialises libraries
        torch.cuda.set_sync_debug_mode("error" if 4 <= count < 24 else "default")

    stage.before_step = watch
    try:
        result = run(stage, tmp_path, eval_every=100, checkpoint_every=100)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert result.history[-1]["loss"] < result.history[0]["loss"]
    assert result.peak_memory_bytes > 0


def test_real_out_of_memory(tmp_path):
    def fill(count):
        if count == 14:
            torch.empty(2**50, dtype=torch.uint8, device="cuda")

    stage = ToyStage(device="cuda")
    stage.before_step = fill
    with pytest.raises(UserError, match="step 5: out of cuda:0 memory"):
        run(stage, tmp_path)
    read_checkpoint(list_checkpoints(tmp_path)[-1])
