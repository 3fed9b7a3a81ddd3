"""What any OpenAI-compatible server must do, asked by OpenAI's own client.

Each check takes a client and a model's name, and knows nothing of the server behind. The model may be random: checks
compare answers with one another, not with English.
"""

from __future__ import annotations

from typing import Any

import openai
import pytest

PROMPT = "The river runs past the old mill and"
MESSAGES: list[Any] = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "Where does the river run?"},
]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12}


def models(client: openai.OpenAI, model: str) -> None:
    assert model in [item.id for item in client.models.list()]


def completion(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt=PROMPT, **GREEDY)
    (choice,) = answer.choices
    assert answer.object == "text_completion"
    assert answer.model == model
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage.prompt_tokens > 0
    assert 0 < answer.usage.completion_tokens <= GREEDY["max_tokens"]
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert (choice.finish_reason == "length") == (answer.usage.completion_tokens == GREEDY["max_tokens"])


def several_prompts(client: openai.OpenAI, model: str) -> None:
    prompts = [PROMPT, PROMPT[:9], PROMPT[5:]]
    alone = [client.completions.create(model=model, prompt=item, **GREEDY) for item in prompts]
    together = client.completions.create(model=model, prompt=prompts, **GREEDY)
    assert [choice.index for choice in together.choices] == [0, 1, 2]
    assert [choice.text for choice in together.choices] == [answer.choices[0].text for answer in alone]
    assert together.usage.prompt_tokens == sum(answer.usage.prompt_tokens for answer in alone)


def token_ids(client: openai.OpenAI, model: str) -> None:
    one = client.completions.create(model=model, prompt=[5, 6, 7], **GREEDY)
    two = client.completions.create(model=model, prompt=[[5, 6, 7], [8, 9]], **GREEDY)
    assert one.usage.prompt_tokens == 3
    assert two.usage.prompt_tokens == 5
    assert two.choices[0].text == one.choices[0].text


def chat(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=MESSAGES, **GREEDY)
    (choice,) = answer.choices
    assert answer.object == "chat.completion"
    assert choice.message.role == "assistant"
    assert choice.finish_reason in ("stop", "length")
    assert 0 < answer.usage.completion_tokens <= GREEDY["max_tokens"]
    parts = [{"role": item["role"], "content": [{"type": "text", "text": item["content"]}]} for item in MESSAGES]
    again = client.chat.completions.create(
        model=model, messages=parts, temperature=0.0, max_completion_tokens=GREEDY["max_tokens"]
    )
    assert again.choices[0].message.content == choice.message.content


def chat_stream(client: openai.OpenAI, model: str) -> None:
    plain = client.chat.completions.create(model=model, messages=MESSAGES, **GREEDY)
    chunks = list(
        client.chat.completions.create(
            model=model, messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    *chunks, last = chunks
    assert last.choices == []
    assert last.usage.model_dump() == plain.usage.model_dump()
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == plain.choices[0].message.content
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + [plain.choices[0].finish_reason]


def stop_string(client: openai.OpenAI, model: str) -> None:
    free = client.completions.create(model=model, prompt=PROMPT, extra_body={"ignore_eos": True}, **GREEDY)
    text = free.choices[0].text
    stop = text[3:5]
    answer = client.completions.create(
        model=model, prompt=PROMPT, stop=["no such text", stop], extra_body={"ignore_eos": True}, **GREEDY
    )
    assert answer.choices[0].text == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def seeds_and_choices(client: openai.OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"max_tokens": 16, "temperature": 1.5, "extra_body": {"ignore_eos": True}}
    first, again = (client.completions.create(model=model, prompt=PROMPT, n=3, seed=1, **asked) for _ in range(2))
    texts = [[choice.text for choice in answer.choices] for answer in (first, again)]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 1
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert first.usage.completion_tokens == 48


def logprobs(client: openai.OpenAI, model: str) -> None:
    chosen = client.chat.completions.create(
        model=model, messages=MESSAGES, logprobs=True, top_logprobs=2, extra_body={"ignore_eos": True}, **GREEDY
    )
    content = chosen.choices[0].logprobs.content
    assert len(content) == chosen.usage.completion_tokens
    for entry in content:
        assert entry.logprob <= 0
        assert entry.logprob == max(item.logprob for item in entry.top_logprobs)  # greedy
    legacy = client.completions.create(model=model, prompt=PROMPT, logprobs=2, **GREEDY).choices[0].logprobs
    assert len(legacy.tokens) == len(legacy.token_logprobs) == len(legacy.top_logprobs)


def sampling_parameters(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(
        model=model,
        prompt=PROMPT,
        max_tokens=6,
        temperature=0.8,
        top_p=0.9,
        extra_body={"top_k": 20, "min_p": 0.01},
    )
    assert answer.choices[0].finish_reason in ("stop", "length")


def refusals(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="no-such-model", prompt=PROMPT, max_tokens=2)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model=model, prompt=PROMPT, max_tokens=2, temperature=-1.0)
    with pytest.raises(openai.BadRequestError, match="token"):
        client.completions.create(model=model, prompt=[5] * 3000, max_tokens=2)


CHECKS = [
    models,
    completion,
    several_prompts,
    token_ids,
    chat,
    chat_stream,
    stop_string,
    seeds_and_choices,
    logprobs,
    sampling_parameters,
    refusals,
]
