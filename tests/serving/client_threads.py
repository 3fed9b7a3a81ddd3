"""Calls that run beside a test."""

from __future__ import annotations

import threading


def in_thread(function):
    """Run it; `join()` gives its result or exception."""
    found = []

    def run():
        try:
            found.append(function())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def join():
        thread.join(60)
        return found[0]

    join.running = thread.is_alive
    return join
