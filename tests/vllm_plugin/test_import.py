"""vLLM imports the plugin in each of its processes. Needs no vLLM."""

from __future__ import annotations

import subprocess
import sys


def test_importing_the_plugin_is_cheap() -> None:
    code = "import sys, lolcats.vllm_plugin; print({'torch', 'transformers', 'vllm'} & set(sys.modules) or 'light')"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "light"
