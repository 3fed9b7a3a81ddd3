"""What a sequence of 1k + 2k tokens takes of vLLM's memory, and how many fit: Llama 3 8B, 8 bits, in 53.9 GiB."""

from itertools import groupby
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from lolcats.config.attention import AttentionConfig
from lolcats.modeling import LolcatsConfig
from lolcats.vllm_plugin import register
from lolcats.vllm_plugin.layer import Page
from lolcats.vllm_plugin.model import LolcatsForCausalLM
from lolcats.vllm_plugin.pages import block_bytes, is_bounded, model_pages, pages_in_block

ALL = tuple(range(8))
SPREAD = [(), (3,), (0, 7), (1, 2, 4, 5, 6)]  # a quarter of the heads


@pytest.mark.parametrize(
    ("exact", "window", "mebibytes", "fit"),
    [
        (SPREAD, None, 124.5, 443),  # three blocks of 1328 keys of 64 heads, and three of 64 heads' states
        ([(), (), (), ALL], None, 124.5, 443),
        ([()], None, 82.2, 670),
        ([ALL[:6], ALL[:7]], None, 249.0, 221),  # five groups of keys
        (SPREAD, 2700, 108.9, 505),
    ],
    ids=["heads", "layers", "linear", "most", "bounded"],
)
def test_sequences_that_fit(exact, window, mebibytes, fit) -> None:
    register()
    shape = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    layers = [{"index": i, "module": str(i), "exact": exact[i % len(exact)]} | shape for i in range(32)]
    attention = AttentionConfig(window_size=512, sinks=1, cache_bits=8, exact_window=window)
    config = LolcatsConfig(text_config=AutoConfig.for_model("llama"), layer_heads=layers, attention=attention)
    cache = SimpleNamespace(mamba_page_size_padded=None, mamba_cache_mode="align", use_replayssm=False)
    cache.prefix_match_unit = None
    cache.get_resolved_kv_cache_layout = lambda: KVCacheLayout.LBNHC
    engine = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=config, dtype=torch.bfloat16, get_num_kv_heads=lambda _: 8),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None),
        compilation_config=SimpleNamespace(static_forward_context={}),
        cache_config=cache,
        num_speculative_tokens=0,
    )
    # As vLLM does: attention in FP8, whose blocks are multiples of 16 tokens that hold a state.
    [[state]] = LolcatsForCausalLM.get_mamba_state_shape_from_config(engine)
    token = 2 * 8 * 128
    cache.mamba_block_size = block = -(-state // (16 * token)) * 16
    size, counts = model_pages(config, torch.bfloat16, 1)
    specs = {}
    for layer in config.layer_heads:
        if layer.exact and not is_bounded(config, layer):
            cache.mamba_page_size_padded = block * token
            heads = 8 if layer.is_softmax else 1
            keys = {"block_size": block, "num_kv_heads": heads, "head_size": 128, "dtype": torch.float8_e4m3fn}
            specs |= {f"{layer.index}.exact_{i}": FullAttentionSpec(**keys) for i in layer.exact[::heads]}
    for layer, count in zip(config.layer_heads, counts, strict=True):
        pages = [Page(f"{layer.index}.page_{i}", size, pages_in_block(engine)) for i in range(count)]
        specs |= {page.prefix: page.get_kv_cache_spec(engine) for page in pages}
    groups = LolcatsForCausalLM.get_kv_cache_groups(engine, specs)
    own = [(i, type(x.kv_cache_spec), name.partition(".")[0]) for i, x in enumerate(groups) for name in x.layer_names]
    assert len([*groupby(own)]) == len({x[1:] for x in own})  # a layer's heads and pages are neighbours in one group
    block_size = max(len(group.layer_names) * group.kv_cache_spec.page_size_bytes for group in groups)
    blocks = sum(-(-3072 // block) if isinstance(x.kv_cache_spec, FullAttentionSpec) else 1 for x in groups)
    assert round(blocks * block_size / 2**20, 1) == mebibytes
    assert int(53.9 * 2**30 / block_size - 1) // blocks == fit  # one block is nobody's
    assert 0.95 * block_size < block_bytes(config, torch.bfloat16, 1) <= block_size  # bounds `max_num_seqs`
