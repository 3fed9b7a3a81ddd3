"""Text from prompts."""

from __future__ import annotations

import pytest

from lolcats.config import ModelSection
from lolcats.config.attention import AttentionConfig
from lolcats.conversion import convert, load_base_model
from lolcats.errors import UserError
from lolcats.generation.decoding import generate_text
from lolcats.generation.sampling import SamplingParams

LIKELIEST = SamplingParams(max_new_tokens=12, temperature=3.0, seed=1, top_p=1e-6)
PROMPTS = ["w1 w2 w3", "w4", "w5 w6 w7 w8 w9 w10 w11", "w12 w13"]
CHAT_TEMPLATE = "{% for message in messages %}w50 {{ message['content'] }} w51{% endfor %}"


@pytest.fixture(scope="module")
def loaded(model_dir):
    base, tokenizer = load_base_model(ModelSection(path=str(model_dir), device="cpu"))
    return convert(base, AttentionConfig(window_size=2)), tokenizer


def test_a_batch_answers_like_each_prompt_alone(loaded):
    alone = [generate_text(*loaded, [prompt], SamplingParams(max_new_tokens=6))[0] for prompt in PROMPTS]
    assert generate_text(*loaded, PROMPTS, SamplingParams(max_new_tokens=6), batch_size=3) == alone
    assert len(set(alone)) > 1
    assert all(len(answer.split()) <= 6 for answer in alone)


def test_answers_are_those_of_generate(loaded):
    model, tokenizer = loaded
    ids = tokenizer("w1 w2 w3", return_tensors="pt")["input_ids"]
    expected = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=1)[0, 3:]
    assert generate_text(*loaded, ["w1 w2 w3"], SamplingParams(max_new_tokens=5)) == [
        tokenizer.decode(expected, skip_special_tokens=True)
    ]


def test_sampling_follows_the_seed(loaded):
    def sample(seed):
        return generate_text(*loaded, ["w1 w2"], SamplingParams(max_new_tokens=12, temperature=3.0, seed=seed))

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)
    with_top_p = generate_text(
        *loaded, ["w1 w2"], SamplingParams(max_new_tokens=12, temperature=3.0, seed=1, top_p=1e-6)
    )
    assert with_top_p == generate_text(
        *loaded, ["w1 w2"], SamplingParams(max_new_tokens=12)
    )  # only the likeliest is left


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
