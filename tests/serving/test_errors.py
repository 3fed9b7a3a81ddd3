"""Bad requests: the right status, and a body in OpenAI's form that says what is wrong."""

import json

import pytest

from lolcats.generation.engine import Engine
from lolcats.serving.server import MAX_BODY_BYTES, Service
from lolcats.serving.settings import ServerSettings

TEXT = {"prompt": "hello", "max_tokens": 2}
CHAT = {"messages": [{"role": "user", "content": "hello"}]}
COMPLETIONS, CHATS = "completions", "chat/completions"


def said(content, **message):
    return {"messages": [{"role": "user", "content": content} | message]}


# (path, body, part of the message, param)
BAD = [
    (COMPLETIONS, b"{not json", "not valid JSON", None),
    (COMPLETIONS, b"[" * 100_000, "", None),
    (COMPLETIONS, b"[]", "expected a JSON object", None),
    (COMPLETIONS, b'{"prompt": "a", "temperature": NaN}', "temperature: ", "temperature"),
    (COMPLETIONS, b'{"prompt": "\\ud800"}', "", None),
    (COMPLETIONS, {}, "prompt: missing parameter", "prompt"),
    (COMPLETIONS, {"prompt": 3}, "expected text", "prompt"),
    (COMPLETIONS, {"prompt": []}, "expected text", "prompt"),
    (COMPLETIONS, {"prompt": ""}, "at least one", None),
    (COMPLETIONS, {"prompt": [99_999]}, "token ids from 0 to 259", "prompt"),
    (COMPLETIONS, {"prompt": "x" * 1000}, "more than the 1000", "prompt"),
    (COMPLETIONS, {"prompt": [[3]] * 2049}, "up to 2048 prompts", "prompt"),
    (COMPLETIONS, TEXT | {"temperature": -1}, "temperature: Input should be", "temperature"),
    (COMPLETIONS, TEXT | {"max_tokens": 0}, "max_tokens: ", "max_tokens"),
    (COMPLETIONS, TEXT | {"max_tokens": 999}, "more than the 1000", "prompt"),
    (COMPLETIONS, TEXT | {"n": 0}, "n: ", "n"),
    (COMPLETIONS, TEXT | {"seed": 2**63}, "seed: ", "seed"),
    (COMPLETIONS, TEXT | {"stop": ""}, "stop", "stop.0"),
    (COMPLETIONS, TEXT | {"stop_token_ids": [260]}, "outside the vocabulary", None),
    (COMPLETIONS, TEXT | {"logit_bias": {"5": 100}}, "vllm serve", "logit_bias"),
    (COMPLETIONS, TEXT | {"temprature": 1}, "'temprature' is not supported", "temprature"),
    (COMPLETIONS, TEXT | {"x" * 100_000: 1}, "is not supported", None),
    (CHATS, said("", role="king"), "role", "messages.0.role"),
    (CHATS, said(None), "missing content", "messages.0"),
    (CHATS, said("x" * 100_000), "9092 or more prompt tokens", "prompt"),  # not tokenized
    (CHATS, said([{"type": "image_url", "image_url": {"url": "x"}}]), "the language model alone", None),
    (CHATS, said(["hello"]), "expected text or parts", "messages.0.content"),
    (CHATS, said("", tool_calls=[{"id": "a"}]), "tool_calls is not supported by this server; vLLM's", "messages.0"),
    (CHATS, {"messages": [0] * 2049}, "at most 2048", "messages"),
    (CHATS, CHAT | {"top_logprobs": 2}, "top_logprobs needs logprobs=true", None),
    (CHATS, CHAT | {"max_completion_tokens": 10**30}, "", "max_tokens"),
    (CHATS, CHAT | {"tools": [{"type": "function"}]}, "'tools' is not supported", "tools"),
    (CHATS, CHAT | {"response_format": {"type": "json_object"}}, "is not supported", "response_format"),
]


def check_error(answer, status, message, param=None):
    found, body, _ = answer
    assert found == status, body
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert message in body["error"]["message"]
    if param is not None:
        assert body["error"]["param"] == param


@pytest.mark.parametrize(
    ("path", "body", "message", "param"), BAD, ids=[f"{index}-{row[2]}" for index, row in enumerate(BAD)]
)
def test_bad_requests(server, path, body, message, param):
    check_error(server.request("POST", f"/v1/{path}", body), 400, message, param)
    if isinstance(body, dict):
        check_error(server.request("POST", f"/v1/{path}", body | {"stream": True}), 400, message, param)


