"""Streaming equals joint training with one optimizer per block, whatever interrupts it."""

import numpy as np
import pytest
import torch
from rich.console import Console

from lolcats.config import merge
from lolcats.errors import UserError
from lolcats.modeling.call import SOFTMAX, AttentionCall
from lolcats.parallel.blockwise.activation_cache import ActivationCache
from lolcats.parallel.blockwise.forward import BlockForward
from lolcats.pipeline import linearize

QUIET = Console(quiet=True)


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_equal_to_joint_training(size, configure, joint, feature_maps, tmp_path):
    output, report = joint(size)
    streamed = linearize(
        configure(transfer={"block_layers": size, "block_mode": "streaming"}), tmp_path / "out", console=QUIET
    )
    assert_equal(feature_maps(tmp_path / "out"), feature_maps(output))
    stage = streamed["stages"]["transfer"]
    assert stage["layer_losses"] == report["stages"]["transfer"]["layer_losses"]
    assert len(stage["blocks"]) == -(-4 // size)


@pytest.mark.parametrize(
    "changes",
    [
        {"attention": {"feature_init": "kaiming", "feature_dim": 3}},
        {"attention": {"keep_softmax": [1]}, "data": {"reset_documents": True, "loss_on": "all"}},
        {"data": {"position_offset": "auto", "position_jumps": 2}},
        {"model": {"dtype": "bfloat16"}, "transfer": {"activation_cache": "memory", "max_steps": 3, "epochs": 1}},
        {"attention": {"feature_scale": 0.5}, "transfer": {"schedule": "cosine"}},
    ],
    ids=["kaiming", "hybrid-documents", "jumps", "bfloat16", "transfer-options"],
)
def test_equal_in_other_settings(changes, configure, feature_maps, tmp_path):
    changes = merge({"transfer": {"block_layers": 2}}, changes)
    linearize(configure(**changes), tmp_path / "joint", console=QUIET)
    linearize(
        configure(**merge(changes, {"transfer": {"block_mode": "streaming"}})), tmp_path / "streamed", console=QUIET
    )
    assert_equal(feature_maps(tmp_path / "streamed"), feature_maps(tmp_path / "joint"))


@pytest.mark.parametrize("wrong", ["linear outputs", "sequences in another order", "a narrower type"])
def test_wrong_variants_are_noticed(wrong, configure, joint, feature_maps, tmp_path, monkeypatch):
    """What the comparison with joint training would catch."""
    changes = {"block_layers": 1, "block_mode": "streaming"}
    if wrong == "linear outputs":
        forward = BlockForward.__call__

        def linear(self, inputs, call=SOFTMAX):
            forward(self, inputs, call)  # the losses are right
            return forward(self, inputs, AttentionCall())

        monkeypatch.setattr(BlockForward, "__call__", linear)
    elif wrong == "sequences in another order":
        read = ActivationCache.read
        monkeypatch.setattr(ActivationCache, "read", lambda self, rows: read(self, np.roll(self.sequences, 1)[rows]))
    else:
        changes["activation_cache_dtype"] = "bfloat16"
    linearize(configure(transfer=changes), tmp_path / "out", console=QUIET)
    found, expected = feature_maps(tmp_path / "out"), feature_maps(joint(1)[0])
    different = {name.split(".")[3] for name in expected if not torch.equal(found[name], expected[name])}
    assert different == {"1", "2", "3"}  # the first block starts from the tokens


def test_stage_2_follows(configure, joint, tmp_path):
    adjust = {"enabled": True, "max_steps": 2, "batch_size": 2, "micro_batch_size": 2}
    plain = linearize(configure(adjust=adjust), tmp_path / "joint", console=QUIET)
    report = linearize(
        configure(adjust=adjust, transfer={"block_mode": "streaming"}), tmp_path / "streamed", console=QUIET
    )
    assert report["perplexity"].keys() == {"teacher", "transfer", "adjust"}
    assert report["perplexity"] == {name: plain["perplexity"][name] for name in report["perplexity"]}


def test_what_does_not_fit_is_refused(configure, tmp_path):
    streaming = {"block_mode": "streaming"}
    with pytest.raises(UserError, match="streaming needs block_layers"):
        configure(transfer=streaming | {"block_layers": None})
    with pytest.raises(UserError, match="select_by=perplexity needs the whole model"):
        configure(transfer=streaming | {"select_by": "perplexity"})
    for changes, named in [({"data": {"top_esl": 4}}, "top_esl=4"), ({"model": {"gguf_file": "x.gguf"}}, "GGUF")]:
        with pytest.raises(UserError, match=named):
            linearize(configure(transfer=streaming, **changes), tmp_path / "out", overwrite=True, console=QUIET)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_equal_on_a_gpu_with_fused_kernels(configure, feature_maps, tmp_path):
    """Both use the kernels of `lolcats.modeling.fused`, where liger-kernel is installed."""
    changes = {"model": {"device": "cuda"}, "transfer": {"block_layers": 2}}
    linearize(configure(**changes), tmp_path / "joint", console=QUIET)
    streamed = configure(**merge(changes, {"transfer": {"block_mode": "streaming"}}))
    linearize(streamed, tmp_path / "streamed", console=QUIET)
    expected = feature_maps(tmp_path / "joint")
    for name, tensor in feature_maps(tmp_path / "streamed").items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-4, msg=name)
