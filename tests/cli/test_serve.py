"""`lolcats serve`: options, and what is checked before a model is loaded."""

import importlib.util
from types import SimpleNamespace

import pytest

from lolcats.serving import server as serving


@pytest.fixture
def started(replace_module):
    """What would have been started; nothing is loaded or run."""
    calls = SimpleNamespace(engines=[], servers=[], addresses=[], ended=[])
    replace_module("lolcats.evaluation.load", load_model=lambda path, **options: (path, options))

    def make_engine(model, tokenizer, **options):
        calls.engines.append((model, options))
        return SimpleNamespace(shutdown=lambda drain: calls.ended.append(drain))

    def make_server(engine, settings):
        calls.servers.append(settings)
        return SimpleNamespace(run=lambda sockets: calls.addresses.append(sockets[0].getsockname()))

    replace_module("lolcats.generation.engine", Engine=make_engine)
    replace_module("lolcats.serving.server", Server=make_server, listen=serving.listen)
    return calls


def test_options_reach_engine_and_server(cli, started, tmp_path):
    result = cli("serve", tmp_path, "--port", 0, "--max-slots", 5, "--max-queue", 7, "--api-key", "k", "--cors", "*")
    assert result.exit_code == 0, result.output
    assert started.engines == [(str(tmp_path), {"max_slots": 5, "max_length": None})]
    (settings,) = started.servers
    assert (settings.model_name, settings.api_key, settings.max_queue) == (tmp_path.name, "k", 7)
    assert settings.cors == ["*"]
    ((host, port),) = started.addresses
    assert host == "127.0.0.1"
    assert started.ended == [False]
    assert f"serving {tmp_path.name} at http://127.0.0.1:{port}/v1" in result.stderr
    assert "anybody" not in result.stderr


def test_an_open_address_without_a_key_is_warned_of(cli, started):
    assert "anybody who reaches" in cli("serve", "org/model", "--port", 0, "--host", "0.0.0.0").stderr
    assert "anybody" not in cli("serve", "org/model", "--port", 0, "--host", "0.0.0.0", "--api-key", "k").stderr
    assert [settings.model_name for settings in started.servers] == ["org/model"] * 2


def test_mistakes(cli, started, monkeypatch):
    with serving.listen("127.0.0.1", 0) as socket:
        for options in (["--host", "1.2.3.4"], ["--port", socket.getsockname()[1]]):
            result = cli("serve", "out/", *options)
            assert (result.exit_code, "cannot listen on" in result.stderr) == (1, True)
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "fastapi" else real(name, *rest)
    )
    assert 'needs fastapi: pip install "lolcats[serve]"' in cli("serve", "out/").stderr
    assert not started.engines
