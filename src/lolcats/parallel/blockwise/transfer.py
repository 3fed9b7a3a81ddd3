"""Attention transfer block by block: the model's skeleton, its blocks, the data, and what trains one block.

`modes.py` trains blocks one after another, `jobs.py` in any order.
A block itself is a `TransferStage` of its layers in the loop of all stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from lolcats.checkpoint.read import checkpoint_folder
from lolcats.checkpoint.write import export
from lolcats.config import LinearizeConfig
from lolcats.conversion import convert, covered_positions, fit_positions, positions_of
from lolcats.data import PackedDataset, build_datasets
from lolcats.data.build import moved
from lolcats.data.packed import BatchSampler
from lolcats.data.retrieval import RetrievalWriter
from lolcats.errors import UserError
from lolcats.modeling.cache_size import cache_report, heads_in_budget
from lolcats.modeling.call import SOFTMAX
from lolcats.modeling.decoder import HIDDEN, decoder_part, run_part
from lolcats.modeling.fused import SAMPLE_TOKENS, fused_kernels, sample_tokens
from lolcats.modeling.loading import load_skeleton, resolve_device
from lolcats.modeling.model import LolcatsForCausalLM
from lolcats.parallel.blockwise.activation_exchange import ActivationExchange
from lolcats.parallel.blockwise.layers import LayerBlock, divide
from lolcats.parallel.blockwise.partial_model import PartialModel
from lolcats.parallel.blockwise.scores import score_heads
from lolcats.provenance import provenance
from lolcats.report import REPORT_FILE, begin_report, model_card, stage_summary
from lolcats.training import loop
from lolcats.training.attention_transfer import SEQUENCES, HiddenSink, TransferStage
from lolcats.training.checkpoint import checkpoint_path, read_checkpoint, read_json, write_json
from lolcats.training.folder import DONE_FILE
from lolcats.training.head_gates import heads_picture
from lolcats.training.head_scores import by_score
from lolcats.training.identity import ArtefactIdentity, weights_hash
from lolcats.training.progress import Progress
from lolcats.training.stage import TrainState

SPLITS = ("train", "validation")
SCORES_FILE = "scores.json"
SCORE_TEXTS = 64


HiddenSource = Callable[[np.ndarray], Tensor]
"""Gives a block's inputs [B, T, hidden] for the numbers [B] of sequences."""


@dataclass(frozen=True, eq=False)
class BlockData(PackedDataset):
    """A packed dataset whose batches also hold their sequences' numbers and hidden states."""

    source: HiddenSource | None = None
    """None for the first block, which starts from the tokens."""

    @classmethod
    def of(cls, data: PackedDataset, source: HiddenSource | None) -> BlockData:
        return cls(**{item.name: getattr(data, item.name) for item in fields(PackedDataset)}, source=source)

    def batch(self, indices: np.ndarray | list[int]) -> dict[str, Tensor]:
        sequences = np.asarray(indices, dtype=np.int64)
        batch = super().batch(sequences) | {SEQUENCES: torch.from_numpy(sequences)}
        return batch if self.source is None else batch | {HIDDEN: self.source(sequences)}


