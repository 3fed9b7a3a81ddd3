"""Stage 1 of the pipeline, block by block."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from lolcats.config import LinearizeConfig
from lolcats.errors import UserError
from lolcats.parallel.blockwise.activation_exchange import open_exchange
from lolcats.parallel.blockwise.jobs import open_finished
from lolcats.parallel.blockwise.pipelined import train_pipelined
from lolcats.parallel.blockwise.run import BlockwiseTransfer, open_run
from lolcats.parallel.blockwise.streaming import stream
from lolcats.parallel.group import Group
from lolcats.training.progress import make_progress


def train_in_blocks(
    config: LinearizeConfig,
    folder: Path,
    fingerprint_values: dict[str, Any],
    *,
    resume: bool,
    group: Group,
    console: Console,
    begin: Callable[[BlockwiseTransfer], None],
) -> BlockwiseTransfer:
    """Train all blocks as `config.transfer.block_mode` says, or take those that jobs trained.

    Args:
        folder: for checkpoints and caches; used by this stage alone.
        fingerprint_values: plain values that decide the result.
        begin: called by all ranks when blocks and data are known, before anything is written.
        group: in mode "streaming" its first process trains, and the others wait.

    Returns:
        The finished run, from which a model is assembled.
    """
    if config.transfer.job_folder is not None and config.transfer.block_mode == "jobs":
        with group.sync_errors():
            run = open_finished(Path(config.transfer.job_folder), console, config)
        begin(run)
        return run
    pipelined = config.transfer.block_mode == "pipelined"
    if pipelined and group.world == 1:
        raise UserError("block_mode=pipelined needs several processes: start with torchrun, one process per GPU")
    with group.main_first():
        run = open_run(
            config,
            folder,
            fingerprint_values,
            device=group.device,
            progress=lambda: make_progress(quiet=not group.is_main, console=console),
            report=console.print,
            processes=group.world if pipelined else None,
        )
    begin(run)
    if pipelined:
        train_pipelined(run, group, resume=resume)
    else:
        with group.main_first():
            stream(run, open_exchange(run), resume=resume or not group.is_main)
    return run
