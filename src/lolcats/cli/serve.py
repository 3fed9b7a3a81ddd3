"""`lolcats serve`: an OpenAI-compatible server, vLLM's where it is installed, else the one that comes along."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from lolcats.cli.console import notes
from lolcats.cli.options import ATTENTION_OPTIONS, ModelLoader, model_options
from lolcats.errors import UserError

_NEEDED = ("fastapi", "uvicorn", "prometheus_client")


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
    cors: Annotated[
        list[str] | None,
        typer.Option(metavar="ORIGIN", help="Web pages from there may call the server; repeat it, or '*' for any."),
    ] = None,
    engine: Annotated[
        Literal["auto", "vllm", "lolcats"], typer.Option(help="auto: vLLM's server if it is installed.")
    ] = "auto",
    max_slots: Annotated[
        int | None, typer.Option(min=1, help="Sequences generated at a time.", show_default="32")
    ] = None,
    max_queue: Annotated[
        int | None, typer.Option(min=1, help="Sequences that may wait; more get status 429.", show_default="256")
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(
            min=2, help="Most tokens of prompt and answer.", show_default="what the model's configuration says"
        ),
    ] = None,
    max_tokens_limit: Annotated[
        int | None, typer.Option(min=1, help="Most new tokens of a request.", show_default="4096")
    ] = None,
    request_timeout: Annotated[
        float | None, typer.Option(min=0.1, help="Seconds for a request, waiting included.", show_default="600")
    ] = None,
    drain_timeout: Annotated[
        float | None,
        typer.Option(min=0.0, help="Seconds that running requests get after SIGTERM.", show_default="30"),
    ] = None,
    *,
    load: ModelLoader,
) -> None:
    """Serve a linearized model through OpenAI's protocol.

    /v1/chat/completions, /v1/completions, /v1/models, /health and /metrics. Ctrl-C and SIGTERM let running answers
    finish; a second one does not.

    With vLLM, everything after -- goes to its server.

    Examples:

      lolcats serve out/

      LOLCATS_API_KEY=secret lolcats serve out/ --host 0.0.0.0 --max-slots 64

      lolcats serve out/ --engine vllm -- --max-num-batched-tokens 4096
    """
    from lolcats.serving.vllm_server import become_vllm, vllm_command, vllm_installed

    name = served_model_name or (Path(model).resolve().name if Path(model).is_dir() else model)
    limits: dict[str, Any] = {
        "max_tokens_limit": max_tokens_limit,
        "request_timeout": request_timeout,
        "drain_timeout": drain_timeout,
    }
    limits = {option: value for option, value in limits.items() if value is not None}
    if engine == "vllm" and not vllm_installed():
        raise UserError('vLLM is not installed: pip install "lolcats[vllm]", or use --engine lolcats')
    if engine != "lolcats" and vllm_installed():
        own = limits | load.given | ({} if max_queue is None else {"max_queue": max_queue})
        attention = {name: own.pop(name) for name in ATTENTION_OPTIONS if name in own}
        for option in sorted(own.keys() - {"dtype", "trust_remote_code"}):
            flag = "--" + option.replace("_", "-")
            raise UserError(f"vLLM's server has no {flag}; leave it out, or use --engine lolcats")
        flags = {
            "model": model,
            "served-model-name": name,
            "host": host,
            "port": port,
            "dtype": load.given.get("dtype", "auto"),
            "max-num-seqs": max_slots,
            "max-model-len": max_length,
            "trust-remote-code": load.given.get("trust_remote_code"),
            "hf-overrides": {"attention": attention} if attention else None,
            "allowed-origins": cors or None,
        }
        command = vllm_command(flags, ctx.args)
        why = "as it is installed; --engine lolcats asks for the built-in one" if engine == "auto" else "as asked for"
        notes().print(f"engine: vLLM, {why}", highlight=False, soft_wrap=True)
        notes().print(f"[dim]starting vLLM: {' '.join(command[1:])}[/]", highlight=False, soft_wrap=True)
        become_vllm(command, api_key)
        return
    if ctx.args:
        raise UserError(f"only vLLM's server takes flags after --; got {' '.join(ctx.args)}")
    missing = [module for module in _NEEDED if importlib.util.find_spec(module) is None]
    if missing:
        raise UserError(f'the server needs {", ".join(missing)}: pip install "lolcats[serve]"')
    from lolcats.generation.engine import Engine
    from lolcats.serving.server import Server, is_local, listen
    from lolcats.serving.service import ServerSettings

    with listen(host, port) as socket:  # before the model is loaded: a port in use shows at once
        loaded, tokenizer = load(model)
        limit: dict[str, Any] = {"max_slots": max_slots or 32, "max_queue": max_queue or 256, "max_length": max_length}
        runs = Engine(loaded, tokenizer, **limit)
        server = Server(runs, ServerSettings(name, api_key, max_length=max_length, cors=tuple(cors or ()), **limits))
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