@dataclass
class BlockwiseTransfer:
    """A model in blocks with the data that it is trained on.

    Attributes:
        folder: holds one folder of checkpoints per block.
        identity: what decides the result, kept in every checkpoint.
        blocks: into which the model is divided, as `config.transfer` says.
        console: shows progress, and sentences for the user.
    """

    config: LinearizeConfig
    blocks: list[LayerBlock]
    partial: PartialModel
    tokenizer: Any
    datasets: dict[str, PackedDataset]
    folder: Path
    identity: ArtefactIdentity
    console: Console

    def sequences(self, split: str) -> np.ndarray:
        """Numbers of the sequences, ascending, that training or validation reads."""
        data = self.datasets[split]
        if split == "validation":
            return np.arange(len(data))
        sampler = BatchSampler(len(data), self.config.transfer.batch_size, self.config.seed)
        steps = range(self.config.transfer.total_steps(sampler.steps_per_epoch))
        return np.unique(np.concatenate([sampler.indices(step) for step in steps]))

    def exchange(self, folder: Path) -> ActivationExchange:
        """The activation caches between the blocks; `folder` as there."""
        model, data = self.partial.model, {split: self.datasets[split].info.get("fingerprint") for split in SPLITS}
        return ActivationExchange(
            folder,
            self.blocks,
            {split: self.sequences(split) for split in SPLITS},
            tokens=self.datasets["train"].input_ids.shape[1],
            hidden=model.config.hidden_size,
            dtype=model.model.dtype,
            owner=self.identity.values | data,
        )

    @contextmanager
    def stage(
        self, block: LayerBlock, sources: Mapping[str, HiddenSource] | None, sink: HiddenSink | None
    ) -> Iterator[tuple[TransferStage, dict[str, BlockData]]]:
        """A block's stage and its data by split, with the block's weights on the device.

        Args:
            sources: of the inputs of "train" and "validation"; None for the first block.
            sink: takes the outputs; None if they are not needed.
        """
        partial = self.partial
        with partial.loaded(*partial.parts_of(block)):
            data = {
                split: BlockData.of(self.datasets[split], None if sources is None else sources[split])
                for split in SPLITS
            }
            with fused_kernels(
                partial.model,
                self.config.transfer.fused_kernels,
                self.console.print,
                sample=lambda: _sample(partial, block),
                layers=block.end - block.begin,
                device=partial.device,
            ):
                stage = TransferStage(
                    partial.model,
                    self.config.transfer,
                    data["validation"],
                    layers=range(block.begin, block.end),
                    sink=sink,
                    report=self.console.print,
                )
                try:
                    yield stage, data
                finally:
                    stage.step.release()

    def run_block(
        self,
        block: LayerBlock,
        exchange: ActivationExchange,
        *,
        train: bool = True,
        write: bool = True,
        resume: bool = True,
    ) -> None:
        """Train a block whose inputs are complete, and write the inputs of the next one.

        The loop is that of all stages; the block's best weights are in the model afterwards.
        """
        caches, writer = exchange.caches(block), exchange.writer(block) if write else None
        sources = None if caches is None else {split: cache.read for split, cache in caches.items()}
        with self.stage(block, sources, writer) as (stage, data):
            if train:
                loop.train(
                    stage,
                    data["train"],
                    self.config.transfer,
                    seed=self.config.seed,
                    directory=self.folder / block.name,
                    resume=resume,
                    progress=Progress(self.console),
                    fingerprint=self.identity.values | {"block": {"layers": list(block.linear)}},
                )
            if writer is None:
                return
            writer.flush()
            size = self.config.transfer.micro_batch_size
            for split in SPLITS:  # what training did not write: an epoch omits its last, incomplete batch
                sequences = writer.caches[split].missing()
                for begin in range(0, len(sequences), size):
                    stage.forward(split, data[split].batch(sequences[begin : begin + size]))
            writer.flush()

    def finished(self, block: LayerBlock) -> TrainState | None:
        """The result of a block that was trained to its end."""
        path = self.folder / block.name / DONE_FILE
        return TrainState(**read_json(path)["result"]) if path.is_file() else None

    def install(self, model: LolcatsForCausalLM) -> dict[str, Any]:
        """Put the trained feature maps and window factors of all blocks into a linearized model.

        Returns:
            The stage's part of the report.

        Raises:
            UserError: some blocks are not finished.
        """
        results = {block: result for block in self.blocks if (result := self.finished(block)) is not None}
        missing = [str(block) for block in self.blocks if block not in results]
        if missing:
            count = f"{len(missing)} of {len(self.blocks)} blocks"
            raise UserError(f"{count} in {self.folder} are not trained yet: {', '.join(missing)}")
        modules = dict(model.linear_layers())
        for block, result in results.items():
            best = checkpoint_path(self.folder / block.name, "best", result.best_step)
            weights = read_checkpoint(best).tensors["weights"]
            for index in block.linear:
                for name, parameter in modules[index].named_parameters():
                    parameter.data.copy_(weights[f"layers.{index}.{name}"])
        return _summary(list(results.values()))

    @cached_property
    def head_choice(self) -> dict[str, Any]:
        """As many exact heads as `attention.exact` allows, chosen by scores: the report's part on them.

        The scores are kept in a file; a walk through the blocks that was preempted begins again.

        Raises:
            UserError: the budget or the texts do not fit, or the checkpoint cannot be read.
        """
        budget, section, model = self.config.attention.exact_budget, self.config.gates, self.partial.model
        assert budget is not None
        file, length = self.folder / SCORES_FILE, section.fitting_length(positions_of(model.model))
        texts = {"haystack": section.haystack, "length": length, "count": SCORE_TEXTS}
        fingerprint = self.identity.values | {"texts": texts}
        if not file.is_file() or read_json(file)["fingerprint"] != fingerprint:
            writer = RetrievalWriter(self.tokenizer, "train", section.haystack, begin_token=True)
            samples = [writer.write_any(length, self.config.seed, number) for number in range(SCORE_TEXTS)]
            found = score_heads(self.partial, self.blocks, samples, self.console.print)
            scores = {name: list(rows.items()) for name, rows in found.items()}  # numbers are no keys in JSON
            write_json(file, {"fingerprint": fingerprint, "scores": scores})
        values = {name: dict(rows) for name, rows in read_json(file)["scores"].items()}
        chosen = heads_in_budget(model.config, budget, model.model.dtype, by_score(values))
        for name, rows in values.items():
            self.console.print(heads_picture(rows, chosen, f"{name} scores"))
        return {"chosen_by": "scores", "budget": budget, "values": values, "chosen": chosen}

    def export(self, output: Path) -> dict[str, Any]:
        """Write the linearized model as `lolcats.checkpoint.write.export` would, a decoder layer at a time.

        Returns:
            The report, as written to `lolcats_report.json`. Perplexities are not in it: they need the whole model.

        Raises:
            UserError: blocks are missing, the checkpoint cannot be read, or `output` cannot be written.
        """
        model, config = self.partial.model, self.config
        report = begin_report(config, {"transfer": self.datasets["train"]}, self.datasets["validation"])
        report["stages"]["transfer"] = self.install(model)
        if config.attention.exact_budget is not None:
            report["gates"] = self.head_choice
            model.set_exact(self.head_choice["chosen"])
        report["exact_heads"] = model.config.exact_heads
        report["cache"] = cache_report(model.config, model.model.dtype)
        report["provenance"] = provenance()
        model.config.provenance = report["provenance"] | {"config": report["config"]}
        card, weights = model_card(report), self.partial.weights()
        export(model, self.tokenizer, output, report=report, card=card, weights=weights)
        self.console.print(f"written: {output} (model, {REPORT_FILE})")
        return report


