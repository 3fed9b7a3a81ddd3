"""`lolcats linearize`: a pretrained model in, a linearized one out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from lolcats.cli.console import notes, quiet_loading_bars
from lolcats.cli.options import FIELDS, parse_layers, parse_source, resolve
from lolcats.errors import UserError

RUN, MODEL, ATTENTION, DATA, TRAINING = "Run", "Model", "Attention", "Data", "Training"


def _option(*names: str, panel: str, help: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=help, metavar=metavar, rich_help_panel=panel, show_default=False)


def linearize(
    model: Annotated[
        str | None, typer.Argument(help="Hub id or folder; may be left out if the recipe names one.")
    ] = None,
    output: Annotated[
        Path | None, _option("--output", "-o", panel=RUN, help="Folder for the linearized model.")
    ] = None,
    recipe: Annotated[
        str | None,
        _option("--recipe", "-r", panel=RUN, help="A recipe's name (`lolcats recipes`) or YAML file."),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        _option("--set", panel=RUN, metavar="SECTION.KEY=VALUE", help="Set any field; repeatable, wins over all."),
    ] = None,
    resume: Annotated[
        bool,
        _option("--resume", panel=RUN, help="Go on with the killed run in OUTPUT, with its configuration."),
    ] = False,
    overwrite: Annotated[
        bool,
        _option("--overwrite", panel=RUN, help="Begin again in a folder that is not empty; deletes nothing."),
    ] = False,
    transfer_from: Annotated[
        Path | None,
        _option("--transfer-from", panel=RUN, help="Take stage 1 from the folder of a run with the same settings."),
    ] = None,
    dry_run: Annotated[
        bool, _option("--dry-run", panel=RUN, help="Print the resolved configuration as YAML and stop.")
    ] = False,
    seed: Annotated[int | None, _option("--seed", panel=RUN, help="Seed of all random choices.")] = None,
    tensorboard: Annotated[
        bool | None,
        _option("--tensorboard", panel=RUN, help="Write TensorBoard logs to OUTPUT/run/tensorboard."),
    ] = None,
    device: Annotated[str | None, _option("--device", panel=MODEL, help="auto, cpu, cuda, cuda:1, ...")] = None,
    dtype: Annotated[str | None, _option("--dtype", panel=MODEL, help="auto, bfloat16, float16 or float32.")] = None,
    revision: Annotated[
        str | None, _option("--revision", panel=MODEL, help="Branch, tag or commit of the hub repository.")
    ] = None,
    gguf_file: Annotated[
        str | None,
        _option("--gguf-file", panel=MODEL, help="GGUF file inside MODEL, dequantised while loading."),
    ] = None,
    trust_remote_code: Annotated[
        bool | None,
        _option("--trust-remote-code", panel=MODEL, help="Run Python code that comes with MODEL."),
    ] = None,
    window: Annotated[str | None, _option("--window", panel=ATTENTION, help="terraced or sliding.")] = None,
    window_size: Annotated[
        int | None, _option("--window-size", panel=ATTENTION, help="Tokens; 0: linear attention alone.")
    ] = None,
    window_blocks: Annotated[
        int | None, _option("--window-blocks", panel=ATTENTION, help="Blocks of the terraced window.")
    ] = None,
    sinks: Annotated[
        int | None, _option("--sinks", panel=ATTENTION, help="First tokens that every query sees by softmax.")
    ] = None,
    sparse_cache: Annotated[
        int | None,
        _option("--sparse-cache", panel=ATTENTION, help="Tokens per head kept exact when they leave the window."),
    ] = None,
    cache_by: Annotated[
        str | None, _option("--cache-by", panel=ATTENTION, help="Which tokens: by their recall or leverage.")
    ] = None,
    feature_map: Annotated[
        str | None,
        _option("--feature-map", panel=ATTENTION, help="hedgehog, t2r, elu, exp, or none: window attention alone."),
    ] = None,
    feature_dim: Annotated[
        int | None, _option("--feature-dim", panel=ATTENTION, help="Columns of the feature map's weight.")
    ] = None,
    share_state: Annotated[
        str | None,
        _option("--share-state", panel=ATTENTION, help="One state per kv_head, or per query_head as in the paper."),
    ] = None,
    keep_softmax: Annotated[
        str | None,
        _option("--keep-softmax", panel=ATTENTION, metavar="LAYERS", help="Layers that stay softmax: 0-15,20"),
    ] = None,
    data: Annotated[
        list[str] | None,
        _option(
            "--data",
            panel=DATA,
            metavar="PATH[,KEY=VALUE]...",
            help="Hub id, local json, jsonl(.gz), parquet or txt, or `demo`; repeatable. Keys: weight, split, name,"
            " format, text_column, max_rows, loss_on. Replaces the recipe's data.",
        ),
    ] = None,
    sequence_length: Annotated[
        int | None, _option("--sequence-length", panel=DATA, help="Tokens of a packed training sequence.")
    ] = None,
    max_tokens: Annotated[
        int | None, _option("--max-tokens", panel=DATA, help="Training tokens to pack (of one epoch).")
    ] = None,
    loss_on: Annotated[
        str | None, _option("--loss-on", panel=DATA, help="answer (of instruction records) or all tokens.")
    ] = None,
    epochs: Annotated[
        float | None, _option("--epochs", panel=TRAINING, help="Passes over the data, in each stage.")
    ] = None,
    max_steps: Annotated[
        int | None, _option("--max-steps", panel=TRAINING, help="Optimizer updates in each stage.")
    ] = None,
    batch_size: Annotated[
        int | None, _option("--batch-size", panel=TRAINING, help="Sequences per update, in both stages.")
    ] = None,
    micro_batch_size: Annotated[
        int | None,
        _option("--micro-batch-size", panel=TRAINING, help="Sequences per forward pass; lower it to save memory."),
    ] = None,
    block_layers: Annotated[
        int | None, _option("--block-layers", panel=TRAINING, help="Layers per block in stage 1, each trained apart.")
    ] = None,
    block_mode: Annotated[
        str | None,
        _option("--block-mode", panel=TRAINING, help="joint, streaming (one block in memory), pipelined or jobs."),
    ] = None,
    job_folder: Annotated[
        str | None,
        _option("--job-folder", panel=TRAINING, help="Mode jobs: folder of trained blocks (`lolcats blocks`)."),
    ] = None,
    transfer: Annotated[
        bool | None, _option("--transfer/--no-transfer", panel=TRAINING, help="Stage 1, attention transfer.")
    ] = None,
    adjust: Annotated[
        bool | None, _option("--adjust/--no-adjust", panel=TRAINING, help="Stage 2, low-rank adjusting.")
    ] = None,
    train_feature_maps: Annotated[
        bool | None,
        _option("--train-feature-maps", panel=TRAINING, help="Train feature maps in stage 2 as well."),
    ] = None,
    lora_rank: Annotated[int | None, _option("--lora-rank", panel=TRAINING, help="Rank of the adapters.")] = None,
    distill: Annotated[
        float | None,
        _option("--distill", panel=TRAINING, help="Share of KL to the softmax teacher in stage 2's loss, 0 to 1."),
    ] = None,
    merge_lora: Annotated[
        bool | None,
        _option("--merge-lora/--keep-adapter", panel=TRAINING, help="Merge LoRA, or keep it in OUTPUT/adapter."),
    ] = None,
) -> None:
    """Replace a model's softmax attention by linear attention and train it to match.

    Stage 1 (attention transfer) trains the feature maps to reproduce each softmax attention's output.

    Stage 2 (low-rank adjusting) trains LoRA adapters for next-token prediction.

    OUTPUT becomes a Hugging Face folder; its run/ folder holds configuration and checkpoints.

    Examples:

      lolcats linearize HuggingFaceTB/SmolLM2-135M-Instruct --data yahma/alpaca-cleaned -o out/

      lolcats linearize --recipe llama-3.1-8b -o out/

      lolcats linearize my-model/ --data chat.jsonl,weight=3 --data books.jsonl --keep-softmax 0-3 -o out/

      lolcats linearize -o out/ --resume
    """
    arguments = locals()
    given = {option: arguments[option] for option in FIELDS}
    given["keep_softmax"] = None if keep_softmax is None else parse_layers(keep_softmax)
    given["data"] = [parse_source(text) for text in data] if data else None
    if feature_map is not None and feature_map.lower() == "none":
        # None in `given` means "not given"; the configuration's null is set like any other field.
        given["feature_map"] = None
        overrides = ["attention.feature_map=null", *(overrides or [])]
    saved = None
    if resume and recipe is None and model is None:
        saved = _saved_config(output)
    config = resolve(given, recipe=recipe, overrides=overrides or [], saved=saved)
    if dry_run:
        typer.echo(config.to_yaml(), nl=False)
        return
    if output is None:
        raise UserError("no output folder: give --output (-o), for example -o out/")
    quiet_loading_bars()
    from lolcats import pipeline

    pipeline.linearize(config, output, resume=resume, overwrite=overwrite, transfer_from=transfer_from, console=notes())


def _saved_config(output: Path | None) -> Path:
    if output is None:
        raise UserError("--resume needs the folder of the run: give --output (-o)")
    saved = output / "run" / "config.yaml"
    if not saved.is_file():
        raise UserError(f"nothing to resume: {saved} does not exist; give a model or a recipe to start a run")
    return saved
