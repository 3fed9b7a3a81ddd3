"""Which request has which slot."""

from __future__ import annotations

from collections.abc import Callable

from lolcats.generation.request import Request


class SlotAssignment:
    """Which request has which slot. Decoding requests fill slots 0 .. `decoding` - 1 without a gap.

    So a decode step works on views of fixed address and costs what its requests cost. Requests in prefill have slots
    behind them.

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

    @property
    def requests(self) -> list[Request]:
        """All that have a slot, the last slot first: released in this order, none has to move."""
        return [request for request in reversed(self.owner) if request is not None]

    def decoding_requests(self) -> list[Request]:
        """In the order of their slots."""
        return [request for request in self.owner[: self.decoding] if request is not None]

    def take(self, request: Request) -> int:
        """Give a request the last free slot."""
        slot = max(self._free)
        self._assign(slot, request)
        return slot

    def start_decoding(self, request: Request) -> None:
        """Bring a request from behind to the end of the decoding ones."""
        slot, target = request.slot, self.decoding
        other = self.owner[target]
        if other is not request:
            (self._move if other is None else self._exchange)(slot, target)
            self._assign(slot, other)
            self._assign(target, request)
        self.decoding += 1

    def release(self, request: Request) -> None:
        """Free a request's slot; the last decoding request closes the gap."""
        slot = request.slot
        if slot < self.decoding:
            last = self.decoding - 1
            if slot != last:
                self._move(last, slot)  # if it fails, nothing has changed
                self._assign(slot, self.owner[last])
            slot = self.decoding = last
        request.slot = -1
        self._assign(slot, None)

    def _assign(self, slot: int, request: Request | None) -> None:
        self.owner[slot] = request
        if request is None:
            self._free.add(slot)
        else:
            request.slot = slot
            self._free.discard(slot)
