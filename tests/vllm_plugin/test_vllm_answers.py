"""vLLM with the plugin gives the tokens and log-probabilities that transformers gives, however it schedules."""

from collections import Counter

import pytest
import torch
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm_kit import PROMPTS, TOLERANCE, assert_same, rms_error, transformers_answers

from lolcats.vllm_plugin import defaults, exact, layer

# One layer of three keeps keys and values.
HYBRID = {"attention": {"exact": [1]}}
# Of four KV heads in each layer, two apart from each other, and one; beside them a softmax layer.
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
EXACT_HEADS = HEADS | {"attention": {"exact": ["0.0", "0.2", "2.3"]}}
LATE_HEADS = HEADS | {"attention": {"exact": ["1.0", "2.1", "2.3"]}}
ALL_KINDS = HEADS | {"attention": {"exact": ["0.0", "0.2", 1, "2.3"]}}
# These keep the last tokens and the first; most prompts are longer.
WINDOW = {"exact": ["0.0", "0.2", 1, "2.3"], "exact_window": 40, "sinks": 2}
BOUNDED = HEADS | {"attention": WINDOW}


def test_alone_together_and_in_another_order(folder, serve) -> None:
    path = folder()
    served = serve(path)
    expected = transformers_answers(path)
    assert_same([served.answers([prompt])[0] for prompt in PROMPTS], expected)
    assert_same(served.answers(PROMPTS), expected)
    assert_same(served.answers(PROMPTS[::-1])[::-1], expected)


@pytest.mark.parametrize("options", [{}, EXACT_HEADS, ALL_KINDS, BOUNDED], ids=["linear", "heads", "all", "bounded"])
def test_chunked_prefill(folder, serve, options) -> None:
    """Prompts are cut anywhere, and their pieces run beside tokens of other requests."""
    path = folder(**options)
    served = serve(path, max_num_batched_tokens=48, max_num_seqs=8)
    assert served.config.scheduler_config.enable_chunked_prefill
    assert_same(served.answers(PROMPTS), transformers_answers(path))


def test_8_bits_are_of_windows_and_not_of_all_keys_in_vllm(folder, serve) -> None:
    """Exact heads that keep all keys stay in the model's type: answers are nearer to the model without 8 bits."""
    paths = folder(**EXACT_HEADS), folder(**HEADS, attention=EXACT_HEADS["attention"] | {"cache_bits": 8})
    served = serve(paths[1]).answers(PROMPTS, new=1, of_prompts=True)
    errors = [rms_error(served, transformers_answers(path, 1, of_prompts=True)) for path in paths]
    assert 1e-3 < errors[0] < errors[1] < 0.1


def test_fp8_is_for_keys_of_exact_heads_alone(folder, serve) -> None:
    """Softmax everywhere, with these weights, is off by 0.66, and 0.08 is bfloat16's part; states stay as they are."""
    if not torch.cuda.is_available() and not AttentionBackendEnum.CPU_ATTN.get_class().supports_kv_cache_dtype("fp8"):
        pytest.skip("vLLM has no FP8 cache on this CPU")
    path = folder(**EXACT_HEADS)
    engine = serve(path, kv_cache_dtype="fp8", dtype="bfloat16")
    layers = engine.config.compilation_config.static_forward_context.values()
    assert all(layer.heads is not None for layer in layers if hasattr(layer, "heads")), "kernels are compiled twice"
    served = engine.answers(PROMPTS, new=1, of_prompts=True)
    assert 0.2 < rms_error(served, transformers_answers(path, 1, of_prompts=True)) < 0.6
    assert_same(serve(folder(), kv_cache_dtype="fp8").answers(PROMPTS), transformers_answers(folder()))


