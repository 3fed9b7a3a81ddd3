"""Text from prompts."""

from __future__ import annotations

import pytest

from lolcats.config import ModelSection
from lolcats.config.attention import AttentionConfig
from lolcats.conversion import convert, load_base_model
from lolcats.errors import UserError
from lolcats.generation.decoding import generate_text
from lolcats.generation.sampling import SamplingParams

PROMPTS = ["w1 w2 w3", "w4", "w5 w6 w7 w8 w9 w10 w11", "w12 w13"]
CHAT_TEMPLATE = "{% for message in messages %}w50 {{ message['content'] }} w51{% endfor %}"


@pytest.fixture(scope="module")
def loaded(model_dir):
    base, tokenizer = load_base_model(ModelSection(path=str(model_dir), device="cpu"))
    return convert(base, AttentionConfig(window_size=2)), tokenizer


def test_answers_are_those_of_generate_alone_and_in_a_batch(loaded):
    model, tokenizer = loaded
    expected = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        whole = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=1)
        expected.append(tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True))
    assert len(set(expected)) > 1
    for batch_size in (1, 3):
        assert generate_text(*loaded, PROMPTS, SamplingParams(max_new_tokens=6), batch_size=batch_size) == expected


def test_sampling_follows_the_seed(loaded):
    def sample(**options):
        return generate_text(*loaded, ["w1 w2"], SamplingParams(max_new_tokens=12, **options))

    assert sample(temperature=3.0, seed=1) == sample(temperature=3.0, seed=1) != sample(temperature=3.0, seed=2)
    assert sample(temperature=3.0, top_p=1e-6) == sample()  # only the likeliest is left


def test_chat_puts_prompts_into_the_template(loaded, monkeypatch):
    model, tokenizer = loaded
    with pytest.raises(UserError, match="no chat template"):
        generate_text(model, tokenizer, ["w1"], SamplingParams(), chat=True)
    monkeypatch.setattr(tokenizer, "chat_template", CHAT_TEMPLATE)
    chat = generate_text(model, tokenizer, ["w1 w2"], SamplingParams(max_new_tokens=6), chat=True)
    assert chat == generate_text(model, tokenizer, ["w50 w1 w2 w51"], SamplingParams(max_new_tokens=6))
    assert chat != generate_text(model, tokenizer, ["w1 w2"], SamplingParams(max_new_tokens=6))


def test_an_empty_prompt_is_refused(loaded):
    with pytest.raises(UserError, match="has no tokens"):
        generate_text(*loaded, ["w1", ""], SamplingParams())
