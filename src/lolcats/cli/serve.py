"""`lolcats serve`: an OpenAI-compatible server over the engine."""

from __future__ import annotations

import importlib.util
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from lolcats.cli.console import notes
from lolcats.cli.options import ModelLoader, model_options, settings_options
from lolcats.config import validated
from lolcats.errors import UserError
from lolcats.serving.settings import ServerSettings

_NEEDED = ("fastapi", "uvicorn")


@settings_options(ServerSettings, "cors", "max_slots", "max_queue", "max_length", "drain_timeout")
@model_options
def serve(
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
    *,
    load: ModelLoader,
    settings: dict[str, Any],
) -> None:
    """Serve a linearized model through OpenAI's protocol.

    /v1/chat/completions, /v1/completions, /v1/models and /health. Ctrl-C and SIGTERM let running answers
    finish; a second Ctrl-C does not. Where vLLM is installed, its server takes the same folder: vllm serve DIR

    Examples:

      lolcats serve out/

      LOLCATS_API_KEY=secret lolcats serve out/ --host 0.0.0.0 --max-slots 64
    """
    missing = [module for module in _NEEDED if importlib.util.find_spec(module) is None]
    if missing:
        raise UserError(f'the server needs {", ".join(missing)}: pip install "lolcats[serve]"')
    from lolcats.generation.engine import Engine
    from lolcats.serving.server import Server, listen

    name = served_model_name or (Path(model).resolve().name if Path(model).is_dir() else model)
    checked = validated(ServerSettings, settings | {"model_name": name, "api_key": api_key})
    with listen(host, port) as socket:  # before the model is loaded: a port in use shows at once
        loaded, tokenizer = load(model)
        engine = Engine(loaded, tokenizer, max_slots=checked.max_slots, max_length=checked.max_length)
        shown = f"[{host}]" if ":" in host else host
        notes().print(f"serving {name} at http://{shown}:{socket.getsockname()[1]}/v1", highlight=False, markup=False)
        if host not in ("127.0.0.1", "::1", "localhost") and api_key is None:
            notes().print("[yellow]anybody who reaches this address can use it; --api-key asks for a key[/]")
        with suppress(KeyboardInterrupt):  # uvicorn raises it after the end that Ctrl-C asked for
            Server(engine, checked).run([socket])
        engine.shutdown(drain=False)  # after a second signal the server left it running
