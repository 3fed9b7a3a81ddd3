"""What the plugin relies on that needs no vLLM."""

import subprocess
import sys
from types import ModuleType

from lolcats.vllm_plugin import register


def test_importing_the_plugin_is_cheap() -> None:
    """vLLM imports it in each of its processes."""
    code = "import sys, lolcats.vllm_plugin; print({'torch', 'transformers', 'vllm'} & set(sys.modules) or 'light')"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "light"


def test_another_vllm_goes_on_without_linearized_models(monkeypatch, caplog) -> None:
    """vLLM calls it in each process, whatever model is served: an exception would end that."""
    monkeypatch.setitem(sys.modules, "vllm", other := ModuleType("vllm"))
    other.__getattr__ = lambda name: 1 / 0
    register()
    assert "cannot be served by this release of vLLM (ZeroDivisionError" in caplog.text
