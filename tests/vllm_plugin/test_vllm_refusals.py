"""What the plugin cannot do is refused by name, and its registration can be repeated."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoConfig
from vllm.config import CompilationConfig, CompilationMode
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from lolcats.errors import UserError
from lolcats.modeling import LolcatsConfig
from lolcats.vllm_plugin import defaults, register
from lolcats.vllm_plugin.defaults import refuse_unsupported
from lolcats.vllm_plugin.model import LolcatsForCausalLM, architecture, attention_layers


class OtherAttention(Attention):
    """As vLLM's chunked local attention is one."""


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        (OtherAttention, {}, "vLLM builds 'llama' with OtherAttention"),
        (Attention, {"impl": SimpleNamespace(alibi_slopes=[1.0])}, "layer 0.attn has position biases"),
        (Attention, {"kv_sharing_target_layer_name": "layers.0.attn"}, "0.attn attends over the keys of an earlier"),
        (Attention, {"layer_name": "layers.7.attn"}, "without attention in layer 0"),
        (Attention, {"head_size": 64}, r"\(4, 2, 64\) query heads.* 0.attn, expected \(4, 2, 32\)"),
        (Attention, {}, None),
    ],
    ids=["kind", "alibi", "shared-keys", "missing", "shape", "supported"],
)
def test_attention_layers(kind, changes, reason) -> None:
    """Layers of vLLM that no other can take the place of are refused by name, before weights are loaded."""
    attention = kind.__new__(kind)
    nn.Module.__init__(attention)
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_size": 32}
    plain = {"impl": SimpleNamespace(alibi_slopes=None), "kv_sharing_target_layer_name": None}
    for name, value in (shape | plain | {"layer_name": "layers.0.attn"} | changes).items():
        setattr(attention, name, value)
    model = nn.ModuleList([nn.ModuleDict({"attn": attention})])
    layer = {"index": 0, "module": "0", "num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
    config = LolcatsConfig(text_config=AutoConfig.for_model("llama"), layer_heads=[layer])
    if reason is None:
        assert attention_layers(model, config, 1) == {0: ("0.attn", attention)}
    else:
        with pytest.raises(UserError, match=reason):
            attention_layers(model, config, 1)


def test_no_parallelism_over_tokens() -> None:
    with pytest.raises(ValueError, match="decode_context_parallel_size=2"):
        refuse_unsupported(SimpleNamespace(parallel_config=SimpleNamespace(decode_context_parallel_size=2)))
    refuse_unsupported(SimpleNamespace(parallel_config=SimpleNamespace(decode_context_parallel_size=1)))


def test_no_more_sequences_than_states_fit(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(defaults, "block_bytes", lambda *_: 32 << 20)
    monkeypatch.setattr(defaults, "current_platform", SimpleNamespace(get_device_total_memory=lambda: 1 << 30))
    model = SimpleNamespace(hf_config=None, model=tmp_path, dtype=None)
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(300 << 20)
    rest = SimpleNamespace(max_num_seqs=1024, gpu_memory_utilization=0.9, tensor_parallel_size=1)
    parts = dict.fromkeys(("scheduler_config", "cache_config", "parallel_config"), rest)
    for rest.kv_cache_memory_bytes, fits in ((None, 15), (200 << 20, 5)):
        defaults.lower_sequences(SimpleNamespace(**parts, model_config=model))
        assert rest.max_num_seqs == fits


def test_no_model_of_text_alone() -> None:
    with pytest.raises(UserError, match="no model of text alone for 'clip'"):
        architecture("clip")


def test_no_speculation(folder) -> None:
    """Asked of the class: an engine that speculates imports numba, after which no other starts in this process."""
    asked = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=AutoConfig.from_pretrained(folder()), dtype=torch.float32),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        speculative_config="ngram",
    )
    with pytest.raises(UserError, match="speculative decoding"):
        LolcatsForCausalLM(vllm_config=asked)


def test_registering_again_changes_nothing() -> None:
    register()
    before = list(CompilationConfig._attention_ops)
    register()
    assert before == CompilationConfig._attention_ops
    assert before.count("vllm::lolcats_attention") == 1
    assert not MambaAttentionBackendEnum.CUSTOM.is_overridden()  # another plugin may have it


def test_graphs_are_cut_at_the_operator() -> None:
    register()
    config = CompilationConfig(mode=CompilationMode.VLLM_COMPILE)
    config.set_splitting_ops_for_v1(all2all_backend="naive")
    assert "vllm::lolcats_attention" in config.splitting_ops
