"""Many clients at once, of all kinds: well-behaved ones get their right answers, and nothing is left behind.

LOLCATS_LOAD_REQUESTS=5000 makes it longer.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import sys
import time
from pathlib import Path

from lolcats.generation.sampling import SamplingParams

REQUESTS = int(os.environ.get("LOLCATS_LOAD_REQUESTS", "200"))
CLIENTS = 64
BODY = 200_000  # bytes
MALFORMED = [
    b"{",
    b"[" * 15_000,
    b'{"prompt": "a", "stop": [' + b'"b",' * 40_000 + b'"b"]}',
    b'{"prompt": [' + b"1," * 90_000 + b"1]}",
    b'{"prompt": [' + b'"a",' * 40_000 + b'"a"], "n": 64}',
    b'{"prompt": "' + b"x" * 190_000 + b'"}',
    b'{"prompt": "a", ' + b",".join(b'"%d": 0' % number for number in range(15_000)) + b"}",
    b'{"messages": [' + b'{"role": "user", "content": null},' * 4000 + b"0]}",
]


async def send(port, body, *, path="completions", cut=None, leave_after=None):
    """One request on a connection of its own: (status, body), None if the client left.

    Args:
        cut: send only so many bytes of the body.
        leave_after: read only so many bytes of the answer.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = f"POST /v1/{path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body[:cut])
        await writer.drain()
        if cut is not None:
            return None
        if leave_after is not None:
            await reader.read(leave_after)
            return None
        answer = await reader.read()
    finally:
        writer.close()
    head, _, rest = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), rest


def text_of(body):
    """The text of an answer, streamed in chunks of HTTP or whole."""
    if not body.lstrip().startswith(b"{"):
        events = [line[6:] for line in body.decode().splitlines() if line.startswith("data: ")]
        assert events.pop() == "[DONE]"
        return "".join(json.loads(event)["choices"][0]["text"] for event in events)
    return json.loads(body)["choices"][0]["text"]


async def load(port, requests, seed, expected):
    """Statuses of all requests, None where the client left; the most seconds that /health took meanwhile."""
    choice = random.Random(seed)
    left = list(range(requests))
    statuses, slowest = [], 0.0

    async def watch():
        nonlocal slowest
        while True:
            start = time.monotonic()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 200")
            writer.close()
            slowest = max(slowest, time.monotonic() - start)
            await asyncio.sleep(0.05)

    async def one(number):
        kind = choice.random()
        if kind < 0.15:
            path = choice.choice(["completions", "chat/completions"])
            status, body = await send(port, choice.choice(MALFORMED), path=path)
            assert status == 400
            assert json.loads(body)["error"]["message"]
            return status
        if kind < 0.17:  # a connection that brings nothing
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST /v1/comp"[: choice.randrange(13)])
            idle.append(writer)
            return None
        if kind < 0.2:
            status, body = await send(port, b'{"prompt": "' + b"x" * 2 * BODY + b'"}')
            assert status == 413
            return status
        prompt, params = choice.choice(list(expected))
        asked = {"prompt": prompt, "max_tokens": params.max_new_tokens, "temperature": params.temperature}
        asked |= {"seed": params.seed, "stream": choice.random() < 0.5, "stop": list(params.stop)}
        if kind < 0.25:
            asked |= {"prompt": "y" * 5000, "max_tokens": 5}
            status, body = await send(port, json.dumps(asked).encode())
            assert status == 400
            assert "shorten the prompt" in body.decode()
            return status
        body = json.dumps(asked | ({"n": 2, "ignore_eos": True, "max_tokens": 300} if kind < 0.45 else {})).encode()
        if kind < 0.3:
            return await send(port, body, cut=choice.randrange(len(body)))
        if kind < 0.45:
            return await send(port, body, leave_after=choice.choice([0, 1, 300, 2000]))
        while (found := await send(port, body))[0] == 429:
            statuses.append(429)
            await asyncio.sleep(0.05)  # others get their turn
        assert found[0] == 200, found
        assert text_of(found[1]) == expected[prompt, params]
        return 200

    async def client():
        while left:
            statuses.append(await one(left.pop()))

    idle = []
    watching = asyncio.create_task(watch())
    await asyncio.wait_for(asyncio.gather(*(client() for _ in range(CLIENTS))), 1200)
    assert not watching.done()
    watching.cancel()
    for writer in idle:
        writer.close()
    return statuses, slowest


def resident():
    """Bytes of memory of this process that are in use, and Python's objects."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1]) if sys.platform == "linux" else 0
    return pages * 4096, len(gc.get_objects())


def buffers(server):
    """What must not grow: the slots' memory, and whatever is kept for a request."""
    engine = server.engine
    connections = server.server.server_state.connections
    return engine.runner.cache.nbytes, engine.counts["waiting"], len(server.server.service._open), len(connections)


def test_load(serve, make_alone, kit):
    each = [
        SamplingParams(max_new_tokens=8),
        SamplingParams(max_new_tokens=20, temperature=1.3, seed=5),
        SamplingParams(max_new_tokens=30, temperature=0.7, seed=6, stop=("e",)),
    ]
    prompts = ["a", "the mill ran dry", "z" * 50]
    expected = {(prompt, params): make_alone(prompt, params).text for prompt in prompts for params in each}
    with serve(max_slots=6, max_queue=36, max_body_bytes=BODY, idle_timeout_s=5) as server:
        before = buffers(server)
        statuses, memory, slowest = [], [], []
        for part, requests in enumerate((REQUESTS // 2, REQUESTS - REQUESTS // 2)):
            more, longest = asyncio.run(load(server.port, requests, part, expected))
            statuses += more
            slowest.append(longest)
            server.wait_until_idle()
            server.wait_for(lambda: buffers(server) == before)
            memory.append(resident())
        found = {status: statuses.count(status) for status in set(statuses)}
        print(f"statuses {found}, /health {slowest} s, bytes and objects after each half {memory}")
        assert set(found) >= {200, 400, 413, None}
        assert sum(found.values()) - found.get(429, 0) == REQUESTS
        assert found[200] >= REQUESTS / 3
        assert max(slowest) < 5
        assert memory[1][0] - memory[0][0] < 64 * 2**20
        assert memory[1][1] - memory[0][1] < 5000
        # it still works, and counted everything
        assert server.request("POST", "/v1/completions", {"prompt": "a", "max_tokens": 3})[0] == 200
        for status in found.keys() & {400, 413, 429}:
            counted = sum(
                server.metric(f'lolcats_requests_total{{path="/v1/{path}",status="{status}"}}')
                for path in ("completions", "chat/completions")
            )
            assert counted >= found[status]
        assert server.metric('lolcats_requests_total{path="/v1/completions",status="500"}') == 0
