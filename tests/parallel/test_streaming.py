"""Streaming equals joint training with one optimizer per block, to the last bit."""

import pytest
import torch
from rich.console import Console
from transformers import AutoConfig

from lolcats.config import merge
from lolcats.conversion import convert
from lolcats.data.retrieval import RetrievalWriter
from lolcats.errors import UserError
from lolcats.modeling.heads import by_layer
from lolcats.modeling.loading import load_base_model
from lolcats.parallel.blockwise import scores
from lolcats.pipeline import linearize, select_heads
from lolcats.training.head_scores import SCORES, by_score, scoring_call

QUIET = Console(quiet=True)
STREAMING = {"transfer": {"block_mode": "streaming"}}


@pytest.mark.parametrize("size", [1, 3])
def test_equal_to_joint_training(size, configure, joint, assert_equals_joint, tmp_path):
    streamed = linearize(configure(**merge(STREAMING, {"transfer": {"block_layers": size}})), tmp_path, console=QUIET)
    assert_equals_joint(tmp_path, size)
    stage = streamed["stages"]["transfer"]
    assert stage["layer_losses"] == joint(size)[1]["stages"]["transfer"]["layer_losses"]
    assert len(stage["blocks"]) == -(-4 // size)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {
            "attention": {"exact": [1, 3], "feature_dim": 3},
            "data": {"loss_on": "all"},
            "transfer": {"schedule": "cosine"},
        },
        {
            "model": {"dtype": "bfloat16"},
            "data": {"position_offset": "auto", "position_jumps": 2},
            "transfer": {"block_layers": 2},
        },
    ],
    ids=["softmax-layers", "bfloat16-jumps"],
)
def test_equal_in_other_settings(changes, configure, different_layers, tmp_path):
    linearize(configure(**changes), tmp_path / "joint", console=QUIET)
    linearize(configure(**merge(changes, STREAMING)), tmp_path / "streamed", console=QUIET)
    assert not different_layers(tmp_path / "streamed", tmp_path / "joint")


def test_stage_2_follows(configure, tmp_path):
    adjust = {"enabled": True, "max_steps": 2, "batch_size": 2, "micro_batch_size": 2}
    plain = linearize(configure(adjust=adjust), tmp_path / "joint", console=QUIET)
    report = linearize(configure(adjust=adjust, **STREAMING), tmp_path / "streamed", console=QUIET)
    assert report["perplexity"].keys() == {"teacher", "transfer", "adjust"}
    assert report["perplexity"] == {name: plain["perplexity"][name] for name in report["perplexity"]}


def test_exact_heads_are_those_that_the_whole_model_scores_highest(
    configure, half_exact, joint, weights, tmp_path, monkeypatch
):
    monkeypatch.setattr(scores, "SCORE_TEXTS", 6)
    config = configure(**merge(STREAMING, half_exact))
    report = linearize(config, tmp_path, console=QUIET)
    base, tokenizer = load_base_model(config.model)
    decoder = convert(base, config.attention).get_decoder()
    writer = RetrievalWriter(tokenizer, "train", config.gates.haystack)
    total = {}
    for number in range(6):
        sample = writer.write_any(512, config.seed, number)
        with torch.no_grad():
            ids = torch.from_numpy(sample.token_ids[None]).long()
            decoder(input_ids=ids, use_cache=False, attention_call=scoring_call(sample, total))
    values = {
        name: {index: (scores_2G[row] / 6).tolist() for index, scores_2G in total.items()}
        for row, name in enumerate(SCORES)
    }
    chosen = by_layer(by_score(values)[:4])
    assert report["gates"] == {"chosen_by": "scores", "budget": "50%", "values": values, "chosen": chosen}
    exact = {layer.index: list(layer.exact) for layer in AutoConfig.from_pretrained(tmp_path).layer_heads}
    assert {index: heads for index, heads in exact.items() if heads} == chosen
    found, trained = weights(tmp_path), weights(joint(1)[0])
    for index, heads in exact.items():
        linear = [head for head in (0, 1) if head not in heads]
        name = f"model.model.layers.{index}.self_attn.linear_attention.k_weight"
        assert not linear or torch.equal(found[name], trained[name][linear])

    monkeypatch.setattr(scores, "score_heads", None)  # the scores are read
    fewer = linearize(
        configure(**merge(merge(STREAMING, half_exact), {"attention": {"exact": "25%"}})),
        tmp_path,
        resume=True,
        console=QUIET,
    )
    assert fewer["gates"]["values"] == values
    assert sum(map(len, fewer["gates"]["chosen"].values())) == 2
    with pytest.raises(UserError, match="by scores and not by gates"):
        select_heads(tmp_path, console=QUIET)


def test_what_does_not_fit_is_refused(configure, tmp_path):
    with pytest.raises(UserError, match="streaming needs block_layers"):
        configure(**merge(STREAMING, {"transfer": {"block_layers": None}}))
    with pytest.raises(UserError, match="select_by=perplexity needs the whole model"):
        configure(**merge(STREAMING, {"transfer": {"select_by": "perplexity"}}))
    gguf = configure(**STREAMING, model={"gguf_file": "x.gguf"})
    with pytest.raises(UserError, match="GGUF"):
        linearize(gguf, tmp_path / "out", overwrite=True, console=QUIET)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_equal_on_a_gpu_with_fused_kernels(configure, weights, tmp_path):
    """Both use the kernels of `lolcats.modeling.fused`, where liger-kernel is installed."""
    changes = {"model": {"device": "cuda"}, "transfer": {"block_layers": 2}}
    linearize(configure(**changes), tmp_path / "joint", console=QUIET)
    linearize(configure(**merge(changes, STREAMING)), tmp_path / "streamed", console=QUIET)
    torch.testing.assert_close(weights(tmp_path / "streamed"), weights(tmp_path / "joint"), rtol=1e-3, atol=1e-4)
