"""Stage 1 block by block: tokens -> block 0 -> hidden states -> block 1 -> ...

The model is a skeleton whose layers are read from the checkpoint when their turn comes. A block is a `TransferStage` of
its layers in the loop of all stages; its inputs are the outputs of the block before, which that one wrote.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from lolcats.config import LinearizeConfig
from lolcats.data import PackedDataset
from lolcats.data.cache import content_hash
from lolcats.data.packed import BatchSampler
from lolcats.errors import UserError
from lolcats.modeling.decoder import HIDDEN
from lolcats.modeling.fused import fused_kernels
from lolcats.modeling.model import LolcatsForCausalLM
from lolcats.parallel.blockwise.activation_cache import ActivationCache, delete_cache
from lolcats.parallel.blockwise.layers import LayerBlock, divide
from lolcats.parallel.blockwise.partial_model import PartialModel
from lolcats.report import stage_summary
from lolcats.training import loop
from lolcats.training.attention_transfer import SEQUENCES, TransferStage
from lolcats.training.checkpoint import finished, list_checkpoints, read_checkpoint, refuse_other_settings
from lolcats.training.progress import Progress
from lolcats.training.run_folder import FolderLock
from lolcats.training.stage import TrainState


@dataclass(frozen=True, eq=False)
class BlockData(PackedDataset):
    """A packed dataset whose batches also hold their sequences' numbers and hidden states."""

    inputs: ActivationCache | None = None
    """None for the first block, which starts from the tokens."""

    def batch(self, indices: np.ndarray | list[int]) -> dict[str, Tensor]:
        sequences = np.asarray(indices, dtype=np.int64)
        batch = super().batch(sequences) | {SEQUENCES: torch.from_numpy(sequences)}
        return batch if self.inputs is None else batch | {HIDDEN: self.inputs.read(sequences)}


