"""Decoded images that stay in main memory, where forked processes see them, too."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

import numpy as np

from selfcon.data import scan
from selfcon.data.images import Pixels
from selfcon.data.source import Images
from selfcon.errors import HungError

# Pages are taken when they are written. Python 3.11 does not name the flag.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


class Store:
    """Images by their number: decoded when first asked for, then kept, as many as a budget of bytes allows."""

    def __init__(self, images: Images, budget: int) -> None:
        self.images, self.budget = images, max(0, budget)
        self._lock = get_context("fork").Lock()
        self._kept = allocate(self.budget)
        self._used = np.frombuffer(allocate(8), np.int64)
        self.helpers: list[Any] = []  # processes that read it
        self._places = np.frombuffer(allocate(24 * len(images)), np.int64).reshape(-1, 3)  # start + 1, height, width

    @property
    def used(self) -> int:
        return int(self._used[0])

    def __getitem__(self, index: int) -> Pixels:
        kept = self._find(index)
        if kept is not None:
            return kept
        pixels = self.images[index]
        with self._alone():
            start = self.used
            if self._places[index, 0] or start + pixels.nbytes > self.budget:
                return pixels
            self._used[0] = start + pixels.nbytes
        np.frombuffer(self._kept, np.uint8, pixels.nbytes, start)[:] = pixels.reshape(-1)
        with self._alone():
            self._places[index] = start + 1, *pixels.shape[:2]
        return pixels

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Among all threads and processes; one that was killed in here would be waited for without end."""
        if not self._lock.acquire(timeout=scan.PATIENCE):
            raise HungError("The images that stay in memory are locked by a process that is gone.")
        try:
            yield
        finally:
            self._lock.release()

    def _find(self, index: int) -> Pixels | None:
        with self._alone():
            start, height, width = (int(each) for each in self._places[index])
        if not start:
            return None
        return np.frombuffer(self._kept, np.uint8, height * width * 3, start - 1).reshape(height, width, 3)


def allocate(size: int) -> mmap.mmap:
    """Memory that is 0, and is shared with processes that are forked later."""
    return mmap.mmap(-1, max(1, size), flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _NO_RESERVE)
