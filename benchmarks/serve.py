"""Throughput and latency of an OpenAI-compatible server, whichever it is.

    lolcats serve out/ &
    python benchmarks/serve.py --url http://127.0.0.1:8000/v1 --output results.json

Streams completions of random prompts at each concurrency: a client starts its next request when the last has ended.
Prompts are token ids, so that every server reads the same; answers have a fixed length (`ignore_eos`). One warm-up
request is not counted. Needs the `openai` package.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from statistics import quantiles
from typing import Any

import openai


@dataclass
class Timing:
    """One request: seconds from its start to the first text and to the end, and tokens by the server's count."""

    first_text_s: float
    total_s: float
    tokens: int


async def one_request(client: openai.AsyncOpenAI, model: str, prompt: list[int], new_tokens: int) -> Timing:
    start = time.perf_counter()
    first, tokens = None, 0
    stream = await client.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=new_tokens,
        temperature=0.0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    async for chunk in stream:
        if first is None and chunk.choices and chunk.choices[0].text:
            first = time.perf_counter() - start
        if chunk.usage is not None:
            tokens = chunk.usage.completion_tokens
    total = time.perf_counter() - start
    return Timing(total if first is None else first, total, tokens)


async def measure(
    client: openai.AsyncOpenAI, model: str, concurrency: int, prompts: list[list[int]], new_tokens: int
) -> dict[str, Any]:
    waiting = list(prompts)
    timings: list[Timing] = []

    async def worker() -> None:
        while waiting:
            timings.append(await one_request(client, model, waiting.pop(), new_tokens))

    start = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    seconds = time.perf_counter() - start
    tokens = sum(timing.tokens for timing in timings)
    cuts = quantiles([timing.first_text_s for timing in timings], n=20, method="inclusive")
    each = [(timing.total_s - timing.first_text_s) / max(timing.tokens - 1, 1) for timing in timings]
    return {
        "concurrency": concurrency,
        "requests": len(timings),
        "seconds": round(seconds, 2),
        "tokens": tokens,
        "tokens_per_s": round(tokens / seconds, 2),
        "first_text_p50_s": round(cuts[9], 3),
        "first_text_p95_s": round(cuts[18], 3),
        "seconds_per_token_p50": round(quantiles(each, n=2, method="inclusive")[0], 4),
    }


async def main(options: argparse.Namespace) -> dict[str, Any]:
    client = openai.AsyncOpenAI(base_url=options.url, api_key=options.api_key, max_retries=0, timeout=1800)
    model = options.model or (await client.models.list()).data[0].id
    choice = random.Random(0)

    def prompts(count: int) -> list[list[int]]:
        return [[choice.randrange(100, options.vocabulary) for _ in range(options.prompt_tokens)] for _ in range(count)]

    await one_request(client, model, *prompts(1), min(options.new_tokens, 8))
    runs = []
    for concurrency in options.concurrency:
        batch = prompts(max(2, round(concurrency * options.rounds)))
        runs.append(await measure(client, model, concurrency, batch, options.new_tokens))
        print(json.dumps(runs[-1]), flush=True)
    return {
        "server": options.server,
        "model": model,
        "hardware": options.hardware or f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "date": datetime.now(timezone.utc).date().isoformat(),
        "prompt_tokens": options.prompt_tokens,
        "new_tokens": options.new_tokens,
        "runs": runs,
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default=os.environ.get("LOLCATS_API_KEY", "none"))
    parser.add_argument("--model", help="default: the first that the server names")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=float, default=2, help="requests per client")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=32000, help="prompts draw token ids from 100 to this")
    parser.add_argument("--server", default="", help="what the JSON calls the server: its name and version")
    parser.add_argument("--hardware", help="what the JSON calls the machine")
    parser.add_argument("--output", type=Path, help="JSON file")
    return parser.parse_args()


if __name__ == "__main__":
    arguments = parse()
    found = asyncio.run(main(arguments))
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(found, indent=2) + "\n")
