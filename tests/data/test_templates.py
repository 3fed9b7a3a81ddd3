import pytest

from lolcats.data import templates
from lolcats.errors import UserError

QWEN_LIKE = (  # drops what stands before "</think>" from all answers but the last
    "{% for message in messages %}{% if message['role'] == 'assistant' and not loop.last %}"
    "<|assistant|>{{ message['content'].split('</think>')[-1] }}<|end|>\n"
    "{% else %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


NO_END = (  # GLM-4: a turn ends by the token that begins the next
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
THINKS = (  # DeepSeek: the prompt begins a thought, the answers in a conversation have none
    "{% for m in messages %}{% if m['role'] == 'user' %}<|user|>{{ m['content'] }}{% else %}"
    "<|assistant|>{{ m['content'].split('</think>')[-1] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
TOOLS = (
    "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls %}<call>{{ call.function | tojson }}{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}"
)
USER, ASSISTANT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def labels(documents: list[templates.Document]) -> list[str]:
    return [text for document in documents for text, label in document.segments if label]


def converse(tokenizer, messages, **row) -> list[templates.Document]:
    return templates.records("chat", tokenizer)({"messages": messages, **row})


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (
            {"instruction": "Say hi.", "input": "", "output": "Hi!"},
            "Below is an instruction that describes a task. Write a response that appropriately completes the "
            "request.\n\n### Instruction:\nSay hi.\n\n### Response:\n",
        ),
        (
            {"instruction": "Add {x}.", "input": "{1}", "output": "2"},
            "Below is an instruction that describes a task, paired with an input that provides further context. "
            "Write a response that appropriately completes the request.\n\n"
            "### Instruction:\nAdd {x}.\n\n### Input:\n{1}\n\n### Response:\n",
        ),
    ],
)
def test_alpaca_is_byte_exact(row, expected) -> None:
    (document,) = templates.records("alpaca")(row)
    assert document.segments == [(expected, False), (row["output"], True)]
    assert document.append_eos


def test_alpaca_skips_missing_answers_but_keeps_empty_ones() -> None:
    for row in ({"instruction": "a", "output": None}, {"instruction": "", "input": "", "output": "b"}):
        with pytest.raises(templates.SkippedRow, match="no request, or no answer"):
            templates.records("alpaca")(row)
    assert templates.records("alpaca")({"instruction": "a", "output": ""})[0].segments[1] == ("", True)


def test_chat_labels_every_assistant_turn_and_its_end(tokenizer) -> None:
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q1"},
        {"role": "assistant", "content": "a1"},
        {"role": "user", "content": "q2"},
        {"role": "assistant", "content": "a2"},
        {"role": "user", "content": "never answered"},
    ]
    (document,) = templates.records("chat", tokenizer)({"messages": messages})
    assert document.segments == [
        ("<|system|>s<|end|>\n<|user|>q1<|end|>\n<|assistant|>", False),
        ("a1<|end|>", True),
        ("\n<|user|>q2<|end|>\n<|assistant|>", False),
        ("a2<|end|>", True),
        ("\n", False),
    ]
    assert not document.append_eos


def test_chat_template_that_rewrites_history_gives_one_document_per_answer(new_tokenizer) -> None:
    messages = [
        {"role": "user", "content": "q1"},
        {"role": "assistant", "content": "why</think>a1"},
        {"role": "user", "content": "q2"},
        {"role": "assistant", "content": "so</think>a2"},
    ]
    first, second = templates.records("chat", new_tokenizer(QWEN_LIKE))({"messages": messages})
    assert [text for text, label in first.segments if label] == ["why</think>a1<|end|>"]
    assert [text for text, label in second.segments if label] == ["so</think>a2<|end|>"]
    assert second.segments[0][0] == "<|user|>q1<|end|>\n<|assistant|>a1<|end|>\n<|user|>q2<|end|>\n<|assistant|>"


