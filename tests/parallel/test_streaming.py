"""Streaming equals joint training with one optimizer per block, to the last bit."""

import pytest
import torch
from rich.console import Console

from lolcats.config import merge
from lolcats.errors import UserError
from lolcats.pipeline import linearize

QUIET = Console(quiet=True)
STREAMING = {"transfer": {"block_mode": "streaming"}}


@pytest.mark.parametrize("size", [1, 3])
def test_equal_to_joint_training(size, configure, joint, assert_equals_joint, tmp_path):
    streamed = linearize(configure(**merge(STREAMING, {"transfer": {"block_layers": size}})), tmp_path, console=QUIET)
    assert_equals_joint(tmp_path, size)
    stage = streamed["stages"]["transfer"]
    assert stage["layer_losses"] == joint(size)[1]["stages"]["transfer"]["layer_losses"]
    assert len(stage["blocks"]) == -(-4 // size)


OTHERS = {
    "softmax-layers": {"attention": {"exact": [1, 3], "feature_dim": 3}, "data": {"loss_on": "all"}},
    "bfloat16-jumps": {
        "model": {"dtype": "bfloat16"},
        "data": {"position_offset": "auto", "position_jumps": 2},
        "transfer": {"block_layers": 2, "schedule": "cosine"},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("changes", OTHERS.values(), ids=OTHERS)
def test_equal_in_other_settings(changes, configure, different_layers, tmp_path):
    linearize(configure(**changes), tmp_path / "joint", console=QUIET)
    linearize(configure(**merge(changes, STREAMING)), tmp_path / "streamed", console=QUIET)
    assert not different_layers(tmp_path / "streamed", tmp_path / "joint")


def test_gates_and_stage_2_follow(configure, half_exact, tmp_path):
    short = {"max_steps": 2, "batch_size": 2, "micro_batch_size": 2}
    both = merge(half_exact, {"gates": short, "adjust": {"enabled": True, **short}})
    plain = linearize(configure(**both), tmp_path / "joint", console=QUIET)
    report = linearize(configure(**merge(both, STREAMING)), tmp_path / "streamed", console=QUIET)
    assert report["perplexity"].keys() == {"teacher", "transfer", "gates", "adjust"}
    assert report["perplexity"] == {name: plain["perplexity"][name] for name in report["perplexity"]}
    assert report["gates"] == plain["gates"]


def test_what_does_not_fit_is_refused(configure, half_exact):
    with pytest.raises(UserError, match="streaming needs block_layers"):
        configure(**merge(STREAMING, {"transfer": {"block_layers": None}}))
    for changes, named in (({"transfer": {"select_by": "perplexity"}}, "select_by"), (half_exact, "exact as a budget")):
        with pytest.raises(UserError, match=rf"{named}.* needs the whole model"):
            configure(**merge(STREAMING, changes))
    configure(**merge(STREAMING, {"transfer": {"select_by": "perplexity", "enabled": False}}))


@pytest.mark.gpu
def test_equal_on_a_gpu_with_fused_kernels(configure, weights, tmp_path):
    """Both use the kernels of `lolcats.modeling.fused`, where liger-kernel is installed."""
    changes = {"model": {"device": "cuda"}, "transfer": {"block_layers": 2}}
    linearize(configure(**changes), tmp_path / "joint", console=QUIET)
    linearize(configure(**merge(changes, STREAMING)), tmp_path / "streamed", console=QUIET)
    torch.testing.assert_close(weights(tmp_path / "streamed"), weights(tmp_path / "joint"), rtol=1e-3, atol=1e-4)
