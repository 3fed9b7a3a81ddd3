"""What the plugin relies on that needs no vLLM."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

from transformers import AutoConfig

from lolcats.config.attention import AttentionConfig
from lolcats.modeling import LolcatsConfig
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


def test_overrides_change_single_settings(tmp_path) -> None:
    """`--hf-overrides '{"attention": {...}}'`: vLLM assigns the mapping; from_pretrained takes one, too."""
    config = LolcatsConfig(text_config=AutoConfig.for_model("llama"), attention={"window_size": 16, "sinks": 1})
    config.attention = {"linear_length_cap": 40}
    assert config.attention == AttentionConfig(window_size=16, sinks=1, linear_length_cap=40)
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path, attention={"sinks": 3})
    assert loaded.attention == AttentionConfig(window_size=16, sinks=3, linear_length_cap=40)
    assert AutoConfig.from_pretrained(tmp_path).attention == config.attention
