"""Answers to OpenAI's own client are those of the model's generate(), however they are asked for."""

from lolcats.generation.engine import Engine
from lolcats.generation.sampling import SamplingParams

LENGTHS = [1, 2, 9, 40, 23]


def test_models(client):
    assert [item.id for item in client.models.list()] == ["tiny"]


def test_greedy_tokens_are_those_of_generate(client, kit, model, tokenizer):
    prompts = [kit.random_tokens(length, seed) for seed, length in enumerate(LENGTHS)]
    answer = client.completions.create(model="tiny", prompt=prompts, max_tokens=20, temperature=0.0, logprobs=0)
    counts = answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens
    new = [kit.greedy(model, prompt, 20) for prompt in prompts]
    assert counts == (sum(LENGTHS), sum(map(len, new)), sum(LENGTHS) + sum(map(len, new)))
    for expected, choice in zip(new, answer.choices, strict=True):
        assert choice.text == tokenizer.decode(expected, skip_special_tokens=True)
        texts = [tokenizer.decode([token]) for token in expected]
        names = tokenizer.convert_ids_to_tokens(expected)  # of parts of characters
        assert choice.logprobs.tokens == [
            name if "\ufffd" in text else text for text, name in zip(texts, names, strict=True)
        ]
        assert choice.finish_reason == ("stop" if expected[-1] == kit.EOS else "length")
    assert {choice.finish_reason for choice in answer.choices} == {"stop", "length"}


def test_chat_reads_the_chat_template(client, kit, model, tokenizer):
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": "hé?"},
        {"role": "assistant", "content": "ja"},
        {"role": "user", "content": "so?"},
    ]
    text = "<system>be brief<end><user>hé?<end><assistant>ja<end><user>so?<end><assistant>"
    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    asked = {"model": "tiny", "max_tokens": 15, "temperature": 0.0}
    answer = client.chat.completions.create(messages=messages, **asked)
    parts = [message | {"content": [{"type": "text", "text": message["content"]}]} for message in messages]
    assert client.chat.completions.create(messages=parts, **asked).choices[0].message == answer.choices[0].message
    new = kit.greedy(model, prompt, 15)
    assert answer.choices[0].message.content == tokenizer.decode(new, skip_special_tokens=True)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), len(new))


def test_a_streamed_chat_is_the_whole_answer(client):
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "so?"}], "max_tokens": 12, "temperature": 0.0}
    plain = client.chat.completions.create(**asked)
    *chunks, last = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    assert (last.choices, last.usage) == ([], plain.usage)
    assert {(chunk.object, chunk.id) for chunk in chunks} == {("chat.completion.chunk", last.id)}
    choices = [chunk.choices[0] for chunk in chunks]
    assert choices[0].delta.role == "assistant"
    assert "".join(choice.delta.content or "" for choice in choices) == plain.choices[0].message.content
    assert [x.finish_reason for x in choices] == [None] * (len(choices) - 1) + [plain.choices[0].finish_reason]


def test_an_answer_ends_before_a_stop_string(client, kit):
    """Every token is a byte here, so that the stop string spans tokens."""
    asked = {"model": "tiny", "prompt": kit.random_tokens(9, 1), "max_tokens": 60, "temperature": 0.0}
    asked["extra_body"] = {"ignore_eos": True}
    text = client.completions.create(**asked).choices[0].text
    stop = text[20:24]
    (choice,) = client.completions.create(**asked, stop=["nothing like it", stop]).choices
    assert (choice.text, choice.finish_reason) == (text[: text.index(stop)], "stop")


def test_logprobs_of_chats(client):
    asked = {"max_tokens": 12, "temperature": 0.0, "logprobs": True, "top_logprobs": 2}
    answer = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "so?"}], **asked)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    assert all(entry.logprob == max(item.logprob for item in entry.top_logprobs) <= 0 for entry in content)


def test_answers_can_be_sent_back(client, tokenizer):
    """As OpenAI's client has them, with all of their fields, and without content."""
    asked = {"model": "tiny", "max_tokens": 6, "temperature": 0.0, "extra_body": {"ignore_eos": True}}
    first = client.chat.completions.create(messages=[{"role": "user", "content": "hé?"}], **asked).choices[0].message
    for message, text in ((first, first.content), ({"role": "assistant", "content": None}, "")):
        messages = [{"role": "user", "content": "hé?"}, message, {"role": "user", "content": "so?"}]
        usage = client.chat.completions.create(messages=messages, **asked).usage
        prompt = f"<user>hé?<end><assistant>{text}<end><user>so?<end><assistant>"
        assert usage.prompt_tokens == len(tokenizer(prompt, add_special_tokens=False)["input_ids"])


def test_choices_are_what_each_seed_gives(client, kit, model, tokenizer):
    prompts = [kit.random_tokens(70, 3), kit.random_tokens(2, 4)]
    sampling = {"temperature": 1.2, "top_p": 0.99, "top_k": 100, "min_p": 0.001, "ignore_eos": True}
    asked = {"max_tokens": 12, "seed": 7, "extra_body": sampling}
    answer = client.completions.create(model="tiny", prompt=prompts, n=3, **asked)
    engine = Engine(model, tokenizer, max_slots=1)
    params = [SamplingParams(max_new_tokens=12, seed=7 + choice, **sampling) for choice in range(3)]
    expected = [engine.generate([prompt], item)[0].text for prompt in prompts for item in params]
    assert [choice.text for choice in answer.choices] == expected
    assert len(set(expected)) > 2
    assert answer.usage.prompt_tokens == 72  # counted once
    streamed = ["" for _ in expected]
    for chunk in client.completions.create(model="tiny", prompt=prompts, n=3, stream=True, **asked):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == expected


def test_streamed_logprobs_are_those_of_the_whole_answer(client, kit):
    asked = {"model": "tiny", "prompt": kit.random_tokens(9, 2), "max_tokens": 40, "temperature": 2.0, "seed": 5}
    asked |= {"logprobs": 1, "stop": ["nothing like it"], "extra_body": {"ignore_eos": True}}
    whole = client.completions.create(**asked).choices[0].logprobs
    pieces = [chunk.choices[0].logprobs for chunk in client.completions.create(**asked, stream=True)]
    pieces = [piece for piece in pieces if piece is not None]
    for name in ("tokens", "token_logprobs", "top_logprobs"):
        assert [item for piece in pieces for item in getattr(piece, name)] == getattr(whole, name)
    assert max(len(piece.tokens) for piece in pieces) > 1  # bytes of one character


def test_defaults(client):
    """16 tokens for completions; for chat what there is room for."""
    free = {"model": "tiny", "extra_body": {"ignore_eos": True}}
    assert client.completions.create(prompt="ab", **free).usage.completion_tokens == 16
    messages = [{"role": "user", "content": "x" * 900}]
    usage = client.chat.completions.create(messages=messages, **free).usage
    assert usage.total_tokens == 1000
