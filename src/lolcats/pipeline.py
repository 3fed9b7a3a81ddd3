"""The whole way: a pretrained model in, a linearized one out.

    load -> data -> convert -> stage 1 (transfer) -> exact heads (gates or scores) -> stage 2 (adjust) -> export

The output folder holds the model; its `run/` folder holds what an interrupted run needs to resume. Nothing is written
before everything that can be refused has been checked.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import yaml
from peft import PeftModel
from rich.console import Console
from transformers import PreTrainedModel

from lolcats.checkpoint.read import checkpoint_folder
from lolcats.checkpoint.verify import QUANTISED_TOLERANCE, ROUNDED_TOLERANCE, reload_check
from lolcats.checkpoint.write import dense_weights, export, stored_weights
from lolcats.config import DataSection, LinearizeConfig, ModelSection, OptimSection
from lolcats.conversion import (
    check_architecture,
    convert,
    covered_positions,
    fit_positions,
    linearized_config,
    positions_of,
)
from lolcats.data import PackedDataset, build_datasets
from lolcats.data.packed import BatchSampler
from lolcats.data.retrieval import retrieval_dataset
from lolcats.errors import UserError
from lolcats.evaluation.effective_length import keep_longest
from lolcats.evaluation.perplexity import dataset_perplexity
from lolcats.modeling.cache_size import REPORTED_TOKENS, cache_bytes, cache_report, heads_in_budget, window_in_budget
from lolcats.modeling.call import SOFTMAX, AttentionCall
from lolcats.modeling.configuration import LolcatsConfig
from lolcats.modeling.fused import fused_kernels
from lolcats.modeling.heads import by_layer
from lolcats.modeling.loading import load_base_model, locate
from lolcats.modeling.model import LolcatsForCausalLM
from lolcats.modeling.quantised import Quantisation, refuse_without_gradient
from lolcats.parallel.blockwise.modes import train_in_blocks
from lolcats.parallel.blockwise.transfer import BlockwiseTransfer
from lolcats.parallel.group import Group, fit_micro_batches
from lolcats.parallel.launch import open_group
from lolcats.parallel.sharding import load_sharded, shards_weights
from lolcats.provenance import provenance
from lolcats.report import REPORT_FILE, begin_report, model_card, perplexity_table, stage_summary
from lolcats.self_data import written_file, written_key
from lolcats.training.attention_transfer import TransferStage
from lolcats.training.checkpoint import read_json, write_json
from lolcats.training.finetune import AdjustStage
from lolcats.training.folder import DONE_FILE, refuse_other_settings
from lolcats.training.head_gates import GateStage, by_gate, heads_picture
from lolcats.training.identity import ArtefactIdentity, weights_hash
from lolcats.training.loop import stage_fingerprint, train
from lolcats.training.lora import adapted_projections
from lolcats.training.progress import Progress
from lolcats.training.run_folder import PERPLEXITY_FILE, FolderLock, check_folder, claim_folder, take_stages
from lolcats.training.tracking import Tracking

GATE_TEXTS = 32  # for the validation of gates
CURVE_SHARES = (0.03, 0.06, 0.12, 0.25, 0.5)  # of the heads made exact, for `select_heads`


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
        output: a new or empty folder, unless `resume` (the run in it) or `overwrite` (begin again;
            the model in it is replaced, other files and the old run stay).
        transfer_from: folder of a run with the same settings up to stage 1, from which to take it; and the gates, if
            they were learned with the same settings too.
        console: where progress and the final table go; None: a console on stderr.

    Returns:
        The report, as written to `lolcats_report.json`.

    Raises:
        UserError: whatever the user can fix. What is refused at the start leaves `output` as it was.
    """
    console = console or Console(stderr=True)
    with open_group(config.model.device, config.parallel.timeout) as group:
        console = console if group.is_main else Console(quiet=True)
        run = Linearization(config, output, group, console, resume, overwrite, transfer_from)
        with run.opened():
            return run()


