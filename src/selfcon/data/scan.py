"""Going through many images at once, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from selfcon.errors import HungError
from selfcon.memory import count_cores

In = TypeVar("In")
Out = TypeVar("Out")
PATIENCE = 100.0
"""Seconds that one item may take; a file system that does not answer would be waited for without end."""


def in_threads(
    work: Callable[[In], Out],
    items: Iterable[In],
    *,
    describe: Callable[[In], str] = str,
    patience: float | None = None,
) -> Iterator[Out]:
    """What `work` makes of each item, in order, a few ahead in threads: decoding leaves Python's lock."""
    threads = count_cores()
    patience = PATIENCE if patience is None else patience
    waiting: deque[tuple[In, Future[Out]]] = deque()
    pool = ThreadPoolExecutor(threads)
    hung = False

    def wait_for_next() -> Out:
        nonlocal hung
        item, future = waiting.popleft()
        try:
            return future.result(patience)
        except TimeoutError as error:
            if future.done():  # the work's own
                raise
            hung = True
            raise HungError(f"Nothing came of {describe(item)} in {patience:.0f} seconds.") from error

    try:
        for item in items:
            waiting.append((item, pool.submit(work, item)))
            if len(waiting) > 2 * threads:
                yield wait_for_next()
        while waiting:
            yield wait_for_next()
    finally:
        pool.shutdown(wait=not hung, cancel_futures=True)
