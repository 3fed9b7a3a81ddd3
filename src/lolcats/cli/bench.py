"""`lolcats bench`: how fast attention, training and decoding run on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from lolcats.cli.options import chosen
from lolcats.errors import UserError

bench = typer.Typer(help="Measure speed and memory on this machine.", no_args_is_help=True)

Json = Annotated[Path | None, typer.Option("--json", help="Also write everything measured to this file.")]
Device = Annotated[str | None, typer.Option(help="cuda, cuda:1, cpu; a GPU if there is one.", show_default=False)]
Dtype = Annotated[str | None, typer.Option(help="bfloat16, float16 or float32.", show_default=False)]


@bench.command()
def attention(
    shapes: Annotated[
        str | None, typer.Option(help="Batch x tokens, such as 1x1024,16x4096.", show_default=False)
    ] = None,
    implementations: Annotated[
        str | None,
        typer.Option(help="Of triton, chunked, reference, sdpa_flash, sdpa_cudnn, fla.", show_default=False),
    ] = None,
    modes: Annotated[str | None, typer.Option(help="Of forward, train, stage1.", show_default=False)] = None,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 32,
    kv_heads: Annotated[int, typer.Option(min=1, help="Key/value heads.")] = 8,
    head_dim: Annotated[int, typer.Option(min=1, help="Dimensions of a head.")] = 128,
    feature_dim: Annotated[int, typer.Option(min=1, help="Columns of a feature map.")] = 64,
    seconds: Annotated[float, typer.Option(min=0.0, help="Measuring time for each number.")] = 1.0,
    device: Device = None,
    dtype: Dtype = None,
    as_json: Json = None,
) -> None:
    """Hybrid attention of one layer against softmax attention (flash, cuDNN), fla, and its own plain versions.

    Example:

      lolcats bench attention --shapes 1x1024,8x4096 --json attention.json
    """
    from lolcats.bench import attention as benchmark

    settings: dict[str, Any] = {
        "shapes": None if shapes is None else tuple(_shape(text) for text in shapes.split(",")),
        "implementations": chosen("implementations", implementations, benchmark.IMPLEMENTATIONS),
        "modes": chosen("modes", modes, benchmark.MODES),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "feature_dim": feature_dim,
        "budget_s": seconds,
        "device": device,
        "dtype": dtype,
    }
    if heads % kv_heads:
        raise UserError(f"--heads {heads} is not a multiple of --kv-heads {kv_heads}")
    _measure(benchmark, benchmark.AttentionBench(**_given(settings)), as_json)


@bench.command()
def train(
    model: Annotated[
        str | None, typer.Option(help="Shape: llama3-8b, smollm2-135m or tiny.", show_default=False)
    ] = None,
    shapes: Annotated[
        str | None,
        typer.Option(help="Micro-batch x tokens, such as 4x1024,8x1024; one length.", show_default=False),
    ] = None,
    rows: Annotated[str | None, typer.Option(help="Of transfer, adjust, softmax, frozen.", show_default=False)] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer updates measured.")] = 20,
    accumulate: Annotated[int, typer.Option(min=1, help="Micro-batches of an optimizer update.")] = 1,
    lora_rank: Annotated[int, typer.Option(min=1)] = 8,
    gradient_checkpointing: Annotated[bool, typer.Option(help="Recompute activations in stage 2.")] = False,
    fused_kernels: Annotated[bool, typer.Option(help="Use liger-kernel where it is installed.")] = True,
    cuda_graphs: Annotated[bool, typer.Option(help="Run micro-steps as CUDA graphs.")] = True,
    device: Device = None,
    dtype: Dtype = None,
    as_json: Json = None,
) -> None:
    """Both training stages on a model with random weights; beside them its plain forward pass and LoRA with softmax.

    Example:

      lolcats bench train --model llama3-8b --shapes 4x1024 --json train.json
    """
    from lolcats.bench import train as benchmark

    pairs = [] if shapes is None else [_shape(text) for text in shapes.split(",")]
    if len({tokens for _, tokens in pairs}) > 1:
        raise UserError(f"--shapes {shapes}: one number of tokens for all, please; run the others apart")
    settings: dict[str, Any] = {
        "model": model,
        "micro_batches": tuple(size for size, _ in pairs) or None,
        "tokens": pairs[0][1] if pairs else None,
        "rows": chosen("rows", rows, benchmark.ROWS),
        "steps": steps,
        "accumulate": accumulate,
        "lora_rank": lora_rank,
        "gradient_checkpointing": gradient_checkpointing,
        "fused_kernels": "auto" if fused_kernels else "off",
        "cuda_graphs": "auto" if cuda_graphs else "off",
        "device": device,
        "dtype": dtype,
    }
    _measure(benchmark, benchmark.TrainBench(**_given(settings)), as_json)


@bench.command()
def decode(
    model: Annotated[
        str | None, typer.Option(help="Shape: llama3-8b, smollm2-135m or tiny.", show_default=False)
    ] = None,
    sections: Annotated[
        str | None, typer.Option(help="Of throughput, softmax, latency, prefill, endurance.", show_default=False)
    ] = None,
    batches: Annotated[
        str | None, typer.Option(help="Sequences at a time, such as 1,64,1024.", show_default=False)
    ] = None,
    softmax_batches: Annotated[str | None, typer.Option(help="The same for softmax.", show_default=False)] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Of a sequence, for throughput.")] = 128,
    new_tokens: Annotated[int, typer.Option(min=16, help="Of a sequence, for throughput.")] = 4096,
    full_run_batch: Annotated[
        int, typer.Option(min=0, help="Really generate all new tokens at this one of the batch sizes.")
    ] = 0,
    positions: Annotated[
        str | None, typer.Option(help="Where latency is measured, such as 1000,100000.", show_default=False)
    ] = None,
    prefill_lengths: Annotated[
        str | None, typer.Option(help="Prompts, such as 1024,131072.", show_default=False)
    ] = None,
    endurance_model: Annotated[str | None, typer.Option(help="Shape for endurance.", show_default=False)] = None,
    endurance_tokens: Annotated[
        int | None, typer.Option(min=0, help="That one sequence generates; 0: none.", show_default=False)
    ] = None,
    seconds: Annotated[float, typer.Option(min=1.0, help="For everything; what does not fit is left out.")] = 230.0,
    device: Device = None,
    dtype: Dtype = None,
    as_json: Json = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw a PNG; needs matplotlib.")] = None,
) -> None:
    """Generation with a model of random weights: linearized, with softmax, and the device's floor.

    Example:

      lolcats bench decode --model llama3-8b --json decode.json --plot decode.png
    """
    from lolcats.bench import decode as benchmark

    settings: dict[str, Any] = {
        "model": model,
        "sections": chosen("sections", sections, benchmark.SECTIONS),
        "batches": _numbers("batches", batches),
        "softmax_batches": _numbers("softmax-batches", softmax_batches),
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "full_run_batch": full_run_batch,
        "positions": _numbers("positions", positions),
        "prefill_lengths": _numbers("prefill-lengths", prefill_lengths),
        "endurance_model": endurance_model,
        "endurance_tokens": endurance_tokens,
        "seconds": seconds,
        "device": device,
        "dtype": dtype,
    }
    if plot is not None:
        from lolcats.bench.decode_plot import require_matplotlib

        require_matplotlib()
    report = _measure(benchmark, benchmark.DecodeBench(**_given(settings)), as_json)
    if plot is not None:
        from lolcats.bench.decode_plot import plot as draw

        try:
            draw(report, plot)
        except OSError as error:
            raise UserError(f"cannot write {plot}: {error.strerror}") from error


def _measure(benchmark: Any, settings: Any, as_json: Path | None) -> dict[str, Any]:
    """Progress on stderr, the table on stdout; the file is written after every row."""
    from rich.console import Console

    from lolcats.bench.attention import save
    from lolcats.cli.console import notes

    report = benchmark.run(settings, notes(), lambda found: None if as_json is None else save(found, as_json))
    benchmark.print_table(report, Console())
    return report


def _given(settings: dict[str, Any]) -> dict[str, Any]:
    """Without what was not given, so that the benchmark's own default holds."""
    return {name: value for name, value in settings.items() if value is not None}


def _shape(text: str) -> tuple[int, int]:
    batch, cross, tokens = text.strip().partition("x")
    if not (cross and batch.isdigit() and tokens.isdigit() and int(batch) and int(tokens)):
        raise UserError(f"--shapes: expected batch x tokens such as 8x1024, got {text!r}")
    return int(batch), int(tokens)


def _numbers(option: str, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) for part in parts):
        raise UserError(f"--{option}: expected whole numbers such as 1,16,64, got {text!r}")
    return tuple(int(part) for part in parts)
