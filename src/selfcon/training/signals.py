"""Being told to stop: the step in hand is ended and a checkpoint written; told twice, the process leaves at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from selfcon.errors import StoppedError

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Stop:
    """Whether somebody asked for an end, and how."""

    def __init__(self) -> None:
        self.by: str | None = None

    def check(self) -> None:
        """Raise StoppedError if so."""
        if self.by is not None:
            raise StoppedError(f"Stopped by {self.by}; the same command goes on from here.")


@contextmanager
def watch() -> Iterator[Stop]:
    """Notice signals for a while instead of dying of them; only the main thread can."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def notice(number: int, frame: FrameType | None) -> None:
        if stop.by is not None and number == signal.SIGINT:
            os._exit(130)
        stop.by = signal.Signals(number).name

    before = {number: signal.signal(number, notice) for number in _SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
