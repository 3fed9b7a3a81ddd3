"""Full queues, clients that leave, and the end of a server."""

import json
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

LONG = {"model": "tiny", "prompt": "ab", "max_tokens": 4000, "extra_body": {"ignore_eos": True}}
ROOM = {"max_length": 10_000}


def open_stream(server):
    """A long answer of which the first piece has come."""
    stream = server.client().completions.create(**LONG, stream=True)
    next(iter(stream))
    return stream


def test_a_full_queue(serve):
    with serve(max_slots=1, max_queue=1, **ROOM) as server, ThreadPoolExecutor() as threads:
        stream = open_stream(server)
        waiting = threads.submit(server.client().completions.create, model="tiny", prompt="cd", max_tokens=2)
        server.wait_for(lambda: server.engine.counts["waiting"] == 1)
        for extra in ({}, {"stream": True}):
            status, body, headers = server.request("POST", "/v1/completions", {"prompt": "ef", "max_tokens": 2} | extra)
            assert status == 429
            assert body["error"]["type"] == "rate_limit_error"
            assert headers["retry-after"] == "1"
        stream.close()
        assert waiting.result(60).choices[0].finish_reason in ("stop", "length")
        assert server.request("POST", "/v1/completions", {"prompt": ["a"] * 30, "max_tokens": 500})[0] == 429
        server.wait_until_idle()


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_leaves_frees_its_slot(serve, streams):
    with serve(max_slots=2, **ROOM) as server:
        open_stream(server).close()
        server.wait_until_idle()
        connection = server.connect()
        body = {"prompt": ["ab", "cd", "ef"], "max_tokens": 4000, "ignore_eos": True, "n": 2, "stream": streams}
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        server.wait_for(lambda: server.engine.counts["running"] == 2 and server.engine.counts["waiting"] > 0)
        connection.sock.close()
        connection.close()
        server.wait_until_idle()
        assert server.engine.counts["tokens_decoded"] < 7 * 4000


def test_web_pages_of_allowed_origins(serve):
    ask = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    with serve(cors=["https://a.example"], api_key="x") as server:
        for origin, allowed in (("https://a.example", "https://a.example"), ("https://b.example", None)):
            _, _, headers = server.request("OPTIONS", "/v1/chat/completions", None, {"origin": origin} | ask)
            assert headers.get("access-control-allow-origin") == allowed
            status, _, headers = server.request("GET", "/v1/models", None, {"origin": origin})
            assert (status, headers.get("access-control-allow-origin")) == (401, allowed)


def test_the_end_waits_for_running_answers(serve):
    with serve(drain_timeout=300, **ROOM) as server:
        stream = server.client().completions.create(**(LONG | {"max_tokens": 500}), stream=True)
        next(iter(stream))
        server.server.should_exit = True
        chunks = list(stream)
        assert chunks[-1].choices[0].finish_reason == "length"
        server.thread.join(60)
        assert server.engine.counts["free_slots"] == server.engine.runner.cache.max_slots
        with pytest.raises(ConnectionRefusedError):
            server.request("GET", "/health")


def test_the_end_cancels_what_takes_too_long(serve):
    with serve(drain_timeout=0, **ROOM) as server, ThreadPoolExecutor() as threads:
        stream = open_stream(server)
        whole = threads.submit(server.client().completions.create, **LONG)
        server.wait_for(lambda: server.engine.counts["running"] == 2)
        server.server.should_exit = True
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
        error = whole.exception(60)
        assert isinstance(error, openai.InternalServerError)
        assert error.status_code == 503
        server.thread.join(60)
        assert not server.engine.busy
