"""What training a model block by block needs: its skeleton, its blocks, the data, and a folder of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lolcats.checkpoint.read import checkpoint_folder
from lolcats.config import LinearizeConfig, TransferSection
from lolcats.conversion import convert, fit_positions
from lolcats.data import PackedDataset, build_datasets
from lolcats.data.build import moved
from lolcats.data.packed import BatchSampler
from lolcats.errors import UserError
from lolcats.modeling.fused import Sample, fused_kernels
from lolcats.modeling.loading import load_skeleton, resolve_device
from lolcats.modeling.model import LolcatsForCausalLM
from lolcats.parallel.blockwise.data import BlockData, HiddenSource
from lolcats.parallel.blockwise.forward import loaded_block
from lolcats.parallel.blockwise.layers import LayerBlock, divide, merge
from lolcats.parallel.blockwise.stage import BlockStage, HiddenSink
from lolcats.parallel.blockwise.weights import PartialModel
from lolcats.report import stage_summary
from lolcats.training.checkpoint import checkpoint_path, read_checkpoint, read_json
from lolcats.training.folder import DONE_FILE
from lolcats.training.loop import train
from lolcats.training.progress import Progress
from lolcats.training.stage import TrainResult

SPLITS = ("train", "validation")


@dataclass
class BlockwiseTransfer:
    """A model in blocks with the data that it is trained on.

    Attributes:
        folder: holds one folder of checkpoints per block.
        fingerprint_values: plain values that decide the result, kept in every checkpoint.
        progress: makes the progress display of a block.
        report: receives sentences for the user.
        processes: that each hold one of `blocks`; they then consist of several of the configuration's blocks.
    """

    config: LinearizeConfig
    partial: PartialModel
    tokenizer: Any
    datasets: dict[str, PackedDataset]
    folder: Path
    fingerprint_values: dict[str, Any]
    progress: Callable[[], Progress] = Progress
    report: Callable[[str], None] = lambda text: None
    processes: int | None = None
    transfer: TransferSection = field(init=False)
    blocks: list[LayerBlock] = field(init=False)

    def __post_init__(self) -> None:
        layers = [index for index, _ in self.partial.model.linear_layers()]
        self.transfer = self.config.transfer
        if self.processes is not None and self.transfer.block_layers is None:
            self.transfer = self.transfer.model_copy(update={"block_layers": -(-len(layers) // self.processes)})
        self.blocks = divide(layers, self.transfer.block_layers)
        if self.processes is not None:
            self.blocks = merge(self.blocks, self.processes)

    def used(self, split: str) -> np.ndarray:
        """Numbers of the sequences, ascending, that training or validation looks at."""
        data, transfer = self.datasets[split], self.config.transfer
        if split == "validation":
            return np.arange(len(data))
        sampler = BatchSampler(len(data), transfer.batch_size, self.config.seed)
        steps = range(transfer.total_steps(sampler.steps_per_epoch))
        return np.unique(np.concatenate([sampler.indices(step) for step in steps]))

    @contextmanager
    def stage(
        self, block: LayerBlock, sources: Mapping[str, HiddenSource] | None, sink: HiddenSink | None
    ) -> Iterator[BlockStage]:
        """A block's stage, with the block's weights on the device.

        Args:
            sources: of the inputs of "train" and "validation"; None for the first block.
        """
        with loaded_block(self.partial, block) as forward:
            data = {
                split: BlockData.of(self.datasets[split], None if sources is None else sources[split])
                for split in SPLITS
            }
            sample = Sample(forward.sample, len(forward.layers), self.partial.device)
            with fused_kernels(self.partial.model, self.transfer.fused_kernels, self.report, sample):
                stage = BlockStage(forward, self.transfer, data, sink, report=self.report)
                try:
                    yield stage
                finally:
                    stage.close()

    def train(self, block: LayerBlock, stage: BlockStage, *, resume: bool, **options: Any) -> TrainResult:
        """Train a block with the loop of all stages; its best weights are in the model afterwards."""
        return train(
            stage,
            stage.data["train"],
            self.transfer,
            seed=self.config.seed,
            directory=self.folder / block.name,
            resume=resume,
            progress=self.progress(),
            fingerprint=self.fingerprint_values | {"block": {"layers": list(block.linear)}},
            **options,
        )

    def finished(self, block: LayerBlock) -> TrainResult | None:
        """The result of a block that was trained to its end."""
        path = self.folder / block.name / DONE_FILE
        return TrainResult(**read_json(path)["result"]) if path.is_file() else None

    def trained(self, block: LayerBlock, result: TrainResult) -> dict[str, Tensor]:
        """The best weights of a finished block, named as `TransferStage.state` names them."""
        path = checkpoint_path(self.folder / block.name, "best", result.best_step)
        return read_checkpoint(path).tensors["weights"]

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
            weights = self.trained(block, result)
            for index in block.linear:
                for name, parameter in modules[index].named_parameters():
                    parameter.data.copy_(weights[f"layers.{index}.{name}"])
        return summary(list(results.values()))


def open_run(
    config: LinearizeConfig,
    folder: Path,
    fingerprint_values: dict[str, Any],
    *,
    datasets: dict[str, PackedDataset] | None = None,
    device: torch.device | None = None,
    **options: Any,
) -> BlockwiseTransfer:
    """Build the skeleton and the data of a run; no weights are read.

    Args:
        datasets: "train" and "validation"; None: as `config.data` says.
        device: None: as `config.model.device` says.
        options: further fields of `BlockwiseTransfer`.

    Raises:
        UserError: whatever `convert` and `build_datasets` refuse; a setting that needs the whole model.
    """
    refused = config.refused_in_blocks()
    if refused is not None:
        raise UserError(refused)
    skeleton, tokenizer = load_skeleton(config.model)
    data = fit_positions(config.data, skeleton)
    if datasets is None:
        datasets = dict(zip(SPLITS, build_datasets(data, tokenizer, seed=config.seed), strict=True))
    else:
        datasets = datasets | {"train": moved(datasets["train"], data)}
    torch.manual_seed(config.seed)  # feature maps start as in joint training
    model = convert(skeleton, config.attention)
    assert config.model.path is not None
    weights = checkpoint_folder(config.model.path, config.model.revision)
    partial = PartialModel(model, weights, device or resolve_device(config.model.device))
    return BlockwiseTransfer(config, partial, tokenizer, datasets, folder, fingerprint_values, **options)


def summary(results: list[TrainResult]) -> dict[str, Any]:
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
