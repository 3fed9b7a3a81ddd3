"""Dividing batches among processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from lolcats.config import OptimSection
from lolcats.errors import UserError
from lolcats.parallel.group import Group

SectionT = TypeVar("SectionT", bound=OptimSection)


def fit_micro_batches(section: SectionT, name: str, group: Group, report: Callable[[str], None]) -> SectionT:
    """The section with micro-batches of which every process gets equally many; smaller ones if need be.

    Gradients add up to the same batch, so results differ by rounding alone.

    Args:
        name: of the section, for messages.
        report: receives a sentence if the micro-batches become smaller.

    Raises:
        UserError: there are more processes than sequences in a batch, or no equal shares.
    """
    if section.batch_size % group.world:
        raise UserError(
            f"{name}.batch_size={section.batch_size} cannot be shared equally by {group.world} processes; choose a"
            f" multiple of {group.world}, or start fewer processes"
        )
    share = section.batch_size // group.world
    size = next(size for size in range(min(section.micro_batch_size, share), 0, -1) if share % size == 0)
    if size == section.micro_batch_size:
        return section
    report(
        f"{name}.micro_batch_size={size} instead of {section.micro_batch_size}: each of {group.world} processes gets"
        f" {share} sequences of a batch"
    )
    return section.model_copy(update={"micro_batch_size": size})
