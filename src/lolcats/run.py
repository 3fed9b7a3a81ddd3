"""One run of the pipeline: its folder, its identity, what it refuses at the start, and how it resumes."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate.tracking import GeneralTracker
from rich.console import Console

from lolcats.config import LinearizeConfig, OptimSection
from lolcats.conversion import check_architecture, positions_of
from lolcats.data import PackedDataset
from lolcats.data.packed import BatchSampler
from lolcats.errors import UserError
from lolcats.modeling.cache_size import heads_in_budget, window_in_budget
from lolcats.modeling.configuration import LolcatsConfig
from lolcats.modeling.loading import locate
from lolcats.modeling.model import LolcatsForCausalLM
from lolcats.parallel.blockwise.blocks import Blocks
from lolcats.parallel.blockwise.partial_model import PartialModel
from lolcats.parallel.group import Group, fit_micro_batches
from lolcats.parallel.launch import open_group
from lolcats.parallel.sharding import shards_weights
from lolcats.training.checkpoint import finished, refuse_other_settings
from lolcats.training.loop import stage_fingerprint, warn_of_few_updates
from lolcats.training.lora import adapted_projections
from lolcats.training.progress import check_tracker, open_tracker
from lolcats.training.run_folder import FolderLock, check_folder, claim_folder, identity, take_stages, weights_hash

Splits = tuple[PackedDataset, PackedDataset]
"""Training and validation data."""


@dataclass
class Run:
    """A run as one of its processes sees it. Stages of the pipeline read what those before have put here.

    Args: as of `lolcats.pipeline.linearize`.

    Attributes:
        sections: the settings of the stages that this run has, by name, with micro-batches for so many processes.
        model, tokenizer: once they are loaded; with `partial` the model holds only the weights in use.
        blocks: what trains stage 1 with a model in parts.
        data: of each stage, by name; `validation`: on which the run is measured; `far`: long texts
            that settle which heads are exact, if the model has the positions.
        written: files with the rows that the model itself wrote, and reports on them, by `self_data.written_key`.
        report: as it is written in the end.
    """

    config: LinearizeConfig
    output: Path
    group: Group
    console: Console
    resume: bool = False
    overwrite: bool = False
    transfer_from: Path | None = None

    model: LolcatsForCausalLM = field(init=False)
    tokenizer: Any = field(init=False)
    base_dtype: torch.dtype = field(init=False)
    partial: PartialModel | None = field(default=None, init=False)
    blocks: Blocks | None = field(default=None, init=False)
    data: dict[str, Splits] = field(default_factory=dict, init=False)
    validation: PackedDataset = field(init=False)
    far: PackedDataset | None = field(default=None, init=False)
    written: dict[str, tuple[Path, dict[str, Any]]] = field(default_factory=dict, init=False)
    report: dict[str, Any] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        config = self.config
        self.folder, self.lock, self.begun = self.output / "run", FolderLock(self.output), False
        self.sharded = shards_weights(config, self.group)
        self.sections: dict[str, Any] = {name: getattr(config, name) for name in config.stages}
        self.in_blocks = config.transfer.block_mode != "joint" and "transfer" in self.sections
        self.tracking: Callable[[str, int], GeneralTracker] | None = None

    @property
    def continues(self) -> bool:
        """Whether stages may have begun: in this folder, or in the one that they are taken from."""
        return self.resume or self.transfer_from is not None

    @cached_property
    def weights(self) -> str:
        return weights_hash(self.config.model)

    def identity(self, stage: str, validation: PackedDataset) -> dict[str, Any]:
        """Of what comes after a stage."""
        stages = ["transfer", *(["gates"] if "gates" in self.sections else []), "adjust"]
        stages = stages[: stages.index(stage) + 1]
        return identity(self.config, *stages, weights=self.weights, validation=validation)

    def check(self) -> None:
        """Refuse what can be refused without reading weights and data; nothing is written."""
        config = self.config
        for name, section in self.sections.items():
            self.sections[name] = fit_micro_batches(section, name, self.group, self.console.print)
        source = locate(config.model)
        if self.sharded and config.model.load_in_4bit:
            raise UserError("model.load_in_4bit needs the whole model in every process; set parallel.shard=off")
        for data in map(config.data_of, ("transfer", "adjust")):
            for own in data.written_sources:
                if self.sharded or self.in_blocks:
                    raise UserError(
                        f"{own.path}: a model that is sharded, or read block by block, cannot write its own data;"
                        " give data (--data), such as the rows.jsonl that a machine which holds the model wrote"
                    )
                if own.max_rows is not None and own.max_rows <= data.held_out(own):
                    raise UserError(f"{own.path}: max_rows leaves none to train on: lower data.validation_rows")
        length = min(config.data_of("transfer").sequence_length, positions_of(source))
        window = config.attention.capacity + config.attention.sinks
        if "transfer" in self.sections and config.attention.has_both_parts and length <= window:
            longer = f"data.sequence_length above {window}, or "
            if positions_of(source) <= window:
                longer = ""  # which the model's positions forbid
            raise UserError(
                f"stage 1's sequences of {length} tokens lie within the softmax window of up to {window} keys, so that"
                f" feature maps would learn nothing: set {longer}a smaller window (--window-size, --sinks)"
            )
        if (linearized := check_architecture(config.model, config.attention, config.data)) is not None:
            dtype: Any = linearized.dtype
            self._check_budget(linearized, dtype)
        if self.group.is_main:
            if (track := config.output.track) is not None:
                check_tracker(track)
                self.tracking = partial(open_tracker, track, self.folder / "tracking", config.model_dump(mode="json"))
            if self.output.is_dir():
                self.lock.__enter__()
            check_folder(config, self.output, resume=self.resume, overwrite=self.overwrite)
            if self.transfer_from is not None and "transfer" not in self.sections:
                raise UserError("--transfer-from takes stage 1 of another run, and this one has none; leave it out")
            if self.transfer_from is not None and finished(self.transfer_from / "run" / "transfer") is None:
                raise UserError(f"--transfer-from {self.transfer_from}: there is no finished stage 1 in it")
            if self.transfer_from is not None and self.in_blocks:
                raise UserError("--transfer-from: stage 1 block by block is not taken over; leave it out")
            if self.transfer_from is not None and self.output.exists() and self.output.samefile(self.transfer_from):
                raise UserError(f"--transfer-from {self.transfer_from} is the output itself: choose another --output")

    def begin(self) -> None:
        """The last checks, now that model and data are known; then the folder becomes that of this run."""
        config, taken = self.config, []
        with self.group.sync_errors():
            for name, (train, validation) in self.data.items():
                section = self.sections[name]
                BatchSampler(len(train), section.batch_size, config.seed)
                if self.continues and self._takes(name, section, train, validation):
                    taken.append(name)
            if config.adjust.enabled:
                adapted_projections(self.model, config.adjust)
            self._check_budget(self.model.config, self.base_dtype)
            if self.group.is_main:
                self.lock.__enter__()
                check_folder(config, self.output, resume=self.resume, overwrite=self.overwrite)  # now that it is ours
                claim_folder(config, self.output, overwrite=self.overwrite)
                self.begun = True
                if self.transfer_from is not None:
                    take_stages(self.transfer_from, self.output, taken)
        self.begun = True
        settings = yaml.safe_dump(config.model_dump(mode="json", exclude_defaults=True), sort_keys=False)
        self.console.print(f"settings other than the defaults ({self.folder}/config.yaml has all):")
        self.console.print(settings, markup=False, highlight=False, soft_wrap=True)
        for name, (train, _) in self.data.items():
            warn_of_few_updates(name, self.sections[name], len(train), self.console)

    def _takes(self, name: str, section: OptimSection, train: PackedDataset, validation: PackedDataset) -> bool:
        """Whether a stage is taken from `transfer_from`."""
        if name == "transfer" and self.blocks is not None:
            if not self.overwrite:
                self.blocks.refuse_other_settings()
            return False
        fingerprint = stage_fingerprint(section, train, self.config.seed, self.identity(name, validation))
        if not self.overwrite:
            refuse_other_settings(self.folder / name, fingerprint)
        if self.transfer_from is None or name == "adjust":
            return False
        try:
            refuse_other_settings(self.transfer_from / "run" / name, fingerprint)
        except UserError:
            if name == "transfer":
                raise
            return False
        return True

    def _check_budget(self, linearized: LolcatsConfig, dtype: torch.dtype) -> None:
        """A UserError if the budget of exact heads buys none or all, or their window's bytes hold too little."""
        attention = self.config.attention
        if "gates" in self.sections and (budget := attention.exact_budget) is not None:
            chosen = heads_in_budget(linearized, budget, dtype)
            if isinstance(attention.exact_window, str):
                window_in_budget(linearized, attention, dtype, chosen)

    def how_to_resume(self) -> str:
        if not (self.folder / "config.yaml").is_file() or not (self.begun or self.resume):
            return "before the run began: there is nothing to resume, but the same command takes what data is written"
        saved = max(self.folder.rglob("step-*"), key=lambda path: path.stat().st_mtime, default=None)
        place = "" if saved is None else f" from {saved.relative_to(self.output)}"
        words = ["lolcats", "linearize", "-o", str(self.output), "--resume"]
        words += [] if self.transfer_from is None else ["--transfer-from", str(self.transfer_from)]
        return f"`{shlex.join(words)}` continues{place}"


@contextmanager
def open_run(config: LinearizeConfig, output: Path, console: Console | None = None, **options: Any) -> Iterator[Run]:
    """The checks, then a block in which no other process uses the folder.

    Raises:
        UserError: as `Run.check`.
        KeyboardInterrupt: the block was interrupted; says how to resume, if there is anything.
    """
    console = console or Console(stderr=True)
    with open_group(config.model.device) as group:
        run = Run(config, output, group, console if group.is_main else Console(quiet=True), **options)
        try:
            run.console.print(f"reading {config.model.path}", highlight=False, soft_wrap=True)  # a hub may be slow
            with group.sync_errors():
                run.check()
            yield run
        except KeyboardInterrupt as stop:
            raise type(stop)(run.how_to_resume() if group.is_main else "") from None  # who tidies checkpoints up
        finally:
            run.lock.__exit__()