def test_single_tokens_in_pages_and_rings(folder, serve, monkeypatch) -> None:
    """As on a GPU: the kernel reads linear heads between exact ones where they stand, here in Triton's interpreter."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    path, new = folder(**BOUNDED), 3
    served = serve(path, max_num_batched_tokens=128)
    layers = served.config.compilation_config.static_forward_context.values()
    assert {layer.steps_in_pages for layer in layers if hasattr(layer, "steps_in_pages")} == {True}
    expected = [transformers_answers(path, new)[i] for i in (0, 4)]
    given = [PROMPTS[i] for i in (0, 4)]
    for answer, right in zip(served.answers(given, new), expected, strict=True):
        assert answer.tokens == right.tokens
        assert answer.logprobs == pytest.approx(right.logprobs, abs=TOLERANCE)


def test_neighbours_are_written_among_the_others(folder, serve, monkeypatch) -> None:
    """As FlashAttention does it; vLLM's kernel for CPUs writes dense rows only."""
    attention, written = AttentionBackendEnum.CPU_ATTN.get_class().get_impl_cls(), Counter[bool]()
    original = attention.forward

    def strided(self, layer, query, key, value, cache, metadata, output, **more):
        written[output.is_contiguous()] += 1
        output.copy_(original(self, layer, query, key, value, cache, metadata, output=output.contiguous(), **more))

    monkeypatch.setattr(attention, "forward", strided)
    monkeypatch.setattr(exact, "_takes_strides", lambda _: True)
    path = folder(**HEADS, attention={"exact": ["0.0", "0.2", 1, "2.1", "2.2"]})
    assert_same(serve(path).answers(PROMPTS), transformers_answers(path))
    assert written[True] > 0  # apart, or all of a layer
    assert written[False] > 0  # neighbours


@pytest.mark.parametrize("heads", [[], [1], ["0.0", "0.1", "0.2", "1.3"]], ids=["linear", "hybrid", "heads"])
def test_kernels_are_compiled_for_pages_like_vllms(folder, serve, heads) -> None:
    """Triton compiles a kernel anew for strides that are, or are not, multiples of 16."""
    served = serve(folder(**HEADS, attention={"exact": heads, "sinks": 1, "cache_bits": 8}))
    layers = served.config.compilation_config.static_forward_context.values()
    linear = [each for each in layers if getattr(each, "linear_attention", None) is not None]
    for each in linear:
        found, tried = each._find_pages()[0].views, each._scratch(torch.device("cpu")).views
        for name, view in found.items():
            assert [n % 16 for n in view.stride()] == [n % 16 for n in tried[name].stride()], name
    assert linear


def test_a_prompt_is_one_pass_that_keeps_its_prefix(folder, serve, monkeypatch) -> None:
    """As on a GPU, in Triton's interpreter: the state at the last multiple of 16 is written within the pass."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(layer, "STATE_TOKENS", 32)
    path, new = folder(**EXACT_HEADS), 2
    served = serve(path, enable_prefix_caching=True, max_num_batched_tokens=128)
    expected = transformers_answers(path, new)[4:6]
    scheduler = served.llm.llm_engine.engine_core.engine_core.scheduler
    schedule, passes = scheduler.schedule, []

    def count(*arguments, **named):
        output = schedule(*arguments, **named)
        passes.append(list(output.num_scheduled_tokens.values()))
        return output

    scheduler.schedule = count
    for _ in range(2):
        for answer, right in zip(served.answers(PROMPTS[4:6], new), expected, strict=True):
            assert answer.tokens == right.tokens
            assert answer.logprobs == pytest.approx(right.logprobs, abs=TOLERANCE)
    assert [lengths for lengths in passes if lengths] == [[33, 63], [1, 1], [33 - 32, 63 - 48], [1, 1]]


@pytest.mark.parametrize(
    ("options", "unit", "hits"),
    [
        # All whole blocks before the last token: 64 of 65, 128 of 150, 256 of 300 tokens.
        ({}, None, 64 + 128 + 256),
        (HYBRID, None, 64 + 128 + 256),
        (EXACT_HEADS, None, 256),  # an exact head's block has four times as many tokens as four heads'
        (ALL_KINDS, 32, 3 * 32 + 64 + 128 + 288),
        (BOUNDED, None, 64 + 128 + 256),
    ],
    ids=["linear", "hybrid", "heads", "all-in-smaller-units", "bounded"],
)
def test_prefix_cache_hits(folder, serve, options, unit, hits) -> None:
    path = folder(**options)
    served = serve(path, enable_prefix_caching=True, block_size=64, mamba_block_size=64, prefix_match_unit=unit)
    expected = transformers_answers(path)
    assert_same(served.answers(PROMPTS), expected)
    assert served.metric("prefix_cache_hits") == 0
    assert_same(served.answers(PROMPTS), expected)
    assert served.metric("prefix_cache_hits") >= hits
    # A prompt that leaves a cached one behind its second block.
    branch = PROMPTS[-1][:128] + PROMPTS[-2][:30]
    first, again = served.answers([branch]), serve(path).answers([branch])
    assert first[0].tokens == again[0].tokens


@pytest.mark.parametrize("options", [HYBRID, LATE_HEADS], ids=["hybrid", "heads"])
def test_many_share_a_prefix_that_ends_inside_a_page(folder, serve, options) -> None:
    """All begin in one step. A head of a later layer has the memory of an earlier one's state, in whole pages."""
    path = folder(**options)
    served = serve(path, enable_prefix_caching=True, block_size=16)
    text = PROMPTS[-1][:250]  # of a page of 256 keys the last lie behind a state
    served.answers([text], 1)
    prompts = [text[:-4] + PROMPTS[-2][i : i + 4] for i in range(16)]
    scheduler = served.llm.llm_engine.engine_core.engine_core.scheduler
    schedule, begun = scheduler.schedule, []

    def count(*arguments, **named):
        output = schedule(*arguments, **named)
        begun.append(len(output.scheduled_new_reqs))
        return output

    scheduler.schedule = count
    found = served.answers(prompts, 4)
    assert begun[0] == len(prompts)
    assert served.metric("prefix_cache_hits") == len(prompts) * 240
    right = serve(path).answers(prompts, 4)
    for answer, expected in zip(found, right, strict=True):
        assert answer.tokens == expected.tokens
        assert answer.logprobs == pytest.approx(expected.logprobs, abs=TOLERANCE)


