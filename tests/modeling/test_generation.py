"""generate(): every decoding strategy gives what it gives without a cache."""

import copy

import pytest
import torch
from transformers import DynamicCache, GenerationConfig

from lolcats.modeling import graphs
from lolcats.modeling.cache import recurrent_layers
from lolcats.modeling.graphs import CapturedSteps, Graphs

NEW_TOKENS = 10
STRATEGIES = {
    "greedy": {"do_sample": False},
    "sample": {"do_sample": True, "temperature": 1.5, "top_k": 20, "num_return_sequences": 2},
    "beam": {"num_beams": 4, "do_sample": False, "num_return_sequences": 2},
    "beam-sample": {"num_beams": 3, "do_sample": True, "temperature": 2.0},
    "prefill-chunks": {"do_sample": False, "prefill_chunk_size": 5},
}


# name -> (family, attention); those on a GPU decode by the kernel
EXACT = {"exact": ["0.1", "1"], "exact_window": 5, "sinks": 2, "sliding_layers": "linearize"}
MODELS = {
    **{name: (name, {}) for name in ("llama3", "gemma3", "qwen3.5", "lfm2", "granite4")},
    "qwen3-next-hybrid": ("qwen3-next", {"exact": ["1.0"]}),
    "gpt-oss-window": ("gpt-oss", EXACT),
    "shared-keys-window-8-bits": ("gemma4-shared-keys", EXACT | {"cache_bits": 8}),
    "llama3-cuda": ("llama3", {"window": "terraced", "window_size": 4}),
    "llama3-hybrid-cuda": ("llama3", {"window": "terraced", "window_size": 4, "exact": [0]}),
}
PARAMETERS = [pytest.param(name, marks=pytest.mark.gpu) if name.endswith("cuda") else name for name in MODELS]


@pytest.fixture(scope="module", params=PARAMETERS)
def model(request, kit):
    family, options = MODELS[request.param]
    on_gpu = request.param.endswith("cuda")
    original = kit.build(family, **({"head_dim": 32} if on_gpu else {}))
    made = kit.linearized(original, **({"window": "sliding", "window_size": 3} | options))
    return made.cuda() if on_gpu else made.double()


def generate(model, input_ids, mask, **settings):
    torch.manual_seed(7)
    settings = {"max_new_tokens": NEW_TOKENS, "pad_token_id": 0} | settings
    return model.generate(input_ids.to(model.device), attention_mask=mask.to(model.device), **settings)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_with_cache_equals_without(model, kit, strategy):
    input_ids, mask = kit.tokens(3, 12), kit.padding([12, 7, 3], 12)
    settings = dict(STRATEGIES[strategy])
    cached = generate(model, input_ids, mask, **settings)
    settings.pop("prefill_chunk_size", None)
    assert torch.equal(cached, generate(model, input_ids, mask, use_cache=False, **settings))


def test_a_conversation_goes_on_from_its_cache(make_linear, kit):
    model, input_ids = make_linear(exact=[1]), kit.tokens(1, 20)
    cache = DynamicCache(config=model.config.get_text_config())
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    first = model.generate(input_ids[:, :8], past_key_values=cache, **settings)
    longer = torch.cat([first, input_ids[:, 8:12]], dim=1)
    copied = copy.deepcopy(cache)
    expected = model.generate(longer, use_cache=False, **settings)
    assert torch.equal(model.generate(longer, past_key_values=cache, **settings), expected)
    # the first continuation wrote into its own cache, not into the copy
    assert torch.equal(model.generate(longer, past_key_values=copied, **settings), expected)


def test_the_generation_config_of_the_base_is_kept(llama, kit, tmp_path):
    original = copy.deepcopy(llama)
    original.generation_config = GenerationConfig(do_sample=True, temperature=0.3, top_p=0.8, eos_token_id=[5, 6])
    model = kit.linearized(original, window_size=4)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    for config in (model.generation_config, loaded.generation_config):
        assert config.temperature == 0.3
        assert config.eos_token_id == [5, 6]


@pytest.mark.parametrize("assisted", ["prompt lookup", "assistant", "as the assistant"])
def test_assisted_decoding_is_rejected(kit, assisted):
    original, input_ids = kit.build("llama3"), kit.tokens(1, 6).repeat(1, 4)
    model = kit.linearized(kit.build("llama3"), window_size=4)
    settings = {"assistant_model": model} if assisted == "as the assistant" else {"assistant_model": original}
    if assisted == "prompt lookup":
        settings = {"prompt_lookup_num_tokens": 4}
    generating = original if assisted == "as the assistant" else model
    with pytest.raises(ValueError, match="linear states cannot forget"):
        generate(generating, input_ids, torch.ones_like(input_ids), max_new_tokens=12, do_sample=False, **settings)


@pytest.mark.slow
def test_a_compiled_forward_gives_the_same(make_linear, kit):
    torch.compiler.reset()
    model = make_linear(window="terraced", window_size=3, exact=[0])
    input_ids, mask = kit.tokens(2, 12), kit.padding([12, 7], 12)
    expected = generate(model, input_ids, mask, do_sample=False)
    model.forward = torch.compile(model.forward, backend="eager")
    assert torch.equal(generate(model, input_ids, mask, do_sample=False), expected)


@pytest.mark.parametrize("strategy", ["greedy", "sample", "prefill-chunks"])
def test_steps_from_fixed_addresses_equal_others(model, kit, monkeypatch, strategy):
    """Those that a GPU captures; a CPU runs them."""
    if recurrent_layers(model.config):
        pytest.skip("not captured")
    input_ids, mask = kit.tokens(3, 12), kit.padding([12, 7, 3], 12)
    expected = generate(model, input_ids, mask, disable_compile=True, **STRATEGIES[strategy])
    runs, step, on_gpu = [], CapturedSteps._step, model.device.type == "cuda"
    monkeypatch.setattr(graphs, "TOKENS_AHEAD", 4)  # more memory is needed while they run
    monkeypatch.setattr(CapturedSteps, "_step", lambda self: runs.append(self.left) or step(self))
    if not on_gpu:
        monkeypatch.setattr(Graphs, "run", lambda self, key, call, warm_up: call())
        monkeypatch.setattr(type(model), "_valid_auto_compile_criteria", lambda *_: True)
    assert torch.equal(generate(model, input_ids, mask, **STRATEGIES[strategy]), expected)
    assert len(runs) < NEW_TOKENS - 1 if on_gpu else len(runs) == NEW_TOKENS - 1
