"""What all commands share: where text goes, how errors show, and what libraries may say."""

from __future__ import annotations

import errno
import logging
import os
import sys
import warnings
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from lolcats.errors import Terminated, UserError

# Of the file system, for users to mend: a full disk, no permission, a file where a folder should be.
REFUSED = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ENOTDIR}


class Group(TyperGroup):
    """A command group whose UserErrors, and what the file system refuses, end the program with a message."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (UserError, OSError) as error:
            if ctx.params.get("debug") or (isinstance(error, OSError) and error.errno not in REFUSED):
                raise
            if not getattr(error, "suppress_output", False):
                hint = "; mend that, and give the same command again" * isinstance(error, OSError)
                notes().print(f"[bold red]error:[/] {escape(str(error))}{hint}", highlight=False, soft_wrap=True)
            raise typer.Exit(1) from error
        except KeyboardInterrupt as stop:
            what, status = ("terminated", 143) if isinstance(stop, Terminated) else ("interrupted", 130)
            notes().print(f"[bold red]{what}[/]", escape(str(stop)), highlight=False, soft_wrap=True)
            raise typer.Exit(status) from None


def notes() -> Console:
    """For people: progress, tables, messages; on stderr, so that stdout stays usable in a pipe."""
    return Console(file=sys.stderr)


def results() -> Console:
    """For tables on stdout; a file has no edge to wrap at."""
    return Console(width=None if sys.stdout.isatty() else 240)


# Packages whose own warnings are noise to who runs a command.
NOISY = "torch|transformers|huggingface_hub|datasets|peft|accelerate|triton|lm_eval|liger_kernel"


def prepare_libraries(quiet: bool = True) -> None:
    """Set the libraries' environment, before they are imported, and show each warning once as a line on stderr.

    What is set in the environment already stays.

    Args:
        quiet: silence the advice and warnings of `NOISY`, and of what is deprecated. Downloads keep their bars.
    """
    # OpenMP threads that wait otherwise spin: on a CPU shared with other programs that takes the very time
    # that they wait for, ten times the step time in the worst case.
    settings = {"OMP_WAIT_POLICY": "PASSIVE"}  # TOKENIZERS_PARALLELISM is the business of data.packing
    warnings.showwarning = _show_warning
    warnings.simplefilter("once")
    if quiet:
        settings |= {
            "TRANSFORMERS_VERBOSITY": "error",
            "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
            "DATASETS_VERBOSITY": "critical",  # what goes wrong is raised, and said once
            "HF_HUB_VERBOSITY": "error",
            "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        }
        for category in (DeprecationWarning, PendingDeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", category)
        warnings.filterwarnings("ignore", module=rf"({NOISY})(\.|$)")
        logging.getLogger("liger_kernel").setLevel(logging.ERROR)  # it tries implementations for all devices
    for variable, value in settings.items():
        os.environ.setdefault(variable, value)


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    notes().print(f"[yellow]warning:[/] {escape(str(message))}", highlight=False, soft_wrap=True)


def quiet_loading_bars() -> None:
    """Hide the bar that transformers draws for each loaded tensor. Imports transformers."""
    from huggingface_hub.utils import enable_progress_bars
    from transformers.utils import logging

    logging.disable_progress_bar()
    enable_progress_bars()  # the line above turns off those of downloads too
