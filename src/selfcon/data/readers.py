"""Who reads and cuts out images while the device works: threads of this process, or processes beside it.

Threads share Python's lock, which is enough where images lie decoded; where they are files, processes read several
times as many. Those are forked once and stay, and lay the pixels into memory that they share with this process.
"""

from __future__ import annotations

import gc
import mmap
import os
import signal
import threading
import time
import warnings
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import TypeVar

import numpy as np
import torch

from selfcon.data import scan
from selfcon.data.cutting import Cutter
from selfcon.data.images import Pixels
from selfcon.data.store import Store, allocate
from selfcon.errors import HungError

T = TypeVar("T")
_BEGIN_WITHIN = 100.0  # seconds
_GRACE = 10.0  # seconds


class Reading(ABC):
    """Crops in the making."""

    @abstractmethod
    def wait(self) -> list[Pixels]:
        """The crops, which stay what they are until `release`."""

    def release(self) -> None:  # noqa: B027 - most have nothing to give back
        """The crops were used."""


class Readers(ABC):
    """Somebody who reads samples of one store."""

    @abstractmethod
    def share(self, batch_size: int) -> int:
        """How many samples of a batch one reader is given at a time."""

    @abstractmethod
    def read(self, cutter: Cutter, rows: Sequence[int], samples: Sequence[int]) -> Reading:
        """Begin to cut these samples out of those images."""

    @abstractmethod
    def close(self, *, wait: bool = True) -> None:
        """No more is wanted."""