def test_chat_templates_that_do_not_do(new_tokenizer) -> None:
    with pytest.raises(UserError, match="need a tokenizer with a chat template"):
        templates.chat(new_tokenizer(None))
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}X{% endif %}"
    with pytest.raises(UserError, match="cannot be told apart"):
        templates.records("chat", new_tokenizer(template))({"instruction": "i", "output": "o"})


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([{"speaker": "human", "value": "x"}], "expected messages with role and content, or from and value"),
        ([{"role": "user", "content": 7}], "expected text as the content of a message of role 'user', got int"),
        ([USER, {"role": "narrator", "content": "x"}], "unknown role 'narrator': expected"),
        (["hello", "hi"], "expected messages with role and content"),
    ],
)
def test_conversations_of_another_shape_stop_the_run(tokenizer, messages, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        converse(tokenizer, messages)


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (None, [USER], "no assistant message to learn"),
        (None, [USER, {**ASSISTANT, "weight": 0}], "no assistant message to learn"),
        (None, [USER, {**ASSISTANT, "weight": "0"}], "no assistant message to learn"),
        (None, [USER, {**ASSISTANT, "weight": False}], "no assistant message to learn"),
        (None, [USER, {"role": "assistant", "content": None, "refusal": "no"}], "role 'assistant' without content"),
        (None, [{"role": "user", "content": None}, ASSISTANT], "a message of the role 'user' without content"),
        (None, [{"role": "user", "content": [{"type": "image"}]}, ASSISTANT], "parts of type 'image', not text"),
        (None, [USER, {**ASSISTANT, "reasoning_content": "because"}], "leaves out reasoning_content"),
        (None, [USER, {**ASSISTANT, "tool_calls": [WEATHER]}], "leaves out tool_calls"),
        (THINKS, [USER, {"role": "assistant", "content": "<think>because</think>a"}], "leaves out thoughts"),
        ("{{ raise_exception('roles must alternate') }}", [USER, ASSISTANT], "does not take it: roles must alternate"),
    ],
)
def test_what_a_template_cannot_show_is_skipped_with_the_reason(new_tokenizer, template, messages, reason) -> None:
    tokenizer = new_tokenizer() if template is None else new_tokenizer(template)
    with pytest.raises(templates.SkippedRow, match=reason):
        converse(tokenizer, messages)


def test_tools_calls_and_thoughts_are_learnt(new_tokenizer) -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}, "id": None}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Is it "}, {"type": "text", "text": "warm?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "thinking": "ask"},
        {"role": "tool", "content": "20 degrees", "tool_calls": None},
        {"role": "assistant", "content": "Yes."},
    ]
    for tools in ([WEATHER], f"[{WEATHER}]".replace("'", '"')):
        (document,) = converse(new_tokenizer(TOOLS), messages, tools=tools)
        assert labels([document]) == [
            '<think>ask</think><call>{"name": "weather", "arguments": {"city": "Rome"}}<|end|>',
            "Yes.<|end|>",
        ]
        assert document.segments[0][0].endswith('"object"}}}]<|end|><|user|>Is it warm?<|end|><|assistant|>')
    with pytest.raises(templates.SkippedRow, match="leaves out tools"):
        converse(new_tokenizer(), [USER, ASSISTANT], tools=[WEATHER])


def test_turns_of_weight_0_are_read_and_not_learnt(new_tokenizer) -> None:
    messages = [USER, {"role": "assistant", "content": None, "weight": 0}, USER]
    messages += [{"role": "assistant", "content": "bad", "weight": 0}, USER, {**ASSISTANT, "weight": 1}]
    for template in (TOOLS, MARKED):
        (document,) = converse(new_tokenizer(template), messages)
        assert labels([document]) == ["a<|end|>"]
        assert "bad" in document.segments[0][0]


def test_the_system_text_of_a_pair_is_read(new_tokenizer) -> None:
    row = {"instruction": "q", "output": "a", "system": "be kind"}
    (document,) = templates.records("chat", new_tokenizer(TOOLS))(row)
    assert "be kind" in document.segments[0][0]


