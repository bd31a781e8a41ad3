"""Going through many images at once, in order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

In = TypeVar("In")
Out = TypeVar("Out")


def in_threads(work: Callable[[In], Out], items: Iterable[In]) -> Iterator[Out]:
    """What `work` makes of each item, in order, a few ahead in threads: decoding leaves Python's lock."""
    threads = os.cpu_count() or 1
    waiting: deque[Future[Out]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) > 2 * threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
