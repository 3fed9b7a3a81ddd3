"""vLLM's own treatment of linear layers: quantized weights, and heads divided among ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_vllm_answers import HEADS
from vllm_kit import PROMPTS, assert_same, transformers_answers

# Of four KV heads the first of two ranks has two: one exact, all, two and none.
SPREAD = ["0.0", "0.2", 1, "2.0", "2.1", "3.3"]
GROUP = 32  # weights that share a scale
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP},
        }
    },
}


def quantize(source: Path, packed: Path, rounded: Path) -> None:
    """`source` with linear weights of 4 bits: packed for vLLM, and as float32 numbers for transformers."""
    for target in (packed, rounded):
        shutil.copytree(source, target)
    weights = load_file(source / "model.safetensors")
    numbers, packs = dict(weights), dict(weights)
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        x_ONG = weights[name].unflatten(1, (-1, GROUP))
        scale_ON1 = x_ONG.abs().amax(-1, keepdim=True) / 7
        code_ONG = (x_ONG / scale_ON1).round()
        numbers[name] = (code_ONG * scale_ON1).flatten(1)
        code_OM8 = (code_ONG.flatten(1).to(torch.int32) + 8).unflatten(1, (-1, 8))
        stem = name.removesuffix("weight")
        del packs[name]
        packs[f"{stem}weight_packed"] = (code_OM8 << 4 * torch.arange(8)).sum(-1).to(torch.int32)
        packs[f"{stem}weight_scale"] = scale_ON1[..., 0].contiguous()
        packs[f"{stem}weight_shape"] = torch.tensor(weights[name].shape)
    save_file(packs, packed / "model.safetensors", metadata={"format": "pt"})
    save_file(numbers, rounded / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": QUANTIZATION}))


def test_weights_of_four_bits(folder, serve, tmp_path) -> None:
    """bfloat16, all that vLLM's CPU kernel takes; so only the first token's log-probability is compared."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    if not hasattr(torch.ops._C, "cpu_gemm_wna16"):
        pytest.skip("vLLM has no kernel for weights of four bits on a CPU without AVX-512")
    source = folder()
    quantize(source, tmp_path / "packed", tmp_path / "rounded")
    first = [answer.logprobs[0] for answer in serve(tmp_path / "packed", dtype="bfloat16").answers(PROMPTS)]

    def distance(path: Path) -> float:
        expected = transformers_answers(path)
        return sum(abs(x - answer.logprobs[0]) for x, answer in zip(first, expected, strict=True)) / len(first)

    assert distance(tmp_path / "rounded") < 0.1  # 0.03 was seen; bfloat16 has three significant digits
    assert distance(source) > 0.3  # the weights before rounding are another model


@pytest.mark.parametrize(
    "options",
    [
        {"attention": {"exact": [1]}},
        {"num_key_value_heads": 1, "attention": {"share_state": "query_head"}},  # both ranks hold the key/value head
        HEADS | {"num_hidden_layers": 4, "attention": {"exact": SPREAD}},
        HEADS | {"num_hidden_layers": 4, "attention": {"exact": SPREAD, "exact_window": 40, "sinks": 2}},
    ],
    ids=["hybrid", "one-kv-head", "exact-heads", "bounded"],
)
def test_two_ranks(folder, serve, options) -> None:
    path = folder(**options)
    served = serve(path, tensor_parallel_size=2, max_num_batched_tokens=100)
    assert_same(served.answers(PROMPTS), transformers_answers(path))
