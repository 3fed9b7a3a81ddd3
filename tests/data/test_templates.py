from __future__ import annotations

import pytest

from lolcats.data import templates
from lolcats.errors import UserError

QWEN_LIKE = (  # drops what stands before "</think>" from all answers but the last
    "{% for message in messages %}{% if message['role'] == 'assistant' and not loop.last %}"
    "<|assistant|>{{ message['content'].split('</think>')[-1] }}<|end|>\n"
    "{% else %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_alpaca_without_input_is_byte_exact() -> None:
    (document,) = templates.alpaca({"instruction": "Say hi.", "input": "", "output": "Hi!"})
    prompt = (
        "Below is an instruction that describes a task. Write a response that appropriately completes the "
        "request.\n\n### Instruction:\nSay hi.\n\n### Response:\n"
    )
    assert document.segments == [(prompt, False), ("Hi!", True)]
    assert document.append_eos
    assert not document.continues


def test_alpaca_with_input_is_byte_exact_and_leaves_braces_alone() -> None:
    (document,) = templates.alpaca({"instruction": "Add {x}.", "input": "{1}", "output": "2"})
    prompt = (
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nAdd {x}.\n\n### Input:\n{1}\n\n### Response:\n"
    )
    assert document.segments == [(prompt, False), ("2", True)]


def test_alpaca_skips_missing_answers_but_keeps_empty_ones() -> None:
    assert templates.alpaca({"instruction": "a", "output": None}) == []
    assert templates.alpaca({"instruction": "", "input": "", "output": "b"}) == []
    assert templates.alpaca({"instruction": "a", "output": ""})[0].segments[1] == ("", True)


def test_chat_labels_every_assistant_turn_and_its_end(tokenizer) -> None:
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q1"},
        {"role": "assistant", "content": "a1"},
        {"role": "user", "content": "q2"},
        {"role": "assistant", "content": "a2"},
        {"role": "user", "content": "never answered"},
    ]
    (document,) = templates.chat(tokenizer)({"messages": messages})
    assert document.segments == [
        ("<|system|>s<|end|>\n<|user|>q1<|end|>\n<|assistant|>", False),
        ("a1<|end|>", True),
        ("\n<|user|>q2<|end|>\n<|assistant|>", False),
        ("a2<|end|>", True),
        ("\n", False),
    ]
    assert not document.append_eos


def test_chat_takes_alpaca_columns(tokenizer) -> None:
    (document,) = templates.chat(tokenizer)({"instruction": "i", "input": "c", "output": "o"})
    assert document.segments[:2] == [("<|user|>i\n\nc<|end|>\n<|assistant|>", False), ("o<|end|>", True)]


def test_chat_template_that_rewrites_history_gives_one_document_per_answer(new_tokenizer) -> None:
    messages = [
        {"role": "user", "content": "q1"},
        {"role": "assistant", "content": "why</think>a1"},
        {"role": "user", "content": "q2"},
        {"role": "assistant", "content": "so</think>a2"},
    ]
    first, second = templates.chat(new_tokenizer(QWEN_LIKE))({"messages": messages})
    assert [text for text, label in first.segments if label] == ["why</think>a1<|end|>"]
    assert [text for text, label in second.segments if label] == ["so</think>a2<|end|>"]
    assert second.segments[0][0] == "<|user|>q1<|end|>\n<|assistant|>a1<|end|>\n<|user|>q2<|end|>\n<|assistant|>"


def test_chat_templates_that_do_not_do(new_tokenizer) -> None:
    with pytest.raises(UserError, match="needs a tokenizer with a chat template"):
        templates.chat(new_tokenizer(None))
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}X{% endif %}"
    with pytest.raises(UserError, match="cannot be told apart"):
        templates.chat(new_tokenizer(template))({"instruction": "i", "output": "o"})


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([{"from": "human", "value": "x"}], "expected messages with role and content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "expected text as the content of a user message"),
    ],
)
def test_chat_refuses_other_shapes(tokenizer, messages, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        templates.chat(tokenizer)({"messages": messages})
