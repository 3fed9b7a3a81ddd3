"""Models served by vLLM, one after another: output tokens/s, time to the first token, time between tokens.

    python benchmarks/served.py original/ out/ --json FILE                        # each with an FP8 cache, and without
    python benchmarks/served.py --random llama3-8b --tokenizer original/ --json FILE  # weights that vLLM makes itself

`vllm serve` with its defaults and `vllm bench serve` as its client; random prompts in the first model's tokens, or with
`--text FILE` pieces of a text, drawn anew for each row. What fails says why in the file, and the next model goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench_tools import describe

from lolcats.plan import SHAPES
from lolcats.provenance import provenance

PORT = 8123
VLLM = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
NAMES = ("clients", "shared_tokens", "prompt_tokens", "new_tokens", "requests")
ROWS = ((1, 0, 1024, 512, 4), (16, 0, 1024, 512, 32), (64, 0, 1024, 512, 64), (256, 0, 1024, 512, 256))
ROWS += ((256, 0, 1024, 8192, 256), (64, 0, 8192, 512, 64), (64, 0, 32000, 512, 64), (64, 32000, 128, 256, 64))
SHOWN = ("output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms", "completed")


def random_folders(shape: str, tokenizer: str, folder: Path) -> list[Path]:
    """Configurations of a softmax model and of one by the default recipe, with a tokenizer and its vocabulary."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

    from lolcats.config import LinearizeConfig
    from lolcats.conversion import convert
    from lolcats.recipes import load_recipe

    words = AutoTokenizer.from_pretrained(tokenizer)
    sizes = SHAPES[shape] | {"vocab_size": len(words), "max_position_embeddings": 65536}
    layers, kv_heads = sizes["num_hidden_layers"], sizes["num_key_value_heads"]
    recipe = LinearizeConfig.from_dict(load_recipe("lolcats-hybrid")).attention
    every = [f"{layer}.{head}" for layer in range(layers) for head in range(kv_heads)]
    heads = tuple(random.Random(0).sample(every, len(every) // 4))  # in a conversion, too, layers differ
    config = LlamaConfig(**sizes, dtype="bfloat16", architectures=["LlamaForCausalLM"])
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        linearized = convert(base, replace(recipe, exact=heads, linear_length_cap=4096)).config
    linearized.architectures = ["LolcatsForCausalLM"]
    made = {folder / "softmax": config, folder / "lolcats-hybrid": linearized}
    for path, each in made.items():
        each.save_pretrained(path)
        words.save_pretrained(path)
    return list(made)


@contextmanager
def server(model: str, options: list[str], log: Path) -> Iterator[float]:
    """A server of `model` within the block; gives the seconds until it answered."""
    began_s = time.perf_counter()
    command = [*VLLM, "serve", model, "--port", str(PORT), "--served-model-name", "m", *options]
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        while not _answers():
            if process.poll() is not None or time.perf_counter() - began_s > 900:
                raise RuntimeError("the server did not start: " + log.read_text(errors="replace")[-2000:])
            time.sleep(1)
        yield time.perf_counter() - began_s
    finally:
        os.killpg(process.pid, signal.SIGINT)
        process.wait(60)


def _answers() -> bool:
    try:
        return bool(urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=2).status == 200)
    except OSError:
        return False


def pieces(tokenizer: str, text: Path, row: tuple[int, ...]) -> str:
    """A file of a row's prompts: pieces of a text at random places."""
    from transformers import AutoTokenizer

    words = AutoTokenizer.from_pretrained(tokenizer)
    ids = words(text.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
    (_, _, tokens, _, count), draw = row, random.Random(str(row))
    starts = [draw.randrange(len(ids) - tokens) for _ in range(count)]
    lines = [json.dumps({"prompt": words.decode(ids[start : start + tokens])}) + "\n" for start in starts]
    (file := Path(tempfile.gettempdir(), "lolcats_served.jsonl")).write_text("".join(lines), encoding="utf-8")
    return str(file)


def measure(tokenizer: str, row: tuple[int, ...], text: Path | None = None) -> dict[str, Any]:
    """What vLLM's own client reports of a row. Its first request is sent twice, so that a shared prefix is there."""
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    clients, shared, prompt, new, requests = row
    command = ["--base-url", f"http://127.0.0.1:{PORT}", "--model", "m", "--tokenizer", tokenizer, "--ignore-eos"]
    command += ["--max-concurrency", str(clients), "--num-prompts", str(requests), "--seed", str(sum(row))]
    if text is None:
        command += ["--dataset-name", "random", "--random-prefix-len", str(shared), "--random-input-len", str(prompt)]
        command += ["--random-output-len", str(new)]
    else:
        command += ["--dataset-name", "custom", "--dataset-path", pieces(tokenizer, text, row)]
        command += ["--custom-output-len", str(new), "--skip-chat-template"]
    serve.add_cli_args(parser := FlexibleArgumentParser())
    found = serve.main(parser.parse_args([*command, "--disable-tqdm"]))
    return {name: found.get(name) for name in SHOWN}


def growth(log: str, row: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """Every ten seconds, by vLLM's log: tokens of a sequence, tokens/s of all, and how many ran (others wait)."""
    clients, shared, prompt, *_ = row
    generated, found = 0.0, []
    for rate, running in re.findall(r"generation throughput: ([\d.]+) tokens/s, Running: (\d+)", log):
        generated += 10 * float(rate)
        found.append((round(shared + prompt + generated / clients), round(float(rate)), int(running)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--random", choices=sorted(SHAPES), help="instead of models, random weights of this shape")
    parser.add_argument("--tokenizer", help="of random weights")
    parser.add_argument("--options", default="", help="of all servers")
    parser.add_argument("--text", type=Path, help="prompts are pieces of this file, where none is shared")
    parser.add_argument("--caches", nargs="+", default=["fp8", "auto"], help="types of the cache's keys and values")
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the server, too
    report: dict[str, Any] = {
        "provenance": provenance(),
        "settings": {"options": given.options, "text": given.text and given.text.name},
        "rows": [],
    }
    with tempfile.TemporaryDirectory() as scratch:
        folder, options, models = Path(scratch), given.options.split(), given.models
        if given.random:
            models = [str(path) for path in random_folders(given.random, given.tokenizer, folder)]
            options += ["--load-format", "dummy"]
        for model, cache in ((model, cache) for model in models for cache in given.caches):
            entry = {"model": model, "kv_cache_dtype": cache}
            try:
                with server(model, [*options, "--kv-cache-dtype", cache], folder / "log") as ready_s:
                    measure(models[0], (8, 0, 2048, 16, 16))  # compiles kernels
                    for row in ROWS if given.text is None else [row for row in ROWS if not row[1]]:
                        named, before = dict(zip(NAMES, row, strict=True)), len((folder / "log").read_text())
                        report["rows"].append(found := entry | named | {"ready_s": ready_s})
                        try:
                            found |= measure(models[0], row, given.text)
                        finally:  # of an interrupted row, too
                            found["growth"] = growth((folder / "log").read_text()[before:], row)
                            given.json.write_text(json.dumps(report, indent=1))
                        print(*found.values(), flush=True)
            except Exception as error:  # the other models are still worth something
                report["rows"].append(entry | {"error": describe(error)})
                given.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
