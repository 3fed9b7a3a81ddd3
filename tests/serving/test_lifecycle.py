"""Full queues, clients that leave, deadlines, the end of a server, and what /metrics says of all that."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

LONG = {"model": "tiny", "prompt": "ab", "max_tokens": 4000, "extra_body": {"ignore_eos": True}}
THREADS = ThreadPoolExecutor(1)  # for calls that run beside a test
ROOM = {"max_length": 10_000}


def open_stream(server):
    """A long answer of which the first piece has come."""
    stream = server.client().completions.create(**LONG, stream=True)
    next(iter(stream))
    return stream


def test_a_full_queue(serve):
    with serve(max_slots=1, max_queue=1, **ROOM) as server:
        stream = open_stream(server)
        waiting = THREADS.submit(lambda: server.client().completions.create(model="tiny", prompt="cd", max_tokens=2))
        server.wait_for(lambda: server.engine.counts["waiting"] == 1)
        for extra in ({}, {"stream": True}):
            status, body, headers = server.request("POST", "/v1/completions", {"prompt": "ef", "max_tokens": 2} | extra)
            assert status == 429
            assert body["error"]["type"] == "rate_limit_error"
            assert headers["retry-after"] == "1"
        stream.close()
        assert waiting.result(60).choices[0].finish_reason in ("stop", "length")
        # too many at once: none of them stays
        assert server.request("POST", "/v1/completions", {"prompt": ["a"] * 30, "max_tokens": 500})[0] == 429
        server.wait_until_idle()


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_leaves_frees_its_slot(serve, streams):
    with serve(max_slots=2, **ROOM) as server:
        before = server.engine.counts["tokens_decoded"]
        stream = open_stream(server)
        stream.close()
        server.wait_until_idle()
        connection = server.connect()
        body = {"prompt": ["ab", "cd", "ef"], "max_tokens": 4000, "ignore_eos": True, "n": 2, "stream": streams}
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        server.wait_for(lambda: server.engine.counts["running"] == 2 and server.engine.counts["waiting"] > 0)
        connection.sock.close()
        connection.close()
        server.wait_until_idle()
        assert server.engine.counts["tokens_decoded"] - before < 7 * 4000
        server.wait_for(lambda: server.metric('lolcats_requests_total{path="/v1/completions",status="499"}') == 2)


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nGET /hea"])
def test_connections_without_a_request_are_closed(serve, sent):
    with serve(idle_timeout_s=0.3) as server, socket.create_connection(("127.0.0.1", server.port), 30) as connection:
        connection.sendall(sent)
        start = time.monotonic()
        with contextlib.suppress(ConnectionResetError):
            while connection.recv(1000):
                pass
        assert time.monotonic() - start < 20
        server.wait_for(lambda: not server.server.server_state.connections)


def test_idle_connections_make_room(serve):
    with serve(max_connections=8) as server:
        idle = [socket.create_connection(("127.0.0.1", server.port), 30) for _ in range(40)]
        server.wait_for(lambda: 0 < len(server.server.server_state.connections) <= 8)
        assert server.request("GET", "/health")[0] == 200
        assert server.request("POST", "/v1/completions", {"prompt": "a", "max_tokens": 2})[0] == 200
        for connection in idle:
            connection.close()


def test_too_many_requests_get_503_and_health_does_not(serve):
    with serve(max_connections=2, **ROOM) as server:
        streams = [open_stream(server) for _ in range(2)]
        status, body, headers = server.request("POST", "/v1/completions", {"prompt": "a"})
        assert (status, body["error"]["code"], headers["retry-after"]) == (503, "overloaded", "1")
        assert server.request("GET", "/health")[0] == server.request("GET", "/metrics")[0] == 200
        for stream in streams:
            stream.close()
        server.wait_until_idle()
        assert server.request("POST", "/v1/completions", {"prompt": "a", "max_tokens": 2})[0] == 200


def test_a_client_that_does_not_read_is_closed(serve):
    with serve(idle_timeout_s=0.5, send_buffer=4096, **ROOM) as server:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.connect(("127.0.0.1", server.port))
        body = {"prompt": "ab", "max_tokens": 4000, "ignore_eos": True, "stream": True, "logprobs": 20}
        body = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json"
        head += f"\r\ncontent-length: {len(body)}"
        connection.sendall(f"{head}\r\n\r\n".encode() + body)
        server.wait_for(lambda: server.engine.counts["running"] == 1)
        server.wait_until_idle()
        assert server.engine.counts["tokens_decoded"] < 4000
        connection.close()


def test_web_pages_of_allowed_origins(serve):
    ask = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    with serve(cors=["https://a.example"], api_key="x") as server:
        for origin, allowed in (("https://a.example", "https://a.example"), ("https://b.example", None)):
            _, _, headers = server.request("OPTIONS", "/v1/chat/completions", None, {"origin": origin} | ask)
            assert headers.get("access-control-allow-origin") == allowed
            status, _, headers = server.request("GET", "/v1/models", None, {"origin": origin})
            assert (status, headers.get("access-control-allow-origin")) == (401, allowed)


def test_the_deadline_of_an_answer(serve):
    with serve(request_timeout=0.2, **ROOM) as server:
        body = {"prompt": "ab", "max_tokens": 4000, "ignore_eos": True}
        status, answer, _ = server.request("POST", "/v1/completions", body)
        assert (status, answer["error"]["code"]) == (504, "timeout")
        status, text, _ = server.request("POST", "/v1/completions", body | {"stream": True})
        events = text.split("\n\n")
        assert status == 200
        assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "timeout"
        server.wait_until_idle()
        assert server.metric('lolcats_requests_total{path="/v1/completions",status="504"}') == 2


def test_the_end_waits_for_running_answers(serve):
    with serve(drain_timeout=300, **ROOM) as server:
        stream = server.client().completions.create(**(LONG | {"max_tokens": 800}), stream=True)
        next(iter(stream))
        kept = server.connect()  # a connection from before
        kept.request("GET", "/health")
        assert kept.getresponse().read() == b'{"status":"ok"}'
        server.server.handle_exit(signal.SIGTERM, None)
        assert server.request("GET", "/health")[0] == 503
        status, body, headers = server.request("POST", "/v1/completions", {"prompt": "ab"})
        assert (status, body["error"]["code"]) == (503, "shutting_down")
        assert "retry-after" in headers
        chunks = list(stream)
        assert chunks[-1].choices[0].finish_reason == "length"
        kept.close()
        server.thread.join(60)
        assert not server.thread.is_alive()
        assert server.engine.counts["free_slots"] == len(server.engine.runner.lengths)


def test_the_end_cancels_what_takes_too_long(serve):
    with serve(drain_timeout=0.1, **ROOM) as server:
        stream = open_stream(server)
        whole = THREADS.submit(lambda: server.client().completions.create(**LONG))
        server.wait_for(lambda: server.engine.counts["running"] == 2)
        server.server.handle_exit(signal.SIGTERM, None)
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
        error = whole.exception(60)
        assert isinstance(error, openai.InternalServerError)
        assert error.status_code == 503
        server.thread.join(60)
        assert not server.thread.is_alive()
        assert not server.engine.busy


def test_a_second_signal_ends_at_once(serve):
    with serve(drain_timeout=1000, **ROOM) as server:
        stream = open_stream(server)
        for _ in range(2):
            server.server.handle_exit(signal.SIGINT, None)
        server.thread.join(60)
        assert not server.thread.is_alive()
        stream.close()
        server.engine.shutdown(drain=False)


def test_metrics(serve):
    with serve(max_slots=3) as server:
        client = server.client()
        client.completions.create(**(LONG | {"max_tokens": 7, "prompt": [5] * 30}))
        list(client.completions.create(**(LONG | {"max_tokens": 4, "prompt": [5] * 3}), stream=True))
        server.request("POST", "/v1/completions", b"{")
        server.request("GET", "/any/path/at/all")
        ended = 'lolcats_requests_total{path="%s",status="%s"}'
        assert server.metric(ended % ("/v1/completions", "200")) == 2
        assert server.metric(ended % ("/v1/completions", "400")) == 1
        assert server.metric(ended % ("other", "404")) == 1
        assert server.metric("lolcats_prompt_tokens_total") == 33
        assert server.metric("lolcats_generated_tokens_total") == 11
        assert server.metric('lolcats_request_seconds_count{path="/v1/completions"}') == 3
        assert server.metric("lolcats_time_to_first_token_seconds_count") == 1
        assert server.metric("lolcats_free_slots") == 3
        assert server.metric("lolcats_running") == server.metric("lolcats_waiting") == 0
