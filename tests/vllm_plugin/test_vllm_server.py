"""vLLM's own OpenAI-compatible server, asked by OpenAI's client."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from vllm_kit import PROMPTS, transformers_answers

sys.path.insert(0, str(Path(__file__).parent.parent / "serving"))

import client_checks


@pytest.fixture(scope="module")
def client(folder, tmp_path_factory) -> Iterator[openai.OpenAI]:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={folder()}", "--enforce-eager"]
    options = {"served-model-name": "tiny", "port": port, "dtype": "float32", "max-model-len": 512}
    command += [f"--{name}={value}" for name, value in options.items()]
    log = tmp_path_factory.mktemp("server") / "log"
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    with log.open("w") as stream, subprocess.Popen(command, stdout=stream, stderr=stream, env=environment) as process:
        try:
            wait_for(f"http://127.0.0.1:{port}/health", process, log)
            yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60)
        finally:
            process.terminate()


def wait_for(url: str, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + 240
    while True:
        try:
            urllib.request.urlopen(url, timeout=5)
            return
        except (urllib.error.URLError, ConnectionError):
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.5)


@pytest.mark.parametrize("check", client_checks.CHECKS, ids=lambda check: check.__name__)
def test_client(client, check) -> None:
    check(client, "tiny")


def test_tokens_through_the_server(client, folder) -> None:
    expected = transformers_answers(folder())
    options = {"temperature": 0.0, "max_tokens": len(expected[0].tokens)}
    extra = {"ignore_eos": True, "return_token_ids": True}
    answer = client.completions.create(model="tiny", prompt=PROMPTS, extra_body=extra, **options)
    assert [choice.token_ids for choice in answer.choices] == [answer.tokens for answer in expected]
