"""Requests that wait for a slot."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator

from lolcats.generation.request import Request


class QueueFull(RuntimeError):
    """As many requests wait as may; try again later."""


class WaitingQueue:
    """Requests that wait for a slot, first come, first served; and whether any request was cancelled. Thread-safe.

    Args:
        limit: requests that may wait; None: any number.

    Attributes:
        closed: no more requests are accepted.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.closed = False
        self._requests: deque[Request] = deque()
        self._changed = threading.Condition()  # guards everything here
        self._any_cancelled = False

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._requests))

    def put(self, request: Request) -> None:
        """Append a request.

        Raises:
            QueueFull: `limit` requests wait already.
            RuntimeError: the queue is closed.
        """
        with self._changed:
            if self.closed:
                raise RuntimeError("the engine is shut down")
            if self.limit is not None and len(self._requests) >= self.limit:
                raise QueueFull(f"{len(self._requests)} requests wait already (max_queue); try again later")
            self._requests.append(request)
            self._changed.notify_all()

    def take(self) -> Request | None:
        """Remove and return the request that waits longest; None: none waits."""
        with self._changed:
            return self._requests.popleft() if self._requests else None

    def note_cancel(self) -> None:
        """Some request, waiting or running, has `Handle.cancel_requested` set."""
        with self._changed:
            self._any_cancelled = True
            self._changed.notify_all()

    def take_cancelled(self, running: Callable[[], list[Request]]) -> list[Request]:
        """Remove and return cancelled waiting requests, together with the cancelled ones of the `running`."""
        with self._changed:
            if not self._any_cancelled:
                return []
            self._any_cancelled = False
            cancelled = [item for item in (*self._requests, *running()) if item.handle.cancel_requested]
            self._requests = deque(item for item in self._requests if item not in cancelled)
        return cancelled

    def close(self) -> None:
        """Accept no more requests."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()

    def wait_for_work(self, busy: Callable[[], bool]) -> bool:
        """Block until there is work. False: none is left, and the queue is closed.

        Args:
            busy: whether requests have slots.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._requests or busy() or self.closed)
            return bool(self._requests) or busy()
