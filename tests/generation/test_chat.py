"""Conversations: the answers of the whole text, while each turn feeds only itself."""

import pytest
import torch

from lolcats.errors import UserError
from lolcats.generation.chat import Chat
from lolcats.generation.sampling import SamplingParams

PARAMS = SamplingParams(max_new_tokens=12)
TURNS = ["Hello there", "and then?", "why, so", "good"]


def say(chat, text, params=PARAMS):
    return "".join(chat.ask(text, params))


def seen_tokens(chat):
    counts = chat.engine.counts
    return counts["tokens_prefilled"] + counts["tokens_decoded"]


def test_answers_are_those_of_the_whole_conversation(kit, any_model, make_engine):
    chat = Chat(make_engine(any_model, max_slots=1), "Be brief.")
    for text in TURNS:
        before = seen_tokens(chat)
        answer = say(chat, text)
        # <end> of the last answer, its last token, <user>, the text, <end>, <assistant>; then the answer
        system = 20 if before == 0 else 0
        assert seen_tokens(chat) - before <= system + 2 + 1 + len(text) + 2 + len(chat.result.token_ids)
        assert not chat.fed_again
        prompt = chat.snapshot.token_ids[: chat.result.prompt_tokens]
        assert chat.result.token_ids == kit.greedy(any_model, prompt, 12)
        assert chat.messages[-1] == {"role": "assistant", "content": answer}
    # what the model saw is the conversation as the template writes it, the end tokens of answers aside
    roles = [message["role"] for message in chat.messages]
    assert roles == ["system", *["user", "assistant"] * len(TURNS)]
    template = chat.engine.tokenizer.apply_chat_template(chat.messages[:-1], tokenize=False, add_generation_prompt=True)
    assert template == chat.rendered


def test_the_models_own_end_is_replaced_by_the_templates(own_model, make_engine, tokenizer):
    """What the model sees after an answer is what the template writes, however the model ended it."""
    own_model.generation_config.eos_token_id = list(range(20))
    chat = Chat(make_engine(own_model, max_slots=1))
    params = SamplingParams(max_new_tokens=9, temperature=3.0, seed=1)
    reasons = []
    say(chat, "x", params)
    for text in TURNS * 2:
        said, reason = chat.snapshot.token_ids, chat.result.finish_reason
        reasons.append(reason)
        say(chat, text, params)
        before = said[:-1] if reason == "stop" else said
        between = tokenizer(f"<end><user>{text}<end><assistant>")["input_ids"]
        assert chat.snapshot.token_ids == before + between + chat.result.token_ids
    assert set(reasons) == {"stop", "length"}


@pytest.mark.parametrize(
    "template",
    [
        # earlier answers are left out of the text
        "{% for message in messages %}{% if message.role == 'user' or loop.last %}<{{ message.role }}>"
        "{{ message.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}",
        # the number of messages stands at the beginning
        "{{ messages | length }}{% for message in messages %}<{{ message.role }}>{{ message.content }}<end>"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}",
    ],
    ids=["drops", "counts"],
)
def test_templates_that_rewrite_the_past(kit, model, make_engine, template):
    """The conversation is fed again, and the answer is the right one."""
    engine = make_engine(max_slots=1)
    engine.tokenizer = kit.make_tokenizer()
    engine.tokenizer.chat_template = template
    chat = Chat(engine)
    say(chat, TURNS[0], SamplingParams(max_new_tokens=12, ignore_eos=True))
    assert not chat.fed_again
    say(chat, TURNS[1])
    assert chat.fed_again
    ids = engine.tokenizer(chat.rendered, add_special_tokens=False)["input_ids"]
    assert chat.snapshot.token_ids == ids + kit.greedy(model, ids, 12)


def test_a_cancelled_answer_stays_as_far_as_it_came(make_engine):
    chat = Chat(make_engine(max_slots=1))
    pieces = chat.ask("Hello", SamplingParams(max_new_tokens=1000, ignore_eos=True))
    said = next(pieces)
    chat.cancel()
    said += "".join(pieces)
    assert chat.messages[-1] == {"role": "assistant", "content": said}
    assert say(chat, "go on")
    assert not chat.fed_again


def test_a_failed_turn_leaves_the_conversation(kit, own_model, make_engine):
    (poisoned,) = kit.make_tokenizer()("~")["input_ids"]
    own_model.get_input_embeddings().weight.data[poisoned] = torch.nan
    chat = Chat(make_engine(own_model, max_slots=1))
    say(chat, "Hello")
    before = list(chat.messages)
    with pytest.raises(UserError, match="the model failed"):
        say(chat, "~")
    assert chat.messages == before
    assert say(chat, "Hello")
