"""What vLLM does on a GPU alone: full CUDA graphs over pages that the kernel for single tokens writes, and bfloat16."""

from collections import Counter

import pytest
import torch
from test_vllm_answers import BOUNDED, EXACT_HEADS
from vllm_kit import GRAPHS, ON_GPU, PROMPTS, assert_same, rms_error, transformers_answers

from lolcats.vllm_plugin import exact

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SLIDING = {"attention": {"window": "sliding"}}


@pytest.mark.parametrize("options", [{}, EXACT_HEADS, SLIDING, BOUNDED], ids=["linear", "heads", "sliding", "bounded"])
def test_cuda_graphs(folder, serve, options) -> None:
    """Ten sequences in a graph of sixteen, and fewer as they end; a prompt of one token begins in a graph."""
    path = folder(**options)
    served = serve(path, **GRAPHS)
    assert served.config.compilation_config.cudagraph_mode.name == "FULL_DECODE_ONLY"
    expected = transformers_answers(path)
    assert_same([served.answers([prompt])[0] for prompt in PROMPTS[:3]], expected[:3], ON_GPU)
    assert_same(served.answers(PROMPTS), expected, ON_GPU)
    assert_same(served.answers(PROMPTS, new=9), transformers_answers(path, 9), ON_GPU)


@pytest.mark.parametrize("options", [{}, EXACT_HEADS], ids=["linear", "heads"])
def test_bfloat16(folder, serve, options) -> None:
    """Log-probabilities of prompts, cut into chunks: as near to float32's as those of transformers in bfloat16."""
    path = folder(**options)
    served = serve(path, dtype="bfloat16", max_num_batched_tokens=200, **GRAPHS)
    right, theirs = (transformers_answers(path, 1, of_prompts=True, dtype=x) for x in (torch.float32, torch.bfloat16))
    errors = [rms_error(answers, right) for answers in (served.answers(PROMPTS, new=1, of_prompts=True), theirs)]
    print("bfloat16, errors of log-probabilities, vLLM's and transformers'", errors)
    assert errors[0] < 1.5 * errors[1]


@pytest.mark.parametrize("kept", ["auto", "fp8"])
def test_exact_heads_in_one_launch(folder, serve, kept, monkeypatch) -> None:
    """Their keys, values and queries by our kernel and a plan for all layers: as by vLLM's launches in each layer."""
    path, options = folder(**EXACT_HEADS), {"dtype": "bfloat16", "kv_cache_dtype": kept, **GRAPHS}
    calls = Counter[str]()

    def counted(name, original):
        def call(*given):
            found = original(*given)
            calls[name] += found is not None and found is not False
            return found

        monkeypatch.setattr(exact, name, call)

    for name in ("_is_for_one_launch", "_plan"):
        counted(name, getattr(exact, name))
    ours = serve(path, **options).answers(PROMPTS, of_prompts=True)
    assert calls["_is_for_one_launch"] >= 2  # layers with exact heads
    assert calls["_plan"] > 0
    for name in ("_is_for_one_launch", "_plan"):
        monkeypatch.setattr(exact, name, lambda *_: None)
    assert_same(ours, serve(path, **options).answers(PROMPTS, of_prompts=True), 1e-6)
