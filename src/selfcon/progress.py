"""Progress of long work, on stderr: a bar with rate and time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")
_SECONDS_BETWEEN_LINES = 10.0


def speaks() -> bool:
    """Whether this process is the one of several that shows what goes on."""
    return os.environ.get("RANK", "0") == "0"


def say(sentence: str) -> None:
    """One line for somebody who watches."""
    if not speaks():
        return
    sys.stderr.write(f"{sentence}\n")
    sys.stderr.flush()


def as_time(seconds: float) -> str:
    """Return seconds in words."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"


def track(items: Iterable[Item], what: str, total: int) -> Iterator[Item]:
    """The items, while showing how many of `total` are done; work that is done in a moment shows nothing."""
    if not speaks():
        return iter(items)
    return _bar(items, what, total) if sys.stderr.isatty() else _lines(items, what, total)


def _bar(items: Iterable[Item], what: str, total: int) -> Iterator[Item]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[rate]}"), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total, rate="")
        start = time.monotonic()
        for done, item in enumerate(items, start=1):
            yield item
            rate = done / max(time.monotonic() - start, 1e-9)
            bar.update(task, completed=done, rate=f"{rate:,.0f}/s")


def _lines(items: Iterable[Item], what: str, total: int) -> Iterator[Item]:
    start = last = time.monotonic()
    for done, item in enumerate(items, start=1):
        yield item
        now = time.monotonic()
        if now - last >= _SECONDS_BETWEEN_LINES:
            last = now
            rate = done / (now - start)
            left = (total - done) / rate
            sys.stderr.write(f"{what}: {done:,} of {total:,}, {rate:,.0f}/s, {left:,.0f} s left\n")
            sys.stderr.flush()
