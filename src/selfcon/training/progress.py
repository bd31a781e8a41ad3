"""Progress of a stage: one bar over all its epochs on a terminal, a line now and then elsewhere; on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from selfcon.progress import as_time, say, speaks

_SECONDS_BETWEEN_LINES = 10.0
_SECONDS_BETWEEN_DRAWINGS = 0.2
_SETTLED, _MEASURED = 2.0, 5.0  # seconds after the first batch: when measuring begins, and when the estimate is printed
_SHORT = 10.0  # seconds; shorter runs need no estimate


@dataclass(frozen=True)
class Forecast:
    """What a time is estimated for: its name, and the work after this stage, in samples of this stage."""

    what: str
    later: float = 0.0
    streamed: bool = False  # then the first epoch is the slowest


class Reporter:
    """Shows epoch, rate, time left, loss and what was measured last."""

    def __init__(
        self, what: str, epochs: int, samples: int, *, seen: int = 0, forecast: Forecast | None = None
    ) -> None:
        self.what, self.epochs, self.total = what, epochs, epochs * samples
        self.first: int | None = None  # samples seen when the clock was started, after the slow first batch
        self.before = seen
        self.forecast = forecast
        self.marks: list[tuple[float, int]] = []  # when how many samples were seen, to estimate the time from
        self.measured = ""  # what is said besides
        self.start = self.drawn = time.monotonic()
        self.bar: Any = None

    def __enter__(self) -> Self:
        if speaks() and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TimeRemainingColumn(),
                TextColumn("left"),
                TextColumn("{task.fields[now]}"),
            )
            self.bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self.bar.start()
            self.task = self.bar.add_task(self.what, total=self.total, completed=self.before, now="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()

    def show(self, epoch: int, seen: int, loss: Callable[[], float]) -> None:
        """After a batch, with the number of samples seen in all epochs.

        The loss is asked for only when something is drawn, since a GPU must be waited for then.
        """
        if not speaks():
            return
        now = time.monotonic()
        if self.first is None:
            self.first, self.start = seen, now
            self.marks = [(now, seen)]
            return
        if self.forecast is not None:
            self._estimate(self.forecast, now, seen, loss)
        if now - self.drawn < (_SECONDS_BETWEEN_DRAWINGS if self.bar is not None else _SECONDS_BETWEEN_LINES):
            return
        self.drawn = now
        rate = (seen - self.first) / (now - self.start)
        told = [f"epoch {epoch + 1}/{self.epochs}", f"loss {loss():.3f}", self.measured, f"{rate:,.0f} images/s"]
        text = ", ".join(filter(None, told))
        if self.bar is not None:
            self.bar.update(self.task, completed=seen, now=text)
        else:
            sys.stderr.write(f"{self.what}: {text}, {(self.total - seen) / rate:,.0f} s left\n")
            sys.stderr.flush()
            self.first, self.start = seen, now  # the next line tells of what follows, without what came slow at first

    def _estimate(self, forecast: Forecast, now: float, seen: int, loss: Callable[[], float]) -> None:
        """Print once how long the run will take, from the pace of its first seconds."""
        passed = now - self.marks[0][0]
        if passed < _MEASURED:
            if passed >= _SETTLED and len(self.marks) == 1:
                loss()  # wait for the GPU
                self.marks.append((time.monotonic(), seen))
            return
        loss()
        start, before = self.marks[-1]
        seconds = (self.total + forecast.later - seen) * (time.monotonic() - start) / (seen - before)
        if seconds > _SHORT:
            rest = "the rest of " if self.before else ""
            faster = " Later epochs of streamed images can be faster." if forecast.streamed else ""
            say(f"About {as_time(seconds)} for {rest}{forecast.what}.{faster}")
        self.forecast = None
