"""What the plugin cannot do is refused by name, and its registration can be repeated."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from transformers import AutoConfig
from vllm.config import CompilationConfig, CompilationMode

from lolcats.errors import UserError
from lolcats.vllm_plugin import register
from lolcats.vllm_plugin.model import LolcatsForCausalLM


def test_another_family(folder, serve) -> None:
    with pytest.raises(UserError, match=r"llama, mistral, qwen2, qwen3; this one was made from 'olmo2'"):
        serve(folder("olmo2"))


@pytest.mark.parametrize(
    ("attention", "speculative", "ranks", "reason"),
    [
        ({}, "ngram", 1, "speculative decoding"),
        ({"window_size": 0, "decay": True}, None, 2, "decay.*one rank"),
        ({"exact": ["1.0"]}, None, 2, "exact and linear heads.*one rank"),
    ],
    ids=["speculation", "decay-on-two-ranks", "both-kinds-of-heads-on-two-ranks"],
)
def test_features(folder, attention, speculative, ranks, reason) -> None:
    """Asked of the class: an engine that speculates imports numba, after which no other starts in this process."""
    asked = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=AutoConfig.from_pretrained(folder(attention=attention))),
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
        speculative_config=speculative,
    )
    with pytest.raises(UserError, match=reason):
        LolcatsForCausalLM(vllm_config=asked)


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"pipeline_parallel_size": 2}, "Pipeline parallelism is not supported"), ({"enable_lora": True}, "LoRA")],
    ids=["pipeline", "lora"],
)
def test_refused_by_vllm(folder, serve, options, reason) -> None:
    with pytest.raises((NotImplementedError, ValueError), match=reason):
        serve(folder(), **options)


def test_registering_again_changes_nothing() -> None:
    register()
    before = list(CompilationConfig._attention_ops)
    register()
    assert before == CompilationConfig._attention_ops
    assert before.count("vllm::lolcats_attention") == 1


def test_graphs_are_cut_at_the_operator() -> None:
    register()
    config = CompilationConfig(mode=CompilationMode.VLLM_COMPILE)
    config.set_splitting_ops_for_v1(all2all_backend="naive")
    assert "vllm::lolcats_attention" in config.splitting_ops
