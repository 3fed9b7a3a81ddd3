"""`lolcats serve`: an OpenAI-compatible server, vLLM's where it is installed, else the one that comes along."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from lolcats.cli.console import notes
from lolcats.cli.options import ATTENTION_OPTIONS, ModelLoader, model_options, settings_options
from lolcats.config import validated
from lolcats.errors import UserError
from lolcats.serving.settings import ServerSettings

_NEEDED = ("fastapi", "uvicorn", "prometheus_client")


@settings_options(
    ServerSettings,
    *("cors", "max_slots", "max_queue", "max_length", "drain_timeout"),
)
@model_options
def serve(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(metavar="DIR", help="Folder or hub id of a linearized model.")],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0: reachable from other machines.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: a free one.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            help="What clients must send; better through the variable, for others can read arguments.",
            envvar="LOLCATS_API_KEY",
        ),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="The model's name for clients.", show_default="name of the folder")
    ] = None,
    engine: Annotated[
        Literal["auto", "vllm", "lolcats"], typer.Option(help="auto: vLLM's server if it is installed.")
    ] = "auto",
    *,
    load: ModelLoader,
    settings: dict[str, Any],
) -> None:
    """Serve a linearized model through OpenAI's protocol.

    /v1/chat/completions, /v1/completions, /v1/models, /health and /metrics. Ctrl-C and SIGTERM let running answers
    finish; a second Ctrl-C does not.

    With vLLM, everything after -- goes to its server.

    Examples:

      lolcats serve out/

      LOLCATS_API_KEY=secret lolcats serve out/ --host 0.0.0.0 --max-slots 64

      lolcats serve out/ --engine vllm -- --max-num-batched-tokens 4096
    """
    name = served_model_name or (Path(model).resolve().name if Path(model).is_dir() else model)
    has_vllm = importlib.util.find_spec("vllm") is not None  # whatever its distribution is called
    if engine == "vllm" and not has_vllm:
        raise UserError('vLLM is not installed: pip install "lolcats[vllm]", or use --engine lolcats')
    if engine != "lolcats" and has_vllm:
        own = settings | load.given
        attention = {name: own[name] for name in ATTENTION_OPTIONS if name in own}
        known = {*attention, "cors", "max_slots", "max_length", "dtype", "trust_remote_code"}
        for option in sorted(own.keys() - known):
            flag = "--" + option.replace("_", "-")
            raise UserError(f"vLLM's server has no {flag}; leave it out, or use --engine lolcats")
        flags = {
            "model": model,
            "served-model-name": name,
            "host": host,
            "port": port,
            "dtype": own.get("dtype", "auto"),
            "max-num-seqs": own.get("max_slots"),
            "max-model-len": own.get("max_length"),
            "trust-remote-code": own.get("trust_remote_code"),
            "hf-overrides": {"attention": attention} if attention else None,
            "allowed-origins": own.get("cors"),
        }
        why = "as it is installed; --engine lolcats asks for the built-in one" if engine == "auto" else "as asked for"
        notes().print(f"engine: vLLM, {why}", highlight=False, soft_wrap=True)
        _become_vllm(flags, ctx.args, api_key)
        return
    if ctx.args:
        raise UserError(f"only vLLM's server takes flags after --; got {' '.join(ctx.args)}")
    missing = [module for module in _NEEDED if importlib.util.find_spec(module) is None]
    if missing:
        raise UserError(f'the server needs {", ".join(missing)}: pip install "lolcats[serve]"')
    from lolcats.generation.engine import Engine
    from lolcats.serving.server import Server, is_local, listen

    checked = validated(ServerSettings, settings | {"model_name": name, "api_key": api_key})
    with listen(host, port) as socket:  # before the model is loaded: a port in use shows at once
        loaded, tokenizer = load(model)
        runs = Engine(loaded, tokenizer, max_slots=checked.max_slots, max_length=checked.max_length)
        server = Server(runs, checked)
        why = "as vLLM is not installed" if engine == "auto" else "as asked for"
        notes().print(f"engine: the built-in one, {why}", highlight=False, soft_wrap=True)
        shown = f"[{host}]" if ":" in host else host
        notes().print(f"serving {name} at http://{shown}:{socket.getsockname()[1]}/v1", highlight=False, markup=False)
        if not is_local(host) and api_key is None:
            notes().print("[yellow]anybody who reaches this address can use it; --api-key asks for a key[/]")
        try:
            server.run([socket])
        finally:
            runs.shutdown(drain=False)  # after a second signal the server left it running


def _become_vllm(flags: dict[str, Any], more: list[str], api_key: str | None) -> None:
    """Replace this process by vLLM's server.

    Args:
        flags: value of each of its flags; None leaves it out, True is the flag alone.
        more: words that come last and win.
    """
    # Not `vllm serve`: that program is missing from some builds, the module never is.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    for flag, value in flags.items():
        if value is not None:
            text = json.dumps(value) if isinstance(value, list | dict) else str(value)
            command += [f"--{flag}"] if value is True else [f"--{flag}", text]
    command += more
    notes().print(f"[dim]starting vLLM: {' '.join(command[1:])}[/]", highlight=False, soft_wrap=True)
    sys.stdout.flush()
    sys.stderr.flush()
    # The key goes through the environment: arguments can be read by everybody.
    os.execve(command[0], command, os.environ | ({} if api_key is None else {"VLLM_API_KEY": api_key}))
