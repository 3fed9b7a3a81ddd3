"""Bad requests: the right status, and a body in OpenAI's form that says what is wrong."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from lolcats.generation.engine import Engine
from lolcats.serving.protocol import ApiError, CompletionRequest
from lolcats.serving.service import max_length, prepare
from lolcats.serving.settings import ServerSettings

CHAT = {"messages": [{"role": "user", "content": "hello"}]}
DEFAULT = ServerSettings(model_name="m")
THREADS = ThreadPoolExecutor(1)
TEXT = {"prompt": "hello", "max_tokens": 2}


def image(part):
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "what is this?"}, part]}]}


# (kind, body, status, part of the message, param)
BAD = [
    ("completions", b"{not json", 400, "not valid JSON", None),
    ("completions", b'{"prompt": "\xff"}', 400, "not valid JSON", None),
    ("completions", b'{"prompt": "\\ud800"}', 400, "not valid JSON", None),
    ("completions", b'{"prompt": "a", "temperature": NaN}', 400, "not valid JSON", None),
    ("completions", b"[" * 100_000, 400, "not valid JSON", None),
    ("completions", b"[]", 400, "expected a JSON object", None),
    ("completions", {}, 400, "missing parameter 'prompt'", "prompt"),
    ("completions", {"prompt": 3}, 400, "expected text", "prompt"),
    ("completions", {"prompt": []}, 400, "expected text", "prompt"),
    ("completions", {"prompt": ""}, 400, "at least one", None),
    ("completions", {"prompt": [99_999]}, 400, "token ids from 0 to 259", "prompt"),
    ("completions", TEXT | {"model": "other"}, 404, "no model 'other'", "model"),
    ("completions", TEXT | {"temperature": -1}, 400, "temperature: Input should be", "temperature"),
    ("completions", TEXT | {"max_tokens": 0}, 400, "max_tokens=0", "max_tokens"),
    ("completions", TEXT | {"max_tokens": 10**9}, 400, "from 1 to 4096", "max_tokens"),
    ("completions", TEXT | {"max_tokens": 999}, 400, "more than the 1000", "prompt"),
    ("completions", {"prompt": "x" * 1000}, 400, "more than the 1000", "prompt"),
    ("completions", TEXT | {"n": 0}, 400, "n: ", "n"),
    ("completions", TEXT | {"n": 65}, 400, "more than the 64 answers", "n"),
    ("completions", TEXT | {"prompt": ["a"] * 33, "n": 2}, 400, "more than the 64 answers", "n"),
    ("completions", TEXT | {"n": 10**30}, 400, "n: ", "n"),
    ("completions", TEXT | {"max_tokens": 10**30}, 400, "max_tokens: ", "max_tokens"),
    ("completions", TEXT | {"top_k": 10**30}, 400, "top_k: ", "top_k"),
    ("completions", TEXT | {"seed": 2**63}, 400, "seed: ", "seed"),
    ("completions", TEXT | {"temperature": 1e300}, 400, "temperature: ", "temperature"),
    ("completions", TEXT | {"repetition_penalty": 1e-30}, 400, "repetition_penalty: ", "repetition_penalty"),
    ("completions", TEXT | {"logit_bias": {"5": 100}}, 400, "lolcats serve --engine vllm", "logit_bias"),
    ("completions", {"prompt": [5] * 1000}, 400, "shorten the prompt", "prompt"),
    ("completions", {"prompt": "x" * 100_000}, 400, "at least", "prompt"),
    ("completions", TEXT | {"model": "m" * 100_000}, 404, "no model", "model"),
    ("completions", TEXT | {"x" * 100_000: 1}, 400, "unknown parameter", None),
    ("completions", TEXT | {"logprobs": 21}, 400, "logprobs", "logprobs"),
    ("completions", TEXT | {"logprobs": 1, "echo": True}, 400, "echo with logprobs", "echo"),
    ("completions", TEXT | {"stop": ""}, 400, "stop", "stop.0"),
    ("completions", TEXT | {"stop_token_ids": [260]}, 400, "outside the vocabulary", None),
    ("completions", TEXT | {"best_of": 4}, 400, "best_of is not supported", "best_of"),
    ("completions", TEXT | {"stream_options": {"include_usage": True}}, 400, "needs stream", "stream_options"),
    ("completions", TEXT | {"temprature": 1}, 400, "unknown parameter 'temprature'", "temprature"),
    ("chat/completions", {"messages": [{"role": "king", "content": ""}]}, 400, "role", "messages.0.role"),
    ("chat/completions", {"messages": [{"role": "user"}]}, 400, "missing content", "messages.0"),
    ("chat/completions", {"messages": [{"role": "user", "content": None}]}, 400, "missing content", "messages.0"),
    ("chat/completions", {"messages": [0] * 2048}, 400, "messages.0: ", "messages.0"),
    ("chat/completions", {"messages": [0] * 2049}, 400, "at most 2048", "messages"),
    ("chat/completions", image({"type": "image_url", "image_url": {"url": "x"}}), 400, "lolcats.put_back", None),
    ("chat/completions", image({"type": "text"}), 400, "expected text or parts", "messages.0.content"),
    ("chat/completions", image("hello"), 400, "expected text or parts", "messages.0.content"),
    ("chat/completions", CHAT | {"max_completion_tokens": 10**30}, 400, "", "max_completion_tokens"),
    (
        "chat/completions",
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]},
        400,
        "tool_calls is not supported by this server; vLLM's has it",
        "messages.0",
    ),
    ("chat/completions", CHAT | {"top_logprobs": 2}, 400, "needs logprobs", "top_logprobs"),
    ("chat/completions", CHAT | {"tools": [{"type": "function"}]}, 400, "tools is not supported", "tools"),
    ("chat/completions", CHAT | {"response_format": {"type": "json_object"}}, 400, "not supported", "response_format"),
    ("chat/completions", CHAT | {"max_completion_tokens": 5000}, 400, "from 1 to 4096", "max_tokens"),
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
    ("kind", "body", "status", "message", "param"), BAD, ids=[f"{index}-{row[3]}" for index, row in enumerate(BAD)]
)
def test_bad_requests(server, kind, body, status, message, param):
    check_error(server.request("POST", f"/v1/{kind}", body), status, message, param)


def test_bad_requests_for_a_stream(server):
    for body in ({"prompt": ""}, TEXT | {"temperature": -1}, TEXT | {"stop_token_ids": [260]}):
        check_error(server.request("POST", "/v1/completions", body | {"stream": True}), 400, "")


def test_values_that_ask_for_nothing_are_taken(server):
    nothing = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "logit_bias": {}, "stop": None}
    ignored = {"user": "me", "metadata": {"a": "b"}, "presence_penalty": 0, "n": None, "top_k": -1, "model": "tiny"}
    ignored |= {"reasoning_effort": "low", "verbosity": "low", "store": False, "service_tier": "auto"}
    ignored |= {"stream": True, "stream_options": {"include_obfuscation": False}}
    status, body, _ = server.request("POST", "/v1/chat/completions", CHAT | nothing | ignored | {"max_tokens": 1})
    assert status == 200, body


MANY = 4 * 2**20
NAMES = b",".join(b'"%d":0' % number for number in range(300_000))
HOSTILE = [
    ("chat/completions", b'{"messages":[' + b"0," * (MANY // 2 - 20) + b"0]}"),
    ("chat/completions", b'{"messages":[{"role":"user","content":[' + b"0," * (MANY // 2 - 40) + b"0]}]}"),
    (
        "chat/completions",
        b'{"messages":[' + b"{}," * 2000 + b"{" + NAMES + b"}]}",
    ),
    ("completions", b'{"prompt":"a","stop":[' + b'"",' * (MANY // 3 - 20) + b'""]}'),
    ("completions", b'{"prompt":"a","stop_token_ids":[' + b"0," * (MANY // 2 - 20) + b"-1]}"),
    ("completions", b'{"prompt":[' + b'"",' * (MANY // 3 - 20) + b'"a"]}'),
    ("completions", b'{"prompt":[' + b"5," * (MANY // 2 - 20) + b"5]}"),
    ("completions", b'{"prompt":"' + b"x " * (MANY // 2 - 20) + b'"}'),
    ("completions", b'{"prompt":"a",' + NAMES + b"}"),
    (
        "completions",
        b'{"prompt":"a","max_tokens":1,"stream":true,"n":65,"stream_options":{' + NAMES + b"}}",
    ),
]


@pytest.mark.parametrize(("kind", "body"), HOSTILE, ids=lambda value: None if isinstance(value, str) else value[:32])
def test_large_bodies_are_rejected_while_others_are_answered(server, kind, body):
    answer = THREADS.submit(lambda: server.request("POST", f"/v1/{kind}", body))
    longest, start = 0.0, time.monotonic()
    while not answer.done():
        before = time.monotonic()
        assert server.request("GET", "/health")[0] == 200
        longest = max(longest, time.monotonic() - before)
    check_error(answer.result(), 400, "")
    assert longest < 5.0  # a busy machine; 95 s before
    assert time.monotonic() - start < 30


def test_other_paths_methods_and_types(server):
    check_error(server.request("GET", "/v1/nothing"), 404, "/v1/nothing")
    check_error(server.request("GET", "/v1/models/other"), 404, "no model 'other'")
    check_error(server.request("GET", "/v1/completions"), 405, "Method Not Allowed")
    plain = server.request("POST", "/v1/completions", TEXT, {"content-type": "text/plain"})
    check_error(plain, 415, "Content-Type: application/json")


def test_a_body_that_is_too_large(serve):
    with serve(max_body_bytes=10_000) as server:
        just = b'{"prompt": "a", "max_tokens": 1}'
        assert server.request("POST", "/v1/completions", just.ljust(10_000))[0] == 200
        for size in (10_001, 1_000_000):
            check_error(server.request("POST", "/v1/completions", just.ljust(size)), 413, "10000 bytes")
        connection = server.connect()  # without a length
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/completions", iter([just] * 1000), headers, encode_chunked=True)
        answer = connection.getresponse()
        check_error((answer.status, json.loads(answer.read()), {}), 413, "10000 bytes")


def test_a_body_that_does_not_come(serve):
    with serve(body_timeout_s=0.05) as server:
        connection = server.connect()
        connection.putrequest("POST", "/v1/completions")
        connection.putheader("content-type", "application/json")
        connection.putheader("content-length", "100")
        connection.endheaders(b"{")
        answer = connection.getresponse()
        check_error((answer.status, json.loads(answer.read()), {}), 408, "did not come")


def test_the_api_key(serve):
    with serve(api_key="sécret") as server:
        right = {"authorization": "Bearer sécret".encode().decode("latin-1")}
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Bearer "}):
            for path, body in (("completions", TEXT), ("chat/completions", CHAT), ("models", None)):
                method = "GET" if body is None else "POST"
                check_error(server.request(method, f"/v1/{path}", body, headers), 401, "API key")
        assert server.request("POST", "/v1/completions", TEXT, right)[0] == 200
        assert server.request("GET", "/health")[0] == server.request("GET", "/metrics")[0] == 200


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


@pytest.fixture(scope="module")
def hybrid(kit, tokenizer):
    return Engine(kit.make_model(attention={"exact": [1]}), tokenizer, max_slots=1, max_length=50)


def test_the_smallest_limit_holds(model, tokenizer, hybrid):
    linear = Engine(model, tokenizer, max_slots=1)
    wide = ServerSettings(model_name="m", max_length=9999)
    assert [max_length(linear, limits) for limits in (DEFAULT, wide)] == [256, 9999]  # max_position_embeddings
    assert [max_length(hybrid, limits) for limits in (DEFAULT, wide)] == [50, 50]  # its buffers


@pytest.mark.parametrize(("wanted", "expected"), [(None, 16), (3, 3), (43, 43)])
def test_new_tokens(hybrid, wanted, expected):
    _, params, _ = prepare(CompletionRequest(prompt=[5] * 7, max_tokens=wanted), hybrid, DEFAULT)
    assert params[0].max_new_tokens == expected
    with pytest.raises(ApiError, match="7 prompt tokens and 44 new ones are more than the 50"):
        prepare(CompletionRequest(prompt=[5] * 7, max_tokens=44), hybrid, DEFAULT)
