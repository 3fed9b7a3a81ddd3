"""Who sits in which slot: decoding requests in front, requests in prefill behind."""

from __future__ import annotations

from collections.abc import Callable

from lolcats.generation.request import Request


class Rows:
    """Slots and their requests. Decoding ones fill slots 0 .. `decoding` - 1 without a gap.

    Args:
        slots: how many there are.
        move: copies the contents of one slot over another, (source, target).
        exchange: exchanges the contents of two slots.
    """

    def __init__(self, slots: int, move: Callable[[int, int], None], exchange: Callable[[int, int], None]) -> None:
        self.owner: list[Request | None] = [None] * slots
        self.decoding = 0
        self._move, self._exchange = move, exchange
        self._free = set(range(slots))

    @property
    def free(self) -> int:
        return len(self._free)

    def front(self) -> list[Request]:
        """The decoding requests, in the order of their slots."""
        return [request for request in self.owner[: self.decoding] if request is not None]

    def take(self, request: Request) -> int:
        """Give a request the last free slot."""
        row = max(self._free)
        self._place(request, row)
        return row

    def start(self, request: Request) -> None:
        """Bring a request from behind to the end of the decoding ones."""
        row, target = request.row, self.decoding
        other = self.owner[target]
        if other is not None and other is not request:
            self._exchange(row, target)
            self.owner[row], other.row = other, row
            self.owner[target], request.row = request, target
        elif other is None:
            self._move(row, target)
            self._vacate(row)
            self._place(request, target)
        self.decoding += 1

    def release(self, request: Request) -> None:
        """Free a request's slot; the last decoding request closes the gap."""
        row, request.row = request.row, -1
        self._vacate(row)
        if row >= self.decoding:
            return
        self.decoding -= 1
        last = self.owner[self.decoding]
        if row != self.decoding and last is not None:
            self._move(self.decoding, row)
            self._vacate(self.decoding)
            self._place(last, row)

    def _place(self, request: Request, row: int) -> None:
        self.owner[row], request.row = request, row
        self._free.discard(row)

    def _vacate(self, row: int) -> None:
        self.owner[row] = None
        self._free.add(row)