@dataclass(frozen=True)
class HeadChoice:
    """What gates say about exact heads.

    Attributes:
        gates: of each layer's KV heads.
        chosen: the heads that become exact, by layer.
        counts, divergences, cache_bytes: numbers of exact heads; the divergence from the softmax model with so many, in
            nats a token of retrieval texts; and the size of a sequence's cache at `REPORTED_TOKENS` tokens.
    """

    gates: dict[int, list[float]]
    chosen: dict[int, list[int]]
    counts: list[int]
    divergences: list[float]
    cache_bytes: list[int]


def select_heads(folder: Path, *, budget: str | None = None, console: Console | None = None) -> HeadChoice:
    """What a budget of exact heads buys in a run of `linearize` that chose heads by gates; its model is not changed.

    Args:
        folder: the run's output.
        budget: as `attention.exact`; None: the run's own.

    Raises:
        UserError: there is no such run, or as `linearize`.
    """
    console = console or Console(stderr=True)
    if not (folder / "run" / "config.yaml").is_file():
        raise UserError(
            f"{folder} has no run/config.yaml: name the output folder of `lolcats linearize`, run/ included"
        )
    config = LinearizeConfig.from_yaml(folder / "run" / "config.yaml")
    own = config.attention.exact_budget
    if own is None:
        raise UserError(f"{folder} was made without gates: linearize with a budget, attention.exact=12% say")
    if config.transfer.enabled and config.transfer.block_mode != "joint":
        raise UserError(f"{folder} chose its heads by scores and not by gates: see gates.values in its {REPORT_FILE}")
    with open_group(config.model.device, config.parallel.timeout) as group:
        console = console if group.is_main else Console(quiet=True)
        run = Linearization(config, folder, group, console, resume=True, overwrite=False, transfer_from=None)
        with run.opened():
            return run.select(budget or own)


