"""What the plugin relies on that needs no vLLM."""

import sys
from types import ModuleType

from lolcats.vllm_plugin import register


def test_another_vllm_goes_on_without_linearized_models(monkeypatch, caplog) -> None:
    """vLLM calls it in each process, whatever model is served: an exception would end that."""
    monkeypatch.setitem(sys.modules, "vllm", other := ModuleType("vllm"))
    other.__getattr__ = lambda name: 1 / 0
    register()
    assert "cannot be served by this release of vLLM (ZeroDivisionError" in caplog.text
