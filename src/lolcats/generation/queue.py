"""Requests that wait for a slot, and the word that some were cancelled. Safe from any thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable

from lolcats.generation.request import Request


class QueueFull(RuntimeError):
    """More requests wait than the engine was told to hold; try again later."""


class RequestQueue:
    """First come, first served.

    Args:
        most: requests that may wait; None: any number.

    Attributes:
        closed: no more requests are taken.
    """

    def __init__(self, most: int | None) -> None:
        self.most = most
        self.closed = False
        self._requests: deque[Request] = deque()
        self._changed = threading.Condition()  # guards everything here
        self._cancelled = self._cancel_all = False

    def __len__(self) -> int:
        return len(self._requests)

    def put(self, request: Request) -> None:
        """Append a request.

        Raises:
            QueueFull: `most` requests wait already.
            RuntimeError: the queue is closed.
        """
        with self._changed:
            if self.closed:
                raise RuntimeError("the engine is shut down")
            if self.most is not None and len(self._requests) >= self.most:
                raise QueueFull(f"{len(self._requests)} requests wait already (max_queue); try again later")
            self._requests.append(request)
            self._changed.notify_all()

    def take(self) -> Request | None:
        """The request that waits longest; None: nobody waits."""
        with self._changed:
            return self._requests.popleft() if self._requests else None

    def take_all(self) -> list[Request]:
        with self._changed:
            waiting, self._requests = list(self._requests), deque()
        return waiting

    def note_cancel(self) -> None:
        """The owner of a request, wherever it is, has asked for its end (`Handle.cancel_requested`)."""
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()

    def take_cancelled(self, inside: Callable[[], Iterable[Request]]) -> list[Request]:
        """The cancelled ones of the waiting requests, which wait no more, and of those `inside` the engine."""
        with self._changed:
            if not self._cancelled:
                return []
            self._cancelled = False
            gone = [request for request in self._requests if self._is_cancelled(request)]
            if gone:
                self._requests = deque(item for item in self._requests if not self._is_cancelled(item))
        return gone + [request for request in inside() if self._is_cancelled(request)]

    def close(self, cancel: bool) -> None:
        """Take no more requests.

        Args:
            cancel: all that are there count as cancelled.
        """
        with self._changed:
            self.closed = True
            if cancel:
                self._cancel_all = self._cancelled = True
            self._changed.notify_all()

    def wait_for_work(self, busy: Callable[[], bool]) -> bool:
        """Wait until there is something to do. False: nothing is left, and the queue is closed.

        Args:
            busy: whether requests are in work that wait here no more.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._requests or busy() or self.closed)
            return bool(self._requests) or busy()

    def _is_cancelled(self, request: Request) -> bool:
        return self._cancel_all or request.handle.cancel_requested