def test_labels_are_those_that_the_template_marks(new_tokenizer) -> None:
    (document,) = converse(new_tokenizer(MARKED), [USER, ASSISTANT, USER, {"role": "assistant", "content": "b"}, USER])
    assert labels([document]) == ["a<|end|>", "b<|end|>"]
    assert not document.append_eos


def test_templates_print_the_same_date_every_day(new_tokenizer) -> None:
    today = "{{ strftime_now('%Y') }}{{ date_string }}" + TOOLS
    (document,) = converse(new_tokenizer(today), [USER, ASSISTANT])
    assert document.segments[0][0].startswith("202426 Jul 2024<|user|>q")


def test_conversations_that_begin_with_the_assistant(new_tokenizer) -> None:
    picky = "{{ raise_exception('no user') if messages[0].role != 'user' and messages|length < 2 }}" + TOOLS
    first = {"role": "assistant", "content": "Welcome."}
    for template, expected in ((TOOLS, ["Welcome.<|end|>", "a<|end|>"]), (picky, ["a<|end|>"])):
        (document,) = converse(new_tokenizer(template), [first, USER, ASSISTANT])
        assert labels([document]) == expected
        assert "Welcome." in "".join(text for text, _ in document.segments)


def test_turns_end_by_the_token_that_begins_the_next(new_tokenizer) -> None:
    tokenizer = new_tokenizer(NO_END)
    (document,) = converse(tokenizer, [USER, ASSISTANT, USER, {"role": "assistant", "content": "b"}])
    assert labels([document]) == ["\na<|user|>", "\nb<|user|>"]
    assert not document.append_eos
    assert templates.end_of_turn(tokenizer) == tokenizer.convert_tokens_to_ids("<|user|>")
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    tokenizer = new_tokenizer(plain + "{% if add_generation_prompt %}assistant: {% endif %}")
    documents = converse(tokenizer, [USER, ASSISTANT, USER, {"role": "assistant", "content": "b"}])
    assert [document.append_eos for document in documents] == [True, True]  # one for each answer
    assert templates.end_of_turn(tokenizer) is None


def test_a_prompt_that_begins_a_thought(new_tokenizer) -> None:
    (document,) = converse(new_tokenizer(THINKS), [USER, ASSISTANT, USER, {"role": "assistant", "content": "b"}])
    assert labels([document]) == ["a<|end|>", "b<|end|>"]


@pytest.mark.parametrize("form", ["chat", "alpaca", "text"])
def test_a_file_may_hold_several_formats(tokenizer, form: str) -> None:
    """Row by row, each with the columns of all."""
    read = templates.records(form, tokenizer)
    columns = dict.fromkeys(("messages", "conversations", "instruction", "output", "prompt", "completion", "text"))
    shared = [
        {"messages": [USER, ASSISTANT]},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": ""},
        {"conversations": [{"role": "human", "content": "q"}, {"role": "model", "content": "a"}]},
        {"prompt": [USER], "completion": [ASSISTANT]},
    ]
    for row in shared:
        assert labels(read(columns | row)) == ["a<|end|>"]
    history = {"prompt": [USER, ASSISTANT, USER], "completion": [{"role": "assistant", "content": "b"}]}
    assert labels(read(columns | history)) == ["b<|end|>"]
    asked = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": "be brief"}
    assert read(columns | asked)[0].segments[0][0].startswith("<|system|>be brief<|end|>")
    answers = {"instruction": "q", "output": "a"}, {"prompt": "q", "completion": "a"}, {"question": "q", "answer": "a"}
    for row in answers:
        assert labels(read(columns | row)) == ["a<|end|>" if form == "chat" else "a"]
    assert labels(read(columns | {"text": "plain"})) == ["plain"]
    with pytest.raises(templates.SkippedRow):
        read(columns)
    with pytest.raises(templates.SkippedRow):  # where the format was asked for
        templates.records("text", only=True)(columns | shared[0])
