"""Errors of a run of several processes: every rank reports the cause, once, and not its consequences.

A process that fails breaks off the communication of the others. They raise its message instead of their own.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import distributed

from lolcats.errors import UserError

_FAILED = "lolcats/failed"
_SIGNS = ("gloo/", "Connection reset by peer", "Connection closed by peer", "Broken pipe", "NCCL")
"""What the messages of broken communication contain; gloo raises a plain RuntimeError."""


def explain(error: Exception, rank: int, store: Any) -> Exception:
    """What a rank raises at the end: its own failure, or that of the rank that failed first.

    Args:
        store: of all ranks; the first rank that fails by itself leaves its message there.
    """
    if isinstance(error, UserError) and error.common:
        return error
    if is_communication_error(error):
        with suppress(Exception):
            if store.check([_FAILED]):
                cause = UserError(store.get(_FAILED).decode())
                cause.suppress_output = True
                return cause
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return UserError(
            f"rank {rank}: another process of this run vanished or does not answer ({first_line}). It was killed, its"
            " machine is gone, or it needs longer than parallel.timeout. Start the same command with --resume: it"
            " resumes from the last checkpoint (with another number of processes, too)"
        )
    message = f"rank {rank}: {describe_error(error)}"
    first = message
    with suppress(Exception):
        first = store.compare_set(_FAILED, "", message).decode()
    if not isinstance(error, UserError):
        return error
    own = UserError(message)
    own.suppress_output = first != message and first.partition(": ")[2] == str(error)
    return own


def is_communication_error(error: BaseException) -> bool:
    """Whether `error` says that another process does not answer (and not that this one failed)."""
    if isinstance(error, UserError | torch.OutOfMemoryError):
        return False
    text = str(error)
    return isinstance(error, distributed.DistError) or (
        isinstance(error, RuntimeError | OSError) and any(sign in text for sign in _SIGNS)
    )


def describe_error(error: BaseException) -> str:
    """The message; for exceptions other than UserError preceded by their type."""
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