@dataclass
class Linearization:
    """A run as one of its processes sees it: `check`, then the call, which goes through the methods in their order.

    Args: as of `linearize`.
    """

    config: LinearizeConfig
    output: Path
    group: Group
    console: Console
    resume: bool
    overwrite: bool
    transfer_from: Path | None
    own_data: dict[str, tuple[Path, dict[str, Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.resume = self.resume or self.transfer_from is not None
        self.folder, self.lock, self.begun = self.output / "run", FolderLock(self.output), False
        self.sharded = shards_weights(self.config, self.group)
        control = self.config.adjust.softmax_control
        self.transfers = self.config.transfer.enabled and not control
        self.in_blocks = self.transfers and self.config.transfer.block_mode != "joint"
        self.chooses_heads = self.config.attention.exact_budget is not None and not control
        self.tracking: Tracking | None = None
        self.measured: dict[str, dict[str, Any]] = {}
        self.data: dict[str, tuple[PackedDataset, PackedDataset]] = {}

    @contextmanager
    def opened(self) -> Iterator[None]:
        """The checks, then a block in which no other process uses the folder.

        Raises:
            UserError: as `check`.
            KeyboardInterrupt: the block was interrupted; says how to resume, if there is anything.
        """
        try:
            with self.group.sync_errors():
                self.check()
            yield
        except KeyboardInterrupt as stop:
            raise type(stop)(self._how_to_resume()) from None
        finally:
            self.lock.__exit__()

    def _how_to_resume(self) -> str:
        if not (self.folder / "config.yaml").is_file() or not (self.begun or self.resume):
            return "before the run began: there is nothing to resume"
        saved = max(self.folder.rglob("step-*"), key=lambda path: path.stat().st_mtime, default=None)
        place = "" if saved is None else f" from {saved.relative_to(self.output)}"
        return f"`lolcats linearize -o {shlex.quote(str(self.output))} --resume` continues{place}"

    def check(self) -> None:
        """Refuse what can be refused without reading weights and data; nothing is written.

        Raises:
            UserError: settings do not go together, or the folder holds something else.
        """
        self.transfer = fit_micro_batches(self.config.transfer, "transfer", self.group, self.console.print)
        self.gates = fit_micro_batches(self.config.gates, "gates", self.group, self.console.print)
        self.adjust = fit_micro_batches(self.config.adjust, "adjust", self.group, self.console.print)
        source = None if self.config.model.gguf_file else locate(self.config.model)
        self.quantisation = None if source is None else source.quantisation
        check_weights(self.config, self.sharded, self.quantisation)
        written = [
            source.path for stage in ("transfer", "adjust") for source in self.config.data_of(stage).written_sources
        ]
        if written and (self.sharded or self.in_blocks):
            raise UserError(
                f"{written[0]}: a model that is sharded, or read block by block, cannot write its own data; give data"
                " (--data), such as the rows.jsonl that a machine which holds the model wrote"
            )
        length, window = self.config.data_of("transfer").sequence_length, self.config.attention.capacity
        if self.transfers and self.config.attention.has_both_parts and length <= window:
            longer = f"data.sequence_length above {window}, or "
            if source is not None and positions_of(source) <= window:
                longer = ""  # which the model's positions forbid
            raise UserError(
                f"stage 1's sequences of {length} tokens lie within the softmax window of up to {window} keys, so that"
                f" feature maps would learn nothing: set {longer}a smaller attention.window_size (--window-size)"
            )
        if (linearized := check_architecture(self.config.model, self.config.attention, self.config.data)) is not None:
            dtype: Any = getattr(torch, self.config.model.dtype, linearized.dtype)
            self._check_budget(linearized, dtype or torch.float32)
        track = self.config.output.track
        if track is not None and self.group.is_main:
            self.tracking = Tracking(track, self.folder / "tracking", self.config.model_dump(mode="json"))
        if self.group.is_main:
            if self.output.is_dir():
                self.lock.__enter__()
            check_folder(self.config, self.output, resume=self.resume, overwrite=self.overwrite)
            if self.transfer_from is not None and not self.transfers:
                raise UserError("--transfer-from takes stage 1 of another run, and this one has none; leave it out")
            if self.transfer_from is not None and not (self.transfer_from / "run" / "transfer" / DONE_FILE).is_file():
                raise UserError(f"--transfer-from {self.transfer_from}: there is no finished stage 1 in it")

    def __call__(self) -> dict[str, Any]:
        blocks = self._train_blocks() if self.in_blocks else None
        if blocks is not None and not self.config.adjust.enabled:
            with self.group.sync_errors():
                return blocks.export(self.output) if self.group.is_main else {}
        self._load()
        if blocks is None:
            self._begin(self.model, self.data)
        self._begin_report()
        with self.group.sync_errors():
            if (self.folder / PERPLEXITY_FILE).exists():
                self.measured = read_json(self.folder / PERPLEXITY_FILE)
        self._measure("teacher", "softmax")
        if blocks is not None:
            self.report["stages"]["transfer"] = blocks.install(self.model)
            self._measure("transfer", "hybrid")
        else:
            self._measure("swapped", "hybrid")
            if self.transfers:
                self._train_stage_1()
                self._measure("transfer", "hybrid")
        if self.chooses_heads:
            self.report["gates"] = self._choose_by_gates() if blocks is None else blocks.head_choice
            self.model.set_exact(self.report["gates"]["chosen"])
            self._measure("gates", "hybrid")
        self.report["exact_heads"] = self.model.config.exact_heads
        self.report["cache"] = cache = cache_report(self.model.config, self.base_dtype)
        if self.config.adjust.softmax_control:
            cache["bytes"] = cache["softmax_bytes"]
        trained: LolcatsForCausalLM | PeftModel = self.model
        if self.config.adjust.enabled:
            trained = self._train_stage_2()
            self._measure("adjust", "softmax" if self.config.adjust.softmax_control else "hybrid")
        self._export(trained)
        return self.report

    def _begin(self, model: LolcatsForCausalLM, data: Mapping[str, tuple[PackedDataset, PackedDataset]]) -> None:
        """The last checks; then the folder becomes that of this run.

        Raises:
            UserError: stages do not fit the model or the data, or what is to be resumed has other settings or data.
        """
        config = self.config
        stages = [
            ("transfer", self.transfer, self.transfers),
            ("gates", self.gates, self.chooses_heads),
            ("adjust", self.adjust, config.adjust.enabled),
        ]
        taken = []
        with self.group.sync_errors():
            for name, section, enabled in stages:
                if not enabled or name not in data:
                    continue
                train_data, validation = data[name]
                BatchSampler(len(train_data), section.batch_size, config.seed)
                if self.resume:
                    values = self._identity(name, validation).values
                    fingerprint = stage_fingerprint(section, train_data, config.seed, values)
                    refuse_other_settings(self.folder / name, fingerprint)
                    if self.transfer_from is not None and name != "adjust":
                        try:
                            refuse_other_settings(self.transfer_from / "run" / name, fingerprint)
                            taken.append(name)
                        except UserError:
                            if name == "transfer":
                                raise
            if config.adjust.enabled and config.adjust.method == "lora":
                adapted_projections(model, config.adjust)
            if self.quantisation is not None and (config.adjust.enabled or self.chooses_heads):
                refuse_without_gradient(model)
            self._check_budget(model.config, model.model.dtype)
            if self.group.is_main:
                self.lock.__enter__()
                check_folder(config, self.output, resume=self.resume, overwrite=self.overwrite)  # now that it is ours
                claim_folder(config, self.output, overwrite=self.overwrite)
                if self.transfer_from is not None:
                    take_stages(self.transfer_from, self.output, taken)
        self.begun = True
        settings = yaml.safe_dump(config.model_dump(mode="json", exclude_defaults=True), sort_keys=False)
        self.console.print(f"settings other than the defaults ({self.folder}/config.yaml has all):")
        self.console.print(settings, markup=False, highlight=False, soft_wrap=True)

    def _check_budget(self, linearized: LolcatsConfig, dtype: torch.dtype) -> None:
        """A UserError if the budget of exact heads buys none or all, or their window's bytes hold too little."""
        attention = self.config.attention
        if self.chooses_heads and (budget := attention.exact_budget) is not None:
            chosen = heads_in_budget(linearized, budget, dtype)
            if isinstance(attention.exact_window, str):
                window_in_budget(linearized, attention, dtype, chosen)

    @cached_property
    def weights(self) -> str:
        return weights_hash(self.config.model)

    def _identity(self, stage: str, validation: PackedDataset, heads: list[str] | None = None) -> ArtefactIdentity:
        """Of what comes after a stage."""
        stages = ["transfer", *(["gates"] if self.chooses_heads else []), "adjust"]
        stages = stages[: stages.index(stage) + 1]
        return ArtefactIdentity.of(self.config, *stages, weights=self.weights, validation=validation, heads=heads)

    def _begin_report(self) -> None:
        data = {stage: train for stage, (train, _) in self.data.items() if stage != "gates"}
        self.report = begin_report(self.config, data, self.validation)
        if self.own_data:
            self.report["data"]["written"] = [report for _, report in self.own_data.values()]

    def _train_blocks(self) -> BlockwiseTransfer:
        """Stage 1, and the choice of exact heads, without the whole model in memory."""
        shared = self.config.data_of("adjust") == self.config.data_of("transfer")
        known = ["transfer", *(["adjust"] if shared else [])]  # of which the data are read
        blocks = train_in_blocks(
            self.config,
            self.folder / "transfer",
            resume=self.resume,
            group=self.group,
            console=self.console,
            begin=lambda run: self._begin(
                run.partial.model, dict.fromkeys(known, (run.datasets["train"], run.datasets["validation"]))
            ),
        )
        if self.chooses_heads:
            with self.group.main_first():  # which writes the scores that the others read
                _ = blocks.head_choice
        return blocks

    def _load(self) -> None:
        """Model and data."""
        config, group = self.config, self.group
        torch.manual_seed(config.seed)
        if self.sharded:
            self.model, self.tokenizer = self._load_sharded()
            base = self.model.model
        else:
            device = config.model.device if group.device is None else str(group.device)
            section = config.model.model_copy(update={"device": device})
            with group.main_first():
                self._write_own_data(section)
            with group.sync_errors():
                base, self.tokenizer = load_base_model(section)
                linearized_config(base, config.attention)  # what does not fit is said before the data are read
        self.base_dtype = base.dtype
        with group.main_first():
            self._build_data(base)
        if not self.sharded:
            torch.manual_seed(config.seed)  # feature maps start the same however the weights were loaded
            self.model = convert(base, config.attention)

    def _write_own_data(self, section: ModelSection) -> None:
        """The rows of those sources that the model itself writes; the first process does, the others find them."""
        for data in {id(data): data for data in map(self.config.data_of, ("transfer", "adjust"))}.values():
            for source in data.written_sources:
                if (key := written_key(source)) not in self.own_data:
                    self.own_data[key] = written_file(section, source, self.config.seed, self.console)

    def _build_data(self, base: PreTrainedModel) -> None:
        """Each stage's training and validation data, and the validation data of `data`, on which all is measured."""
        config = self.config
        stages = {"transfer": self.transfers and not self.in_blocks, "adjust": config.adjust.enabled}
        whole = fit_positions(config.data, base)
        sections: dict[str, DataSection] = {}
        for stage in [stage for stage, enabled in stages.items() if enabled]:
            section = whole
            if (own := getattr(config, stage).data) is not None:
                length = min(own.sequence_length, max(positions_of(base), config.data.sequence_length))
                section = fit_positions(own.model_copy(update={"sequence_length": length}), base)
            sections[stage] = section
        if sections:
            self.console.print(covered_positions(sections, base), highlight=False, soft_wrap=True)
        built: dict[str, tuple[PackedDataset, PackedDataset]] = {}
        for stage, section in sections.items():
            key = section.model_dump_json()
            if key not in built:
                built[key] = self._build(section, base)
            self.data[stage] = built[key]
        shared = built.get(whole.model_dump_json())
        self.validation = self._build(whole, base, only_validation=True)[1] if shared is None else shared[1]
        if self.chooses_heads and not self.in_blocks:
            self.data["gates"] = self._gate_data(base)

    def _build(
        self, section: DataSection, base: PreTrainedModel, only_validation: bool = False
    ) -> tuple[PackedDataset, PackedDataset]:
        sources = [
            source
            if (key := written_key(source)) not in self.own_data
            else source.model_copy(update={"path": str(self.own_data[key][0]), "answers": "given", "max_rows": None})
            for source in section.sources
        ]
        section = section.model_copy(update={"sources": sources})
        if only_validation:
            section = section.model_copy(update={"max_train_tokens": section.sequence_length, "top_esl": None})
        options = {"seed": self.config.seed, "vocabulary": base.config.get_text_config().vocab_size}
        train, validation = build_datasets(section, self.tokenizer, progress=self.group.is_main, **options)
        return train if section.top_esl is None else keep_longest(train, base, section.top_esl), validation

    def _load_sharded(self, train_all: bool = False) -> tuple[LolcatsForCausalLM, Any]:
        config = self.config
        return load_sharded(
            config.model, config.attention, self.group, cpu_offload=config.parallel.cpu_offload, train_all=train_all
        )

    def _measure(self, name: str, mode: str) -> None:
        """Validation perplexity, as `name` in the report and in a file for a resumed run."""
        stage = name if name in ("gates", "adjust") else "transfer"
        key = self._identity(stage, self.validation, self.model.config.exact_heads).key
        known = self.measured.get(name)
        if known is None or known["identity"] != key:
            with self.console.status(f"perplexity: {name}"):
                found = dataset_perplexity(
                    self.model.eval(),
                    self.validation,
                    batch_size=self.config.adjust.micro_batch_size,
                    group=self.group,
                    attention_call=AttentionCall(mode=mode),
                )["perplexity"]
            known = self.measured[name] = {"identity": key, "perplexity": found}
            with self.group.sync_errors():
                if self.group.is_main:
                    write_json(self.folder / PERPLEXITY_FILE, self.measured)
        self.report["perplexity"][name] = known["perplexity"]
        self.console.print(f"validation perplexity, {name}: {known['perplexity']:.3f}")

    def _train(
        self,
        stage: TransferStage | GateStage | AdjustStage,
        section: OptimSection,
        data: PackedDataset,
    ) -> None:
        with fused_kernels(self.model, section.fused_kernels, self.console.print):
            result = train(
                stage,
                data,
                section,
                seed=self.config.seed,
                directory=self.folder / stage.name,
                resume=self.resume,
                progress=Progress(self.console, self.tracking),
                fingerprint=self._identity(stage.name, stage.validation).values,
                group=self.group,
            )
        self.report["stages"][stage.name] = stage_summary(result)
        if not isinstance(stage, GateStage):
            stage.step.release()

    def _train_stage_1(self) -> None:
        train_data, validation = self.data["transfer"]
        stage = TransferStage(self.model, self.transfer, validation, group=self.group, report=self.console.print)
        self._train(stage, self.transfer, train_data)

    def _choose_by_gates(self) -> dict[str, Any]:
        """As many heads as the budget allows, those with the largest gates: the report's part on them."""
        budget = self.config.attention.exact_budget
        assert budget is not None
        gates = self._learn_gates().values()
        chosen = heads_in_budget(self.model.config, budget, self.base_dtype, by_gate(gates))
        self.console.print(heads_picture(gates, chosen))
        return {"chosen_by": "gates", "budget": budget, "values": gates, "chosen": chosen}

    def select(self, budget: str) -> HeadChoice:
        """The heads that a budget buys, as the gates of a run say that is finished or is continued up to there."""
        self._load()
        self._begin_report()
        heads_in_budget(self.model.config, budget, self.base_dtype)  # refuses one that buys nothing or all
        if self.transfers:
            self._train_stage_1()
        stage = self._learn_gates()
        gates, model = stage.values(), self.model.config
        ranked = by_gate(gates)
        chosen = heads_in_budget(model, budget, self.base_dtype, ranked)
        counts = {0, len(ranked), *(round(share * len(ranked)) for share in CURVE_SHARES)}
        choices = {count: by_layer(ranked[:count]) for count in counts} | {sum(map(len, chosen.values())): chosen}
        choices = dict(sorted(choices.items()))
        with self.console.status("divergence by number of exact heads"):
            curve = stage.divergences(choices.values())
        sizes = [cache_bytes(model, REPORTED_TOKENS, self.base_dtype, exact) for exact in choices.values()]
        return HeadChoice(gates, chosen, list(choices), curve, sizes)

    def _gate_data(self, base: PreTrainedModel) -> tuple[PackedDataset, PackedDataset]:
        """Training and validation texts of the gates."""
        section = self.gates
        count = section.total_steps(1) * section.batch_size
        writing = {"length": section.fitting_length(positions_of(base)), "seed": self.config.seed}
        data = retrieval_dataset(self.tokenizer, section.haystack, count=count, **writing)
        return data, retrieval_dataset(self.tokenizer, section.haystack, count=GATE_TEXTS, first=count, **writing)

    def _learn_gates(self) -> GateStage:
        data, validation = self.data["gates"]
        stage = GateStage(self.model, self.gates, validation, group=self.group)
        self._train(stage, self.gates, data)
        stage.release()
        return stage

    def _train_stage_2(self) -> LolcatsForCausalLM | PeftModel:
        """Returns the model with its adapters."""
        if self.sharded and self.config.adjust.method == "full":
            feature_maps = [module.state_dict() for _, module in self.model.linear_layers()]
            del self.model  # not both at once
            self.model, _ = self._load_sharded(train_all=True)
            for (_, module), weights in zip(self.model.linear_layers(), feature_maps, strict=True):
                module.load_state_dict(weights)
        torch.manual_seed(self.config.seed)  # adapters start the same whatever ran before
        train_data, validation = self.data["adjust"]
        stage = AdjustStage(self.model, self.adjust, validation, group=self.group, report=self.console.print)
        self._train(stage, self.adjust, train_data)
        return stage.model

    def _export(self, trained: LolcatsForCausalLM | PeftModel) -> None:
        config, group, report = self.config, self.group, self.report
        report["identity"] = self._identity("adjust", self.validation, self.model.config.exact_heads).key
        report["provenance"] = provenance()
        self.model.config.provenance = report["provenance"] | {"config": report["config"]}
        control = config.adjust.enabled and config.adjust.softmax_control
        stays = self.quantisation is not None and self.quantisation.stays
        tolerance = QUANTISED_TOLERANCE if stays else ROUNDED_TOLERANCE if config.model.load_in_4bit else None
        report["weights"] = weights_note(config, self.quantisation)
        check = reload_check(
            trained,
            self.validation,
            batch_size=config.adjust.micro_batch_size,
            group=group,
            attention_call=SOFTMAX if control else None,
            tolerance=tolerance,
        )
        settings: dict[str, Any] = {
            "report": report,
            "card": model_card(report),
            "dtype": self.base_dtype if config.adjust.method == "full" else None,
            "as_base": control,
            "check": check,
        }
        if self.sharded:
            export(trained, self.tokenizer, self.output, group, **settings)
        else:
            with group.sync_errors():
                if group.is_main and config.model.load_in_4bit:
                    folder = checkpoint_folder(self.model.model.name_or_path, config.model.revision)
                    settings["weights"] = stored_weights(self.model, folder)
                elif group.is_main and stays:
                    settings["weights"] = dense_weights(self.model)
                if group.is_main:
                    export(trained, self.tokenizer, self.output, **settings)
        if group.is_main and (skipped := report["reloaded"].get("skipped")):
            self.console.print(f"the written folder was not loaded again to check it: {skipped}")
        self.console.print(perplexity_table(report))
        if report["weights"]:
            self.console.print(report["weights"])
        self.console.print(f"written: {self.output} (model, {REPORT_FILE}, run/)")


def check_weights(config: LinearizeConfig, sharded: bool, quantisation: Quantisation | None = None) -> None:
    """Refuse what cannot be together with weights that are quantised or sharded over processes."""
    if config.adjust.enabled and config.adjust.method == "full":
        if config.model.load_in_4bit:
            raise UserError("adjust.method=full trains all weights, which model.load_in_4bit keeps in 4 bits; use lora")
        if quantisation is not None and quantisation.stays:
            raise UserError(
                f"adjust.method=full trains all weights, which stay quantised ({quantisation.method}); use lora"
            )
    needs_whole = {
        "model.load_in_4bit": config.model.load_in_4bit,
        f"model.gguf_file={config.model.gguf_file}": config.model.gguf_file is not None,
        "data.top_esl": any(config.data_of(stage).top_esl is not None for stage in ("transfer", "adjust")),
    }
    for setting, applies in needs_whole.items():
        if sharded and applies:
            raise UserError(f"{setting} needs the whole model in every process; set parallel.shard=off")


def weights_note(config: LinearizeConfig, quantisation: Quantisation | None) -> str | None:
    """A sentence on what became of quantised weights and LoRA in the written folder; None if none were quantised."""
    lora = ", with LoRA merged" if config.adjust.enabled and config.adjust.method == "lora" else ""
    if config.model.load_in_4bit:
        return f"The frozen weights were in 4 bits while training; written are the checkpoint's own{lora}."
    if quantisation is None:
        return None
    became = "kept so while training, written dequantised" if quantisation.stays else "dequantised before training"
    return f"The base model's weights are quantised ({quantisation.method}): {became}{lora}."
