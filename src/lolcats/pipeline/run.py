"""One linearization, from configuration to folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from rich.console import Console
from torch import Tensor

from lolcats.config import LinearizeConfig, ModelSection, OptimSection
from lolcats.config.fingerprint import config_fingerprint
from lolcats.conversion import convert, fit_positions, linearized_config, load_base_model
from lolcats.data import build_datasets
from lolcats.data.packed import BatchSampler
from lolcats.evaluation.perplexity import dataset_perplexity
from lolcats.export import export, export_sharded
from lolcats.modeling.call import AttentionCall
from lolcats.modeling.fused import fused_kernels
from lolcats.modeling.model import LolcatsForCausalLM
from lolcats.modeling.shards import checkpoint_folder
from lolcats.parallel.blockwise.assemble import assemble
from lolcats.parallel.blockwise.run import BlockwiseTransfer
from lolcats.parallel.blockwise.transfer import train_in_blocks
from lolcats.parallel.group import Group, fit_micro_batches
from lolcats.parallel.launch import open_group
from lolcats.parallel.sharding import load_sharded, shards_weights
from lolcats.pipeline.memo import Memo
from lolcats.pipeline.prepare import check_weights, prepare_folder, take_stage_1
from lolcats.provenance import provenance
from lolcats.report import REPORT_FILE, begin_report, model_card, perplexity_table, stage_summary
from lolcats.training.adjust import AdjustStage
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
    transfer_from: Path | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Linearize a model as `config` says and write it to `output`.

    Started by torchrun, all processes call this with the same arguments and share the work (`config.parallel`).

    Args:
        output: a new or empty folder, unless `resume` (go on with the run in it) or `overwrite` (begin again;
            files of the same names are replaced, others stay).
        transfer_from: folder of a run with the same settings up to stage 1, from which to take it.
        console: where progress and the final table go; None: a console on stderr.

    Returns:
        The report, as written to `lolcats_report.json`.

    Raises:
        UserError: whatever the user can mend, before anything is lost.
    """
    console = console or Console(stderr=True)
    with open_group(config.model.device, config.parallel.timeout) as group:
        resume = resume or transfer_from is not None
        run = Linearization(config, output, resume, console if group.is_main else Console(quiet=True), group)
        with group.sync_errors():
            run.check()
            if group.is_main:
                prepare_folder(config, output, resume=resume, overwrite=overwrite)
                if transfer_from is not None:
                    take_stage_1(transfer_from, output)
        return run()