def test_values_that_ask_for_nothing_are_taken(server):
    nothing = {"tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "logit_bias": {}, "stop": None}
    ignored = {"user": "me", "metadata": {"a": "b"}, "presence_penalty": 0, "n": None, "top_k": -1, "model": "tiny"}
    ignored |= {"reasoning_effort": "low", "verbosity": "low", "store": False, "service_tier": "auto"}
    ignored |= {"stream": True, "stream_options": {"include_obfuscation": False}}
    status, body, _ = server.request("POST", "/v1/chat/completions", CHAT | nothing | ignored | {"max_tokens": 1})
    assert status == 200, body


NAMES = b",".join(b'"%d":0' % number for number in range(300_000))
HALF = MAX_BODY_BYTES // 2 - 100
HOSTILE = [
    (CHATS, b'{"messages":[' + b"0," * HALF + b"0]}"),
    (CHATS, b'{"messages":[{"role":"user","content":[' + b"0," * HALF + b"0]}]}"),
    (CHATS, b'{"messages":[' + b"{}," * 2000 + b"{" + NAMES + b"}]}"),
    (COMPLETIONS, b'{"prompt":"a","stop_token_ids":[' + b"0," * HALF + b"-1]}"),
    (COMPLETIONS, b'{"prompt":[' + b"5," * HALF + b"5]}"),
    (COMPLETIONS, b'{"prompt":"' + b"x " * HALF + b'"}'),
    (COMPLETIONS, b'{"prompt":"a",' + NAMES + b"}"),
]


@pytest.mark.parametrize(("path", "body"), HOSTILE, ids=lambda value: None if isinstance(value, str) else value[:32])
def test_large_bodies_are_rejected(server, path, body):
    check_error(server.request("POST", f"/v1/{path}", body), 400, "")


def test_other_paths_methods_models_and_types(server):
    check_error(server.request("GET", "/v1/nothing"), 404, "/v1/nothing")
    check_error(server.request("GET", "/v1/models/other"), 404, "no model 'other'")
    check_error(server.request("POST", "/v1/completions", TEXT | {"model": "m" * 100_000}), 404, "no model", "model")
    check_error(server.request("GET", "/v1/completions"), 405, "Method Not Allowed")
    plain = server.request("POST", "/v1/completions", TEXT, {"content-type": "text/plain"})
    check_error(plain, 400, "Content-Type: application/json")


def test_a_body_that_is_too_large(server):
    just = json.dumps(TEXT).encode()
    assert server.request("POST", "/v1/completions", just.ljust(MAX_BODY_BYTES))[0] == 200
    assert server.request("POST", "/v1/completions", just.ljust(MAX_BODY_BYTES + 1))[0] == 413


def test_the_api_key(serve):
    with serve(api_key="sécret") as server:
        right = {"authorization": "Bearer sécret".encode().decode("latin-1")}
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Bearer "}):
            for path, body in (("completions", TEXT), ("chat/completions", CHAT), ("models", None)):
                method = "GET" if body is None else "POST"
                check_error(server.request(method, f"/v1/{path}", body, headers), 401, "API key")
        assert server.request("POST", "/v1/completions", TEXT, right)[0] == 200
        assert server.request("GET", "/health")[0] == 200


@pytest.mark.parametrize(
    ("template", "message"),
    [(None, "no chat template"), ("{{ raise_exception('roles must alternate') }}", "roles must alternate")],
)
def test_chat_templates_that_are_absent_or_refuse(serve, kit, template, message):
    tokenizer = kit.make_tokenizer()
    tokenizer.chat_template = template
    with serve(tokenizer=tokenizer) as server:
        check_error(server.request("POST", "/v1/chat/completions", CHAT), 400, message)


def test_a_model_that_fails(serve, kit):
    model = kit.make_model()
    model.get_input_embeddings().weight.data[7] = float("nan")
    with serve(model=model) as server:
        bad = {"prompt": [7], "max_tokens": 5}
        check_error(server.request("POST", "/v1/completions", bad), 500, "not finite")
        status, text, _ = server.request("POST", "/v1/completions", bad | {"stream": True})
        assert status == 200
        check_error((500, json.loads(text.removeprefix("data: ")), {}), 500, "not finite")
        assert server.request("POST", "/v1/completions", {"prompt": [8], "max_tokens": 1})[0] == 200


def test_the_smallest_limit_holds(kit, model, tokenizer):
    linear = Engine(model, tokenizer, max_slots=1)
    hybrid = Engine(kit.make_model(attention={"exact": [1]}), tokenizer, max_slots=1, max_length=50)
    for asked, expected in ((None, [256, 50]), (9999, [9999, 50])):  # max_position_embeddings, its buffers
        settings = ServerSettings(model_name="m", max_length=asked)
        assert [Service(engine, settings).max_length for engine in (linear, hybrid)] == expected
