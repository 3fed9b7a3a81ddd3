"""The blocks of a streaming run as independent jobs, over hidden states that one pass of the original model wrote.

`prepare` begins the run in its output folder and writes the inputs of all blocks. Any machine that sees the folder and
the model can train a block; blocks do not wait for one another. `lolcats linearize --resume` finishes the run.
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from safetensors import SafetensorError

from lolcats.config import LinearizeConfig, config_fingerprint, set_fields
from lolcats.conversion import stage_section
from lolcats.data import build_datasets, cache
from lolcats.data.build import moved
from lolcats.errors import UserError
from lolcats.parallel.blockwise.blocks import Blocks
from lolcats.parallel.blockwise.partial_model import load_in_parts
from lolcats.training.checkpoint import refuse_changes
from lolcats.training.loop import warn_of_few_updates
from lolcats.training.run_folder import FolderLock, check_folder, claim_folder, identity, weights_hash

DATA_FILE = "data.safetensors"


def prepare(config: LinearizeConfig, output: Path, console: Console) -> None:
    """Begin a run in `output` and write the inputs of every block. Repeat a call that was preempted.

    Raises:
        UserError: the folder holds something else, the disk has no room, or whatever loading refuses.
    """
    streaming = {"transfer.block_mode": "streaming"}
    config = LinearizeConfig.from_dict(set_fields(config.model_dump(mode="json"), streaming))
    saved = output / "run" / "config.yaml"
    with FolderLock(output):
        check_folder(config, output, resume=saved.is_file(), overwrite=False)
        if saved.is_file():
            before = LinearizeConfig.from_yaml(saved)
            refuse_changes(saved, config_fingerprint(before, "transfer"), config_fingerprint(config, "transfer"))
        blocks = _blocks(config, output, console)
        warn_of_few_updates("transfer", config.transfer, len(blocks.data["train"]), console)
        claim_folder(config, output, overwrite=False)
        try:
            cache.save(blocks.folder / DATA_FILE, dict(blocks.data))
        except OSError as error:
            raise UserError(f"cannot write to {output}: {error}; make room, then repeat the command") from error
        for block in blocks.blocks:
            blocks.caches(block)  # reserves their room
        for block, following in zip(blocks.blocks, blocks.blocks[1:], strict=False):
            if not blocks.has_inputs(following):
                console.print(f"passing the data through {block}, of {len(blocks.blocks)} blocks")
                blocks.run_block(block, train=False)
    console.print(f"{output} has the inputs of {len(blocks.blocks)} blocks, to train with `lolcats blocks train`")


def train_one(output: Path, number: int, console: Console, *, device: str | None = None) -> None:
    """Train a block of a prepared run, or resume its training."""
    saved = output / "run" / "config.yaml"
    if not saved.is_file():
        raise UserError(f"{output} holds no run ({saved} does not exist); begin one with `lolcats blocks prepare`")
    config = LinearizeConfig.from_yaml(saved)
    config.model.device = device or config.model.device
    blocks = _blocks(config, output, console)
    if not 0 <= number < len(blocks.blocks):
        raise UserError(f"--block {number}: {output} has the blocks 0 to {len(blocks.blocks) - 1}")
    block = blocks.blocks[number]
    if not blocks.has_inputs(block):
        raise UserError(
            f"the inputs of {block} are not complete in {blocks.activations}; run `lolcats blocks prepare` again, which"
            " resumes where it was"
        )
    blocks.run_block(block, write=False)


def _blocks(config: LinearizeConfig, output: Path, console: Console) -> Blocks:
    """As the run itself makes them, from the data that `prepare` keeps for machines without the sources."""
    partial, tokenizer = load_in_parts(config)
    section, folder = stage_section(config, "transfer", partial.model.model), output / "run" / "transfer"
    try:
        train, validation = cache.load(folder / DATA_FILE).values()
    except (OSError, SafetensorError):  # it is not there yet, or damaged
        vocabulary = partial.model.config.text_config.vocab_size
        train, validation = build_datasets(section, tokenizer, seed=config.seed, vocabulary=vocabulary)
    own = identity(config, "transfer", weights=weights_hash(config.model), validation=validation)
    data = {"train": moved(train, section), "validation": validation}
    return Blocks(config, partial, data, folder, own, console)