class Linearization:
    """A run as one of its processes sees it; calling it goes through the methods in their order.

    Args:
        output: the run's folder, where what a killed run left lies in `run/`.
        resume: go on with that.
    """

    report: dict[str, Any]
    model: LolcatsForCausalLM

    def __init__(self, config: LinearizeConfig, output: Path, resume: bool, console: Console, group: Group) -> None:
        self.config, self.output, self.resume, self.console, self.group = config, output, resume, console, group
        self.folder = output / "run"
        self.sharded = shards_weights(config, group)
        self.transfers = config.transfer.enabled and not config.adjust.softmax_control

    def check(self) -> None:
        """Raises UserError if settings do not go together."""
        self.transfer = fit_micro_batches(self.config.transfer, "transfer", self.group, self.console.print)
        self.adjust = fit_micro_batches(self.config.adjust, "adjust", self.group, self.console.print)
        check_weights(self.config, self.sharded)

    def __call__(self) -> dict[str, Any]:
        blocks = self._train_blocks() if self.transfers and self.config.transfer.block_mode != "joint" else None
        if blocks is not None and not self.config.adjust.enabled:
            with self.group.sync_errors():
                return assemble(blocks, self.output, self.console) if self.group.is_main else {}
        self._load()
        self._measure("teacher", "softmax")
        if blocks is not None:
            self.report["stages"]["transfer"] = blocks.install(self.model)
            self._measure("transfer", "hybrid")
        else:
            self._measure("swapped", "hybrid")
            if self.transfers:
                self._train_stage_1()
        trained = self._train_stage_2() if self.config.adjust.enabled else self.model
        self._export(trained)
        return self.report

    def _train_blocks(self) -> BlockwiseTransfer:
        """Stage 1 without the whole model in memory."""
        return train_in_blocks(
            self.config,
            self.folder / "transfer",
            config_fingerprint(self.config, "transfer"),
            resume=self.resume,
            group=self.group,
            console=self.console,
        )

    def _load(self) -> None:
        """Model, data, and the beginning of the report."""
        config, group = self.config, self.group
        torch.manual_seed(config.seed)
        if self.sharded:
            self.model, self.tokenizer = self._load_sharded()
            base = self.model.model
        else:
            with group.sync_errors():
                base, self.tokenizer = load_base_model(_on_own_device(config.model, group))
                linearized_config(base, config.attention)  # what does not fit is said before the data are read
        data = fit_positions(config.data, base)
        self.base_dtype = base.dtype
        with group.main_first():
            self.train_data, self.validation = build_datasets(
                data, self.tokenizer, seed=config.seed, model=base, progress=group.is_main
            )
        if not self.sharded:
            torch.manual_seed(config.seed)  # feature maps start the same however the weights were loaded
            self.model = convert(base, config.attention)
        if config.adjust.enabled:  # what does not fit stage 2 is said now and not after stage 1
            BatchSampler(len(self.train_data), config.adjust.batch_size, config.seed)
            if config.adjust.method == "lora":
                adapted_projections(self.model, config.adjust)
        self.report = begin_report(config, self.train_data, self.validation)
        self.report["softmax_layers"] = self.model.softmax_layers()
        self.measured = Memo(self.folder / "perplexity.json", self.report["perplexity"], group)

    def _load_sharded(self, train_all: bool = False) -> tuple[LolcatsForCausalLM, Any]:
        config = self.config
        return load_sharded(
            config.model, config.attention, self.group, cpu_offload=config.parallel.cpu_offload, train_all=train_all
        )

    def _measure(self, name: str, mode: str) -> None:
        """Validation perplexity, as `name` in the report."""

        def compute() -> float:
            model, batch_size = self.model.eval(), self.config.adjust.micro_batch_size
            with self.console.status(f"perplexity: {name}"):
                return dataset_perplexity(
                    model,
                    self.validation,
                    batch_size=batch_size,
                    group=self.group,
                    attention_call=AttentionCall(mode=mode),
                )["perplexity"]

        self.console.print(f"validation perplexity, {name}: {self.measured(name, compute):.3f}")

    def _train(self, stage: TransferStage | AdjustStage, section: OptimSection, *depends_on: str) -> None:
        with fused_kernels(self.model, section.fused_kernels, self.console.print):
            result = train(
                stage,
                self.train_data,
                section,
                seed=self.config.seed,
                directory=self.folder / stage.name,
                resume=self.resume,
                progress=make_progress(quiet=not self.group.is_main, console=self.console),
                tensorboard=self.folder / "tensorboard" if self.config.output.tensorboard else None,
                fingerprint=config_fingerprint(self.config, *depends_on),
                group=self.group,
            )
        stage.close()
        self.report["stages"][stage.name] = stage_summary(result)

    def _train_stage_1(self) -> None:
        stage = TransferStage(self.model, self.transfer, self.validation, group=self.group, report=self.console.print)
        self._train(stage, self.transfer, "transfer")
        self._measure("transfer", "hybrid")

    def _train_stage_2(self) -> LolcatsForCausalLM | PeftModel:
        """Returns the model with its adapters."""
        if self.sharded and self.config.adjust.method == "full":
            feature_maps = _feature_maps(self.model)
            del self.model  # not both at once
            self.model, _ = self._load_sharded(train_all=True)
            _set_feature_maps(self.model, feature_maps)
        torch.manual_seed(self.config.seed)  # adapters start the same whatever ran before
        stage = AdjustStage(self.model, self.adjust, self.validation, group=self.group, report=self.console.print)
        self._train(stage, self.adjust, "transfer", "adjust")
        self._measure("adjust", "softmax" if self.config.adjust.softmax_control else "hybrid")
        return stage.model

    def _export(self, trained: LolcatsForCausalLM | PeftModel) -> None:
        config, group, report = self.config, self.group, self.report
        report["provenance"] = provenance()
        self.model.config.provenance = report["provenance"] | {"config": report["config"]}
        dtype = None if config.output.dtype == "same" else getattr(torch, config.output.dtype)
        if dtype is None and config.adjust.method == "full":
            dtype = self.base_dtype
        settings: dict[str, Any] = {
            "report": report,
            "card": model_card(report),
            "merge_lora": config.output.merge_lora,
            "dtype": dtype,
        }
        if self.sharded:
            export_sharded(trained, self.tokenizer, self.output, group, **settings)
        else:
            with group.sync_errors():
                if group.is_main and config.model.load_in_4bit:
                    checkpoint = checkpoint_folder(self.model.model.name_or_path, config.model.revision)
                    export_sharded(trained, self.tokenizer, self.output, **settings, checkpoint=checkpoint)
                elif group.is_main:
                    export(trained, self.tokenizer, self.output, **settings)
        self.console.print(perplexity_table(report))
        self.console.print(f"written: {self.output} (model, {REPORT_FILE}, run/)")


def _on_own_device(model: ModelSection, group: Group) -> ModelSection:
    return model if group.device is None else model.model_copy(update={"device": str(group.device)})


def _feature_maps(model: LolcatsForCausalLM) -> list[dict[str, Tensor]]:
    return [{name: p.detach() for name, p in module.named_parameters()} for _, module in model.linear_layers()]


def _set_feature_maps(model: LolcatsForCausalLM, weights: list[dict[str, Tensor]]) -> None:
    for (_, module), values in zip(model.linear_layers(), weights, strict=True):
        module.load_state_dict(values)
