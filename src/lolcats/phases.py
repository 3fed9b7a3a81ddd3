"""Where the time of a run goes."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic


class Phases:
    """Seconds of a run by phase; one phase lasts until the next begins.

    Args:
        before_s: what passed before, as phase "start".
        clock: seconds, as `time.monotonic`.

    Attributes:
        seconds: of the phases that have ended, in the order of their first beginning; of one that came several times,
            the sum.
    """

    def __init__(self, before_s: float = 0.0, *, clock: Callable[[], float] = monotonic) -> None:
        self.clock, self.began, self.current = clock, clock() - before_s, "start"
        self.seconds: dict[str, float] = {}

    def begin(self, name: str) -> None:
        """End the current phase and begin another."""
        now = self.clock()
        self.seconds[self.current] = round(self.seconds.get(self.current, 0.0) + now - self.began, 3)
        self.began, self.current = now, name
