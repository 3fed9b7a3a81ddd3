"""vLLM's own server, for folders that lolcats wrote; its plugin is `lolcats.vllm_plugin`."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from typing import Any


def vllm_installed() -> bool:
    """Whether vLLM can be imported, whatever its distribution is called."""
    return importlib.util.find_spec("vllm") is not None


def vllm_command(flags: dict[str, Any], more: list[str]) -> list[str]:
    """Program and arguments.

    Args:
        flags: value of each of vLLM's flags; None and False leave it out, True is the flag alone.
        more: words that come last and win.
    """
    # Not `vllm serve`: that program is missing from some builds, the module never is.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    for flag, value in flags.items():
        if value is None or value is False:
            continue
        text = json.dumps(value) if isinstance(value, list | dict) else str(value)
        command += [f"--{flag}"] if value is True else [f"--{flag}", text]
    return command + more


def become_vllm(command: list[str], api_key: str | None) -> None:
    """Replace this process. The key goes through the environment: arguments can be read by everybody."""
    environment = dict(os.environ)
    if api_key is not None:
        environment["VLLM_API_KEY"] = api_key
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], command, environment)