class Threads(Readers):
    """Readers in this process, for as long as an epoch lasts."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._pool = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="read")

    def share(self, batch_size: int) -> int:
        return 1

    def read(self, cutter: Cutter, rows: Sequence[int], samples: Sequence[int]) -> Reading:
        return _InThread(self._pool.submit(cutter.cut, self._store, rows, samples), samples)

    def close(self, *, wait: bool = True) -> None:
        self._pool.shutdown(wait=wait, cancel_futures=True)


class _InThread(Reading):
    def __init__(self, future: Future[list[Pixels]], samples: Sequence[int]) -> None:
        self._future, self._samples = future, samples

    def wait(self) -> list[Pixels]:
        return _wait(self._future, self._samples)


class _Done(Reading):
    def __init__(self, crops: list[Pixels]) -> None:
        self._crops = crops

    def wait(self) -> list[Pixels]:
        return self._crops


class Processes(Readers):
    """Readers in processes of their own, each of which fills a slot of shared memory at a time."""

    def __init__(self, store: Store, count: int, slots: int, slot_bytes: int) -> None:
        self.count, self.slots, self.slot_bytes = count, slots, slot_bytes
        self._memory = allocate(slots * slot_bytes)
        self._free = deque(range(slots))
        self._closed = False
        self._broken: float | None = None  # since when somebody is gone
        self._store = weakref.ref(store)
        self._pool = ProcessPoolExecutor(
            count,
            mp_context=get_context("fork"),
            initializer=_begin,
            initargs=(id(self), os.getpid()),
        )
        # All are forked with the first task. They inherit the store; the pool must not hold it, or it would never go.
        _inherited[id(self)] = _Place(store, self._memory, slot_bytes)
        try:
            with warnings.catch_warnings():
                # Forking beside threads is what data loaders do; the children compute with one thread, on the CPU.
                warnings.simplefilter("ignore", DeprecationWarning)
                self._pool.submit(os.getpid).result(_BEGIN_WITHIN)
        except (TimeoutError, BrokenExecutor) as error:
            self.close(wait=False)
            raise HungError("The processes that read images did not begin.") from error
        finally:
            del _inherited[id(self)]

    def fits(self, slots: int, slot_bytes: int) -> bool:
        """Whether these processes can be used for so much."""
        return not self._closed and slots <= self.slots and slot_bytes <= self.slot_bytes

    def share(self, batch_size: int) -> int:
        return share_of(batch_size, self.count)

    def read(self, cutter: Cutter, rows: Sequence[int], samples: Sequence[int]) -> Reading:
        def cut_here() -> list[Pixels]:
            store = self._store()
            assert store is not None  # somebody reads from it
            return cutter.cut(store, rows, samples)

        self.check()
        try:
            slot = self._free.pop()
        except IndexError:  # several go through the same images at once: this one reads for itself
            return _Done(cut_here())
        try:
            future = self._pool.submit(_cut_into, slot, cutter, rows, samples)
        except RuntimeError as error:
            self._free.append(slot)
            if isinstance(error, BrokenExecutor):
                self.note_broken()
            elif not self._closed:  # for those who need larger slots
                raise
            return _Done(cut_here())
        return _InProcess(self, slot, future, samples, cut_here)

    def check(self) -> None:
        """Raise HungError if a process is gone; not at once, since a signal to all of us ends them, too."""
        if self._broken is not None and time.monotonic() - self._broken > _GRACE:
            self.close(wait=False)
            raise HungError("A process that reads images has ended by itself, or was ended (for want of memory?).")

    def note_broken(self) -> None:
        """A process is gone."""
        self._broken = self._broken or time.monotonic()

    def look(self, slot: int, shapes: Sequence[tuple[int, int]]) -> list[Pixels]:
        """The crops of these shapes that lie in a slot."""
        found, start = [], slot * self.slot_bytes
        for height, width in shapes:
            count = 3 * height * width
            found.append(np.frombuffer(self._memory, np.uint8, count, start).reshape(height, width, 3))
            start += count
        return found

    def give_back(self, slot: int) -> None:
        self._free.append(slot)

    def close(self, *, wait: bool = True) -> None:
        self._closed = True
        self._pool.shutdown(wait=wait, cancel_futures=True)


class _InProcess(Reading):
    def __init__(
        self,
        readers: Processes,
        slot: int,
        future: Future[list[tuple[int, int]]],
        samples: Sequence[int],
        cut_here: Callable[[], list[Pixels]],
    ) -> None:
        self._readers, self._slot, self._future, self._samples = readers, slot, future, samples
        self._cut_here = cut_here

    def wait(self) -> list[Pixels]:
        try:
            shapes = _wait(self._future, self._samples)
            return self._readers.look(self._slot, shapes)
        except BrokenExecutor:
            self._readers.note_broken()
            return self._cut_here()
        except CancelledError:
            return self._cut_here()

    def release(self) -> None:
        if self._future.cancel() or self._future.done():
            self._readers.give_back(self._slot)
        else:  # somebody still writes there
            self._future.add_done_callback(lambda _: self._readers.give_back(self._slot))


def share_of(batch_size: int, count: int) -> int:
    """Samples of a batch for each of so many readers."""
    return -(-batch_size // count)


def _wait(future: Future[T], samples: Sequence[int]) -> T:
    """What comes of some samples, unless nothing does for too long; those before them were waited for already."""
    try:
        return future.result(scan.PATIENCE)
    except TimeoutError as error:
        if future.done():
            raise
        which = f"sample {samples[0]}" if len(samples) == 1 else f"samples {samples[0]} ... {samples[-1]}"
        raise HungError(f"Nothing came of {which} in {scan.PATIENCE:.0f} seconds.") from error


@dataclass(frozen=True)
class _Place:
    """What a process that was forked works with."""

    store: Store
    memory: mmap.mmap
    slot_bytes: int


_inherited: dict[int, _Place] = {}
_own: list[_Place] = []  # in a process that was forked


def _begin(number: int, parent: int) -> None:
    """In a process that was forked: what it works with, and when it ends."""
    gc.freeze()  # what the other process had is not ours to tidy up
    _own.append(_inherited[number])
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that asked decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _cut_into(slot: int, cutter: Cutter, rows: Sequence[int], samples: Sequence[int]) -> list[tuple[int, int]]:
    """In a process: crops one behind the other in a slot; their shapes."""
    place = _own[-1]
    shapes, start = [], slot * place.slot_bytes
    for crop in cutter.cut(place.store, rows, samples):
        height, width = crop.shape[:2]
        np.frombuffer(place.memory, np.uint8, crop.size, start).reshape(crop.shape)[:] = crop
        start += crop.size
        shapes.append((height, width))
    return shapes
