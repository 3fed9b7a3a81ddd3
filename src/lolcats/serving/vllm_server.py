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


def vllm_command(
    model: str,
    *,
    name: str,
    host: str,
    port: int,
    max_slots: int | None = None,
    max_length: int | None = None,
    dtype: str = "auto",
    trust_remote_code: bool = False,
    attention: dict[str, Any] | None = None,
    cors: list[str] | None = None,
    more: list[str] | None = None,
) -> list[str]:
    """Program and arguments.

    Args:
        attention: settings of the model's attention in place of the folder's.
        more: vLLM's own flags; they come last and win.
    """
    # Not `vllm serve`: that program is missing from some builds, the module never is.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--served-model-name", name, "--host", host, "--port", str(port), "--dtype", dtype]
    if max_slots is not None:
        command += ["--max-num-seqs", str(max_slots)]
    if max_length is not None:
        command += ["--max-model-len", str(max_length)]
    if trust_remote_code:
        command.append("--trust-remote-code")
    if attention:
        command += ["--hf-overrides", json.dumps({"attention": attention})]
    if cors:
        command += ["--allowed-origins", json.dumps(cors)]
    return command + (more or [])


def become_vllm(command: list[str], api_key: str | None) -> None:
    """Replace this process. The key goes through the environment: arguments can be read by everybody."""
    environment = dict(os.environ)
    if api_key is not None:
        environment["VLLM_API_KEY"] = api_key
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], command, environment)