def test_snapshots_by_default(folder, serve, monkeypatch) -> None:
    """Rarer than vLLM's blocks, unless a length is named or keys have blocks, too."""
    monkeypatch.setattr(defaults, "SNAPSHOT_TOKENS", 32)
    path = folder()
    served = serve(path, enable_prefix_caching=True)
    assert (served.config.cache_config.block_size, served.config.cache_config.mamba_block_size) == (32, 32)
    expected = transformers_answers(path)
    assert_same(served.answers(PROMPTS), expected)
    assert_same(served.answers(PROMPTS), expected)
    assert served.metric("prefix_cache_hits") >= 32 + 2 * 64 + 128 + 288
    named = serve(path, enable_prefix_caching=True, block_size=64, mamba_block_size=64)
    assert named.config.cache_config.mamba_block_size == 64
    for options, is_growing in ((HYBRID, True), (BOUNDED, False)):
        cache = serve(folder(**options), enable_prefix_caching=True).config.cache_config
        assert (cache.block_size != 32) == is_growing


def test_compiled(folder, serve, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    path = folder(**ALL_KINDS)
    served = serve(path, enforce_eager=False)
    assert served.config.compilation_config.mode.name != "NONE"
    assert_same(served.answers(PROMPTS), transformers_answers(path))


KINDS = {
    "sliding-sinks": {"window": "sliding", "window_size": 20, "sinks": 3},
    "query-heads-t2r": {"share_state": "query_head", "feature_map": "t2r", "feature_dim": 24},
    "no-window": {"window_size": 0},
    "no-linear-part": {"feature_map": None, "sinks": 2},
    "linear_length_cap": {"linear_length_cap": 40, "sinks": 1},
}


@pytest.mark.parametrize("attention", KINDS.values(), ids=KINDS)
def test_kinds_of_states(folder, serve, attention) -> None:
    path = folder(attention=attention)
    served = serve(path, enable_prefix_caching=True, block_size=32, mamba_block_size=32, max_num_batched_tokens=100)
    expected = transformers_answers(path)
    assert_same(served.answers(PROMPTS), expected)
    assert_same(served.answers(PROMPTS), expected)
    assert served.metric("prefix_cache_hits") > 0
