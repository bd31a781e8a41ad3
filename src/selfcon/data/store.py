"""Decoded images that stay in main memory, where forked processes see them, too."""

from __future__ import annotations

import mmap
from multiprocessing import get_context

import numpy as np

from selfcon.data.images import Pixels
from selfcon.data.source import Images

_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # pages are taken when they are written


class Store:
    """Images by their number: decoded when first asked for, then kept, as many as a budget of bytes allows."""

    def __init__(self, images: Images, budget: int) -> None:
        self.images, self.budget = images, max(0, budget)
        self._lock = get_context("fork").Lock()
        self._kept = _allocate(self.budget)
        self._used = np.frombuffer(_allocate(8), np.int64)
        self._places = np.frombuffer(_allocate(24 * len(images)), np.int64).reshape(-1, 3)  # start + 1, height, width

    @property
    def used(self) -> int:
        return int(self._used[0])

    def __getitem__(self, index: int) -> Pixels:
        kept = self._find(index)
        if kept is not None:
            return kept
        pixels = self.images[index]
        with self._lock:
            start = self.used
            if self._places[index, 0] or start + pixels.nbytes > self.budget:
                return pixels
            self._used[0] = start + pixels.nbytes
        np.frombuffer(self._kept, np.uint8, pixels.nbytes, start)[:] = pixels.reshape(-1)
        with self._lock:
            self._places[index] = start + 1, *pixels.shape[:2]
        return pixels

    def _find(self, index: int) -> Pixels | None:
        with self._lock:
            start, height, width = (int(each) for each in self._places[index])
        if not start:
            return None
        return np.frombuffer(self._kept, np.uint8, height * width * 3, start - 1).reshape(height, width, 3)


def _allocate(size: int) -> mmap.mmap:
    """Memory that is 0, and is shared with processes that are forked later."""
    return mmap.mmap(-1, max(1, size), flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _NO_RESERVE)