@dataclass
class Blocks:
    """A model in blocks with the data that it is trained on.

    Attributes:
        data: "train" and "validation".
        folder: holds one folder of checkpoints per block.
        identity: what decides the result, kept in every checkpoint.
        console: shows progress, and sentences for the user.
    """

    config: LinearizeConfig
    partial: PartialModel
    data: Mapping[str, PackedDataset]
    folder: Path
    identity: dict[str, Any]
    console: Console
    _open: dict[int, dict[str, ActivationCache]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        linear = [index for index, _ in self.partial.model.linear_layers()]
        self.blocks = divide(linear, self.config.transfer.block_layers)
        key = content_hash(self.identity | {"data": [data.info["fingerprint"] for data in self.data.values()]})
        self.activations = self.folder / f"inputs-{key[:16]}"
        sampler = BatchSampler(len(self.data["train"]), self.config.transfer.batch_size, self.config.seed)
        steps = range(self.config.transfer.total_steps(sampler.steps_per_epoch))
        read = np.unique(np.concatenate([sampler.indices(step) for step in steps]))
        self.sequences = {"train": read, "validation": np.arange(len(self.data["validation"]))}

    # --- inputs ---------------------------------------------------------------------------------------------

    def caches(self, block: LayerBlock) -> dict[str, ActivationCache] | None:
        """The inputs of a block by split, empty at first; None for the first block, which starts from the tokens."""
        if block.index == 0:
            return None
        if block.index not in self._open:
            model, tokens = self.partial.model, self.data["train"].input_ids.shape[1]
            shape = (tokens, model.config.hidden_size, model.model.dtype)
            paths = self._paths(block)
            self._open[block.index] = {
                split: ActivationCache(path, self.sequences[split], *shape) for split, path in paths.items()
            }
        return self._open[block.index]

    def has_inputs(self, block: LayerBlock) -> bool:
        """Whether the inputs of `block` are all there; nothing is made."""
        there = all(ActivationCache.exists(path) for path in self._paths(block).values())
        if block.index and block.index not in self._open and not there:
            return False
        return all(len(cache.missing()) == 0 for cache in (self.caches(block) or {}).values())

    def _delete_inputs(self, block: LayerBlock) -> None:
        self._open.pop(block.index, None)
        for path in self._paths(block).values():
            delete_cache(path)

    def _paths(self, block: LayerBlock) -> dict[str, Path]:
        return {split: self.activations / f"{block.name}-{split}" for split in self.data}

    # --- training -------------------------------------------------------------------------------------------

    def stream(self, *, resume: bool) -> None:
        """Train all blocks that are not finished, in order; two blocks' inputs exist at a time.

        Raises:
            UserError: whatever `train` and the caches refuse; what is finished stays.
        """
        for other in self.folder.glob("inputs-*"):  # of other settings, with which nothing was kept
            if other != self.activations:
                shutil.rmtree(other, ignore_errors=True)
        first = next((block.index for block in self.blocks if self.finished(block) is None), len(self.blocks))
        if first == len(self.blocks):
            shutil.rmtree(self.activations, ignore_errors=True)
            return
        start = first
        while not self.has_inputs(self.blocks[start]):
            start -= 1  # this block must run again for the inputs of the next one
        for block in self.blocks[:start]:  # what a preempted run could not delete
            self._delete_inputs(block)
        for block in self.blocks[start:]:
            if block.index < first:
                self.console.print(f"{block}: passing the data through it again, because its outputs are gone")
            else:
                self.console.print(f"training {block} of {len(self.blocks)} blocks")
            self.run_block(block, train=block.index >= first, resume=resume)
            self._delete_inputs(block)
        shutil.rmtree(self.activations, ignore_errors=True)

    def run_block(self, block: LayerBlock, *, train: bool = True, write: bool = True, resume: bool = True) -> None:
        """Train a block whose inputs are complete, and write the inputs of the next one.

        The loop is that of all stages; the block's best weights are in the model afterwards.
        """
        outputs = self.caches(self.blocks[block.index + 1]) if write and not block.is_last else None
        with self._stage(block, outputs) as (stage, data):
            if train:
                with FolderLock(self.folder / block.name):
                    loop.train(
                        stage,
                        data["train"],
                        self.config.transfer,
                        seed=self.config.seed,
                        directory=self.folder / block.name,
                        resume=resume,
                        progress=Progress(self.console),
                        fingerprint=self._fingerprint(block),
                    )
            size = self.config.transfer.micro_batch_size
            for split, cache in (outputs or {}).items():  # what training did not write
                sequences = cache.missing()
                for begin in range(0, len(sequences), size):
                    stage.forward(split, data[split].batch(sequences[begin : begin + size]))

    @contextmanager
    def _stage(
        self, block: LayerBlock, outputs: dict[str, ActivationCache] | None
    ) -> Iterator[tuple[TransferStage, dict[str, BlockData]]]:
        """A block's stage and its data by split, with the block's weights on the device."""
        partial, inputs = self.partial, self.caches(block) or {}
        data = {
            split: BlockData(
                **{item.name: getattr(packed, item.name) for item in fields(PackedDataset)}, inputs=inputs.get(split)
            )
            for split, packed in self.data.items()
        }

        def put(split: str, sequences: np.ndarray, hidden_BTD: Tensor) -> None:
            assert outputs is not None
            outputs[split].write(sequences, hidden_BTD)

        with (
            partial.loaded(*partial.parts_of(block)),
            fused_kernels(partial.model, self.config.transfer.fused_kernels, partial.device),
        ):
            stage = TransferStage(
                partial.model,
                self.config.transfer,
                data["validation"],
                layers=range(block.begin, block.end),
                sink=None if outputs is None else put,
                report=self.console.print,
            )
            try:
                yield stage, data
            finally:
                stage.graphs.release()

    # --- results --------------------------------------------------------------------------------------------

    def _fingerprint(self, block: LayerBlock) -> dict[str, Any]:
        return self.identity | {"block": {"layers": list(block.linear)}}

    def refuse_other_settings(self) -> None:
        """Raises UserError if blocks in the folder were trained with other settings or data."""
        config, train = self.config, self.data["train"]
        for block in self.blocks:
            fingerprint = loop.stage_fingerprint(config.transfer, train, config.seed, self._fingerprint(block))
            refuse_other_settings(self.folder / block.name, fingerprint)

    def finished(self, block: LayerBlock) -> TrainState | None:
        """The result of a block that was trained to its end."""
        state = finished(self.folder / block.name)
        return None if state is None else TrainState(**state["counters"])

    def install(self, model: LolcatsForCausalLM) -> dict[str, Any]:
        """Put the trained feature maps and window factors of all blocks into a linearized model.

        Returns:
            The stage's part of the report.
        """
        results = {block: result for block in self.blocks if (result := self.finished(block)) is not None}
        missing = [str(block) for block in self.blocks if block not in results]
        if missing:
            count = f"{len(missing)} of {len(self.blocks)} blocks"
            raise UserError(f"{count} in {self.folder} are not trained yet: {', '.join(missing)}")
        modules = dict(model.linear_layers())
        for block in results:
            weights = read_checkpoint(list_checkpoints(self.folder / block.name)[-1])[0]["best"]
            for index in block.linear:
                for name, parameter in modules[index].named_parameters():
                    parameter.data.copy_(weights[f"layers.{index}.{name}"])
        return _summary(list(results.values()))


def _summary(results: list[TrainState]) -> dict[str, Any]:
    """The stage's part of the report: totals over blocks, and every block's own numbers."""
    blocks = [stage_summary(result) for result in results]
    layers: dict[str, dict[str, float]] = {"layer_losses_before": {}, "layer_losses": {}}
    for block in blocks:
        for key, values in layers.items():
            values.update(block[key])
    return {
        "steps": max(block["steps"] for block in blocks),
        "tokens": max(block["tokens"] for block in blocks),
        "seconds": round(sum(block["seconds"] for block in blocks), 1),
        # every block sees all tokens: the speed of the whole stage, as that of joint training
        "tokens_per_second": round(1.0 / sum(1.0 / max(block["tokens_per_second"], 1e-9) for block in blocks), 1),
        "peak_memory_gib": max(block["peak_memory_gib"] for block in blocks),
        "best_metric": sum(sum(block["layer_losses"].values()) for block in blocks) / len(layers["layer_losses"]),
        "blocks": blocks,
        **layers,
    }
