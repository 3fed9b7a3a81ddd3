"""The queue before the slots: order, limits, cancellation, and when its reader has to wake up."""

from __future__ import annotations

import threading

import pytest

from lolcats.generation.request import Handle, Request
from lolcats.generation.sampling import SamplingParams
from lolcats.generation.scheduler import QueueFull, WaitingQueue
from lolcats.generation.text import Detokenizer


def request(queue: WaitingQueue, token: int = 1) -> Request:
    return Request([token], SamplingParams(), Handle(lambda: False, queue.note_cancel), Detokenizer(None))


def test_first_come_first_served_up_to_the_limit():
    queue = WaitingQueue(2)
    first, second = request(queue), request(queue)
    queue.put(first)
    queue.put(second)
    with pytest.raises(QueueFull, match="2 requests wait already"):
        queue.put(request(queue))
    assert queue.take() is first
    queue.put(request(queue))
    assert queue.take_all()[0] is second
    assert queue.take() is None


def test_cancelled_requests_are_taken_once_wherever_they_are():
    queue = WaitingQueue(None)
    waiting, cancelled, inside, other = (request(queue, token) for token in range(4))
    queue.put(waiting)
    queue.put(cancelled)
    assert queue.take_cancelled(lambda: [inside, other]) == []
    cancelled.handle.cancel()
    inside.handle.cancel()
    assert queue.take_cancelled(lambda: [inside, other]) == [cancelled, inside]
    assert queue.take_cancelled(lambda: [inside, other]) == []
    assert queue.take_all() == [waiting]


@pytest.mark.parametrize("cancel", [True, False])
def test_closed_it_takes_no_more_and_keeps_or_cancels_the_rest(cancel):
    queue = WaitingQueue(None)
    waiting, inside = request(queue), request(queue)
    queue.put(waiting)
    queue.close(cancel)
    with pytest.raises(RuntimeError, match="shut down"):
        queue.put(request(queue))
    assert queue.take_cancelled(lambda: [inside]) == ([waiting, inside] if cancel else [])
    assert len(queue) == (0 if cancel else 1)


def test_waiting_ends_with_work_or_with_the_queue():
    queue = WaitingQueue(None)
    answers: list[bool] = []

    def wait() -> None:
        thread = threading.Thread(target=lambda: answers.append(queue.wait_for_work(lambda: False)))
        thread.start()
        threads.append(thread)

    threads: list[threading.Thread] = []
    wait()
    queue.put(request(queue))
    threads[-1].join()
    queue.take()
    wait()
    queue.close(cancel=False)
    threads[-1].join()
    assert answers == [True, False]
    assert queue.wait_for_work(lambda: True)  # what is inside is finished first
