"""`lolcats serve`: which server, with which options."""

from __future__ import annotations

import importlib.util
import os
import sys
from types import SimpleNamespace

import pytest

from lolcats.serving import server as serving


@pytest.fixture
def started(monkeypatch, replace_module):
    """What would have been started; nothing is loaded or run."""
    calls = SimpleNamespace(vllm=[], engines=[], servers=[], ran=[], ended=[])
    monkeypatch.setattr(os, "execve", lambda *arguments: calls.vllm.append(arguments))
    replace_module("lolcats.evaluation.load", load_model=lambda path, **options: (path, options))

    def make_engine(model, tokenizer, **options):
        calls.engines.append((model, options))
        return SimpleNamespace(shutdown=lambda drain: calls.ended.append(drain))

    def make_server(engine, settings):
        calls.servers.append(settings)
        return SimpleNamespace(run=lambda sockets: calls.ran.append(sockets[0].getsockname()))

    replace_module("lolcats.generation.engine", Engine=make_engine)
    replace_module("lolcats.serving.server", Server=make_server, listen=serving.listen, is_local=serving.is_local)
    return calls


@pytest.fixture
def installed(monkeypatch):
    """`installed(vllm=True, fastapi=False)`"""
    real = importlib.util.find_spec

    def set_installed(**modules):
        def find_spec(name, *rest):
            return (object() if modules[name] else None) if name in modules else real(name, *rest)

        monkeypatch.setattr(importlib.util, "find_spec", find_spec)

    return set_installed


def test_without_vllm_the_own_server_runs(cli, started, installed, tmp_path):
    installed(vllm=False)
    result = cli("serve", tmp_path, "--port", 0, "--max-slots", 5, "--api-key", "k", "--cors", "*")
    assert result.exit_code == 0, result.output
    assert started.engines == [(str(tmp_path), {"max_slots": 5, "max_length": None})]
    (settings,) = started.servers
    assert (settings.model_name, settings.api_key, settings.max_queue) == (tmp_path.name, "k", 256)
    assert settings.cors == ["*"]
    ((host, port),) = started.ran
    assert host == "127.0.0.1"
    assert started.ended == [False]
    assert f"serving {tmp_path.name} at http://127.0.0.1:{port}/v1" in result.stderr
    assert "anybody" not in result.stderr


def test_an_open_address_without_a_key_is_warned_of(cli, started, installed):
    installed(vllm=False)
    assert "anybody who reaches" in cli("serve", "org/model", "--port", 0, "--host", "0.0.0.0").stderr
    assert "anybody" not in cli("serve", "org/model", "--port", 0, "--host", "0.0.0.0", "--api-key", "k").stderr
    assert [settings.model_name for settings in started.servers] == ["org/model"] * 2


def test_with_vllm_its_server_runs(cli, started, installed, monkeypatch):
    installed(vllm=True)
    monkeypatch.setenv("LOLCATS_API_KEY", "secret")
    own = ["--max-slots", 4, "--max-length", 99, "--dtype", "float32", "--exact-window", "32MiB"]
    own += ["--cors", "https://a.example", "--cors", "https://b.example"]
    result = cli("serve", "org/model", *own, "--", "--seed", "3")
    assert result.exit_code == 0, result.output
    ((program, command, environment),) = started.vllm
    assert (program, command[:3]) == (sys.executable, [sys.executable, "-m", "vllm.entrypoints.openai.api_server"])
    flags = dict(zip(command[3::2], command[4::2], strict=True))
    assert flags == {
        "--model": "org/model",
        "--served-model-name": "org/model",
        "--host": "127.0.0.1",
        "--port": "8000",
        "--dtype": "float32",
        "--max-num-seqs": "4",
        "--max-model-len": "99",
        "--hf-overrides": '{"attention": {"exact_window": "32MiB"}}',
        "--allowed-origins": '["https://a.example", "https://b.example"]',
        "--seed": "3",
    }
    assert "secret" not in command
    assert environment["VLLM_API_KEY"] == "secret"
    assert not started.servers


@pytest.mark.parametrize(
    ("arguments", "has_vllm", "line"),
    [
        ([], True, "engine: vLLM, as it is installed; --engine lolcats asks for the built-in one"),
        (["--engine", "vllm"], True, "engine: vLLM, as asked for"),
        ([], False, "engine: the built-in one, as vLLM is not installed"),
        (["--engine", "lolcats"], True, "engine: the built-in one, as asked for"),
    ],
)
def test_it_says_which_engine_and_why(cli, started, installed, tmp_path, arguments, has_vllm, line):
    installed(vllm=has_vllm)
    result = cli("serve", tmp_path, "--port", 0, *arguments)
    assert [x for x in result.stderr.splitlines() if x.startswith("engine")] == [line]


@pytest.mark.parametrize(
    ("arguments", "modules", "message"),
    [
        (["--engine", "vllm"], {"vllm": False}, 'pip install "lolcats[vllm]"'),
        ([], {"vllm": False, "fastapi": False}, 'needs fastapi: pip install "lolcats[serve]"'),
        (["--max-queue", "3"], {"vllm": True}, "vLLM's server has no --max-queue"),
        (["--gguf-file", "a.gguf"], {"vllm": True}, "vLLM's server has no --gguf-file"),
        (["--", "--seed", "3"], {"vllm": False}, "only vLLM's server takes flags after --"),
        (["--engine", "lolcats", "--host", "1.2.3.4"], {"vllm": True}, "cannot listen on 1.2.3.4"),
    ],
)
def test_mistakes(cli, started, installed, arguments, modules, message):
    installed(**modules)
    result = cli("serve", "out/", *arguments)
    assert result.exit_code == 1
    assert message in result.stderr


def test_a_port_in_use(cli, started, installed):
    installed(vllm=False)
    with serving.listen("127.0.0.1", 0) as socket:
        result = cli("serve", "out/", "--port", socket.getsockname()[1])
    assert result.exit_code == 1
    assert "choose another" in result.stderr
    assert not started.engines
