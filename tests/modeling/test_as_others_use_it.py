"""What libraries around transformers expect of a model: Auto classes, base_model, positions, refusals with a remedy."""

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, DynamicCache, GenerationConfig, pipeline
from transformers.cache_utils import QuantizedLayer

from lolcats.modeling.attention import SOFTMAX

GREEDY = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}


@torch.no_grad()
def test_base_model_is_the_decoder(model, kit):
    """TRL computes logits itself, from what base_model returns and the output embeddings."""
    input_ids = kit.tokens(2, 9)
    output = model.base_model(input_ids, use_cache=False)
    logits = model.get_output_embeddings()(output.last_hidden_state)
    torch.testing.assert_close(logits, model(input_ids).logits)
    assert model.get_input_embeddings() is model.base_model.get_input_embeddings()


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_positions_are_made_from_the_padding_mask(model, kit, side):
    input_ids, mask = kit.tokens(2, 12), kit.padding([12, 7], 12, side)
    expected = model(input_ids[1][mask[1].bool()][None], use_cache=False).logits[0]
    for logits in (
        model(input_ids, attention_mask=mask).logits,
        model.get_output_embeddings()(model.base_model(input_ids, attention_mask=mask).last_hidden_state),
    ):
        torch.testing.assert_close(logits[1][mask[1].bool()], expected)
    cache = DynamicCache(config=model.config.text_config)
    pieces = [
        model(input_ids[:, begin:end], attention_mask=mask[:, :end], past_key_values=cache).logits
        for begin, end in ((0, 8), (8, 9), (9, 12))
    ]
    torch.testing.assert_close(torch.cat(pieces, 1)[1][mask[1].bool()], expected)


def test_generating_from_embeddings(model, kit):
    input_ids, mask = kit.tokens(2, 8), kit.padding([8, 5], 8)
    expected = model.generate(input_ids, attention_mask=mask, **GREEDY)[:, 8:]
    embeddings = model.get_input_embeddings()(input_ids)
    assert torch.equal(model.generate(inputs_embeds=embeddings, attention_mask=mask, **GREEDY), expected)


@torch.no_grad()
def test_auto_model_gives_hidden_states(model, kit, tmp_path):
    model.save_pretrained(tmp_path / "causal")
    hidden = AutoModel.from_pretrained(tmp_path / "causal")
    input_ids = kit.tokens(2, 9)
    output = hidden(input_ids)
    assert torch.equal(output.last_hidden_state, model.base_model(input_ids).last_hidden_state)
    step = hidden(input_ids[:, :1], past_key_values=output.past_key_values).last_hidden_state
    assert step.shape == (2, 1, 32)
    assert not hidden.can_generate()
    hidden.save_pretrained(tmp_path / "hidden")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "hidden")
    assert torch.equal(again(input_ids).logits, model(input_ids).logits)


def test_continuous_batching_is_refused(model, kit):
    prompts = kit.tokens(2, 6)
    with pytest.raises(NotImplementedError, match=r"generate\(\) with a padded batch, or run `lolcats serve`"):
        model.generate_batch(prompts.tolist(), GenerationConfig(**GREEDY))
    with pytest.raises(NotImplementedError, match="continuous batching"):
        model.generate(prompts, cache_implementation="paged", **GREEDY)


def test_quantized_caches_are_refused(model, kit):
    with pytest.raises(ValueError, match=r"no effect on linear attention.*set_attention\(cache_bits=8\)"):
        model.generate(kit.tokens(2, 6), cache_implementation="quantized", **GREEDY)

    class Quantized(QuantizedLayer):
        def _quantize(self, tensor, axis):
            return tensor

        def _dequantize(self, q_tensor):
            return q_tensor

    cache = DynamicCache()
    cache.layers = [Quantized(), Quantized()]
    with pytest.raises(ValueError, match="no effect on linear attention"):
        model(kit.tokens(1, 4), past_key_values=cache)


@torch.no_grad()
def test_another_attention_implementation_does_not_bring_softmax_back(model, kit):
    input_ids = kit.tokens(1, 6)
    before, softmax = model(input_ids).logits, model(input_ids, attention_call=SOFTMAX).logits
    model.model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match=r'set_attn_implementation\("lolcats"\)'):
        model(input_ids)
    torch.testing.assert_close(model.model(input_ids, attention_call=SOFTMAX).logits, softmax)  # asked for
    model.model.set_attn_implementation("lolcats")
    assert torch.equal(model(input_ids).logits, before)


def test_a_pipeline(model, model_dir):
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    text = pipeline("text-generation", model=model, tokenizer=tokenizer)("w1 w2 w3", max_new_tokens=4, do_sample=False)
    assert len(text[0]["generated_text"].removeprefix("w1 w2 w3").split()) == 4
