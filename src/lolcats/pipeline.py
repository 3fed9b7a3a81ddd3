"""The whole story: a pretrained model in, a linearized one out.

    load -> data -> convert -> stage 1 (transfer) -> stage 2 (adjust) -> export

The output folder holds the model; its `run/` folder holds what a killed run needs to go on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from rich.console import Console
from transformers import PreTrainedModel

from lolcats.config import DataSection
from lolcats.config import LinearizeConfig
from lolcats.config import OptimSection
from lolcats.conversion import convert
from lolcats.conversion import load_base_model
from lolcats.data import build_datasets
from lolcats.errors import UserError
from lolcats.evaluation.perplexity import dataset_perplexity
from lolcats.export import REPORT_FILE
from lolcats.export import export
from lolcats.modeling.fused import fused_kernels
from lolcats.modeling.model import LolcatsForCausalLM
from lolcats.provenance import provenance
from lolcats.report import model_card
from lolcats.report import perplexity_table
from lolcats.report import stage_summary
from lolcats.training.adjust import AdjustStage
from lolcats.training.checkpoint import differences
from lolcats.training.checkpoint import read_json
from lolcats.training.checkpoint import write_json
from lolcats.training.loop import NOT_DECIDING
from lolcats.training.loop import train
from lolcats.training.lora import adapted_projections
from lolcats.training.progress import make_progress
from lolcats.training.transfer import TransferStage


def linearize(
    config: LinearizeConfig,
    output: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    console: Console | None = None,
) -> dict[str, Any]:
    """Linearize a model as `config` says and write it to `output`.

    Args:
        output: a new or empty folder, unless `resume` (go on with the run in it) or `overwrite` (begin again;
            files of the same names are replaced, others stay).
        console: where progress and the final table go; None: a console on stderr.

    Returns:
        The report, as written to `lolcats_report.json`.

    Raises:
        UserError: whatever the user can mend, before anything is lost.
    """
    console = console or Console(stderr=True)
    run = output / "run"
    _prepare(config, output, run, resume, overwrite)
    torch.manual_seed(config.seed)
    base, tokenizer = load_base_model(config.model)
    _check_length(config.data, base)
    base_dtype = base.dtype
    train_data, validation = build_datasets(config.data, tokenizer, seed=config.seed, model=base)
    report: dict[str, Any] = {
        "base_model": config.model.path,
        "config": config.model_dump(mode="json"),
        "data": {"train": train_data.info, "validation": validation.info},
        "perplexity": {},
        "stages": {},
    }
    measured = _Memo(run / "perplexity.json", report["perplexity"])

    model = convert(base, config.attention)
    if config.adjust.enabled and config.adjust.method == "lora":
        adapted_projections(model, config.adjust)  # what does not fit is said now and not after stage 1
    report["softmax_layers"] = model.softmax_layers()
    batch_size = config.adjust.micro_batch_size

    def measure(name: str, mode: str) -> None:
        def compute() -> float:
            model.eval()
            with model.attention_mode(mode), console.status(f"perplexity: {name}"):
                return dataset_perplexity(model, validation, batch_size=batch_size)["perplexity"]

        value = measured(name, compute)
        console.print(f"validation perplexity, {name}: {value:.3f}")

    measure("teacher", "softmax")
    measure("swapped", "linear")

    def run_stage(stage: TransferStage | AdjustStage, section: OptimSection, *depends_on: str) -> None:
        with fused_kernels(model, section.fused_kernels, console.print):
            result = train(
                stage,
                train_data,
                section,
                seed=config.seed,
                directory=run / stage.name,
                resume=resume,
                progress=make_progress(console=console),
                tensorboard=run / "tensorboard" if config.output.tensorboard else None,
                fingerprint=_deciding(config, *depends_on),
            )
        stage.close()
        report["stages"][stage.name] = stage_summary(result)

    if config.transfer.enabled and not config.adjust.softmax_control:
        run_stage(TransferStage(model, config.transfer, validation, report=console.print), config.transfer, "transfer")
        measure("transfer", "linear")
    trained: LolcatsForCausalLM | PeftModel = model
    if config.adjust.enabled:
        torch.manual_seed(config.seed)  # adapters start the same whatever ran before
        adjust = AdjustStage(model, config.adjust, validation, report=console.print)
        run_stage(adjust, config.adjust, "transfer", "adjust")
        trained = adjust.model
        measure("adjust", "softmax" if config.adjust.softmax_control else "linear")

    report["provenance"] = provenance()
    model.config.provenance = report["provenance"] | {"config": report["config"]}
    dtype = None if config.output.dtype == "same" else getattr(torch, config.output.dtype)
    if dtype is None and config.adjust.method == "full":
        dtype = base_dtype
    export(
        trained,
        tokenizer,
        output,
        report=report,
        card=model_card(report),
        merge_lora=config.output.merge_lora,
        dtype=dtype,
    )
    console.print(perplexity_table(report))
    console.print(f"written: {output} (model, {REPORT_FILE}, run/)")
    return report


class _Memo:
    """Numbers measured once and kept in a file, so that a resumed run does not measure them again."""

    def __init__(self, file: Path, values: dict[str, float]) -> None:
        self.file, self.values = file, values
        if file.exists():
            values.update(read_json(file))

    def __call__(self, name: str, compute: Callable[[], float]) -> float:
        if name not in self.values:
            self.values[name] = compute()
            write_json(self.file, self.values)
        return self.values[name]


def _prepare(config: LinearizeConfig, output: Path, run: Path, resume: bool, overwrite: bool) -> None:
    """Make the output folder ours, without deleting anything in it."""
    if resume and overwrite:
        raise UserError("--resume goes on with a run and --overwrite begins again; choose one of them")
    if output.exists() and not output.is_dir():
        raise UserError(f"{output} is a file; choose a folder for --output")
    saved = run / "config.yaml"
    if resume and saved.exists():
        before = LinearizeConfig.from_yaml(saved)
        changed = differences(_deciding(before), _deciding(config))
        if changed:
            raise UserError(
                f"{saved} was made with another configuration; it differs in\n  "
                + "\n  ".join(changed)
                + "\nUse the same options to resume, or another --output"
            )
    elif output.exists() and any(output.iterdir()) and not overwrite and not resume:
        raise UserError(
            f"{output} is not empty. Choose another --output, or pass --resume to go on with the run in it, or"
            " --overwrite to begin again (files of the same names are replaced, nothing else is deleted)"
        )
    try:
        if overwrite and run.exists():
            run.rename(_unused(output, "run-old"))
        run.mkdir(parents=True, exist_ok=True)
        saved.write_text(config.to_yaml())
    except OSError as error:
        raise UserError(f"cannot write to {output}: {error}; choose another --output") from error


def _unused(folder: Path, stem: str) -> Path:
    return next(path for number in itertools.count(1) if not (path := folder / f"{stem}-{number}").exists())


def _deciding(config: LinearizeConfig, *stages: str) -> dict[str, Any]:
    """The fields of the configuration that decide the weights after the given stages."""
    values = config.model_dump(mode="json", include={"model", "attention", "data", "seed", *stages})
    values["model"].pop("device")
    for stage in stages:
        for name in NOT_DECIDING - {"enabled"}:
            values[stage].pop(name, None)
    return values


def _check_length(data: DataSection, base: PreTrainedModel) -> None:
    positions = getattr(base.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and data.sequence_length > positions:
        raise UserError(
            f"data.sequence_length={data.sequence_length} is longer than the {positions} positions that the model was"
            f" trained for; choose at most {positions}"
        )