def open_transfer(
    config: LinearizeConfig,
    folder: Path,
    console: Console,
    *,
    datasets: dict[str, PackedDataset] | None = None,
    device: torch.device | None = None,
) -> BlockwiseTransfer:
    """Build the skeleton and the data; no weights are read.

    Args:
        datasets: "train" and "validation"; None: as `config` says.
        device: None: as `config.model.device` says.

    Raises:
        UserError: whatever `convert` and `build_datasets` refuse; a setting that needs the whole model.
    """
    refused = config.refused_in_blocks()
    if refused is not None:
        raise UserError(refused)
    skeleton, tokenizer = load_skeleton(config.model)
    data = fit_positions(config.data_of("transfer"), skeleton)
    if datasets is None:
        console.print(covered_positions({"transfer": data}, skeleton), highlight=False, soft_wrap=True)
        options = {"seed": config.seed, "vocabulary": skeleton.config.get_text_config().vocab_size}
        datasets = dict(zip(SPLITS, build_datasets(data, tokenizer, **options), strict=True))
    else:
        datasets = datasets | {"train": moved(datasets["train"], data)}
    torch.manual_seed(config.seed)  # feature maps start as in joint training
    model = convert(skeleton, config.attention)
    assert config.model.path is not None
    weights = checkpoint_folder(config.model.path, config.model.revision)
    partial = PartialModel(model, weights, device or resolve_device(config.model.device))
    blocks = divide([index for index, _ in model.linear_layers()], config.transfer.block_layers)
    validation = datasets["validation"]
    identity = ArtefactIdentity.of(config, "transfer", weights=weights_hash(config.model), validation=validation)
    return BlockwiseTransfer(config, blocks, partial, tokenizer, datasets, folder, identity, console)


@torch.no_grad()
def _sample(partial: PartialModel, block: LayerBlock) -> Tensor:
    """A loaded block's output [1, T, hidden] for a few tokens, with softmax attention."""
    model, config = partial.model, partial.model.config.get_text_config()
    if block.begin == 0:
        inputs = {"input_ids": sample_tokens(config.vocab_size).to(partial.device)[None]}
    else:
        random = torch.Generator().manual_seed(0)
        hidden_BTD = torch.randn(1, SAMPLE_TOKENS, config.hidden_size, generator=random)
        inputs = {HIDDEN: hidden_BTD.to(partial.device, model.model.dtype)}
    return run_part(decoder_part(model, block.begin, block.end), inputs, SOFTMAX)


def _summary(results: list[TrainState]) -> dict[str, Any]:
    """The stage's part of the report: totals over blocks, and every block's own numbers."""
    blocks = [stage_summary(result) for result in results]
    layers: dict[str, dict[str, float]] = {"layer_losses_before": {}, "layer_losses": {}}
    for block in blocks:
        for key, values in layers.items():
            values.update(block[key])
    seconds = sum(block["seconds"] for block in blocks)
    return {
        "steps": max(block["steps"] for block in blocks),
        "tokens": max(block["tokens"] for block in blocks),
        "seconds": round(seconds, 1),
        # every block sees all tokens: the speed of the whole stage, as that of joint training
        "tokens_per_second": round(1.0 / sum(1.0 / max(block["tokens_per_second"], 1e-9) for block in blocks), 1),
        "peak_memory_gib": max(block["peak_memory_gib"] for block in blocks),
        "best_metric": sum(sum(block["layer_losses"].values()) for block in blocks) / len(layers["layer_losses"]),
        "blocks": blocks,
        **layers,
    }
