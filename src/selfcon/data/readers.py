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
from functools import partial
from multiprocessing import get_context
from typing import TypeVar

import numpy as np
import torch

from selfcon.data import scan
from selfcon.data.cutting import Cutter
from selfcon.data.images import Pixels
from selfcon.data.store import Store, allocate
from selfcon.errors import HungError
from selfcon.memory import count_cores

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

    @property
    @abstractmethod
    def progress(self) -> int:
        """A number that changes as long as anything is read."""

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
        self._store, self._done = store, 0
        self._pool = ThreadPoolExecutor(count_cores(), thread_name_prefix="read")

    @property
    def progress(self) -> int:
        return self._done

    def share(self, batch_size: int) -> int:
        return 1

    def read(self, cutter: Cutter, rows: Sequence[int], samples: Sequence[int]) -> Reading:
        def cut() -> list[Pixels]:
            crops = list(cutter.cut(self._store, rows, samples))
            self._done += 1
            return crops

        return _InThread(self, self._pool.submit(cut), partial(_describe, self._store, rows))

    def close(self, *, wait: bool = True) -> None:
        self._pool.shutdown(wait=wait, cancel_futures=True)


class _InThread(Reading):
    def __init__(self, readers: Readers, future: Future[list[Pixels]], describe: Callable[[], str]) -> None:
        self._readers, self._future, self._describe = readers, future, describe

    def wait(self) -> list[Pixels]:
        return _wait(self._future, self._readers, self._describe)

    def release(self) -> None:
        self._future.cancel()


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
        self._cut = np.frombuffer(allocate(8 * slots), np.int64)  # crops laid into each slot so far
        self._unwanted = np.frombuffer(allocate(slots), np.bool_)  # slots whose crops nobody waits for any more
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
        _inherited[id(self)] = _Place(store, self._memory, slot_bytes, self._cut, self._unwanted)
        try:
            with warnings.catch_warnings():
                # Forking beside threads is what data loaders do; the children compute with one thread, on the CPU.
                warnings.simplefilter("ignore", DeprecationWarning)
                self._pool.submit(os.getpid).result(_BEGIN_WITHIN)
        except (TimeoutError, BrokenExecutor) as error:
            self.close(wait=False)
            raise HungError("The processes that read images did not begin.") from error
        except OSError:
            self.close(wait=False)
            raise
        finally:
            del _inherited[id(self)]

    @property
    def progress(self) -> int:
        return int(self._cut.sum())

    def fits(self, slots: int, slot_bytes: int) -> bool:
        """Whether these processes can be used for so much."""
        return not self._closed and slots <= self.slots and slot_bytes <= self.slot_bytes

    def share(self, batch_size: int) -> int:
        return share_of(batch_size, self.count)

    def read(self, cutter: Cutter, rows: Sequence[int], samples: Sequence[int]) -> Reading:
        def cut_here() -> list[Pixels]:
            store = self._store()
            assert store is not None  # somebody reads from it
            each = scan.in_threads(
                lambda pair: list(cutter.cut(store, pair[:1], pair[1:])),
                zip(rows, samples, strict=True),
                describe=lambda pair: store.images.describe(pair[0]),
            )
            return [crop for crops in each for crop in crops]

        self.check()
        try:
            slot = self._free.pop()
        except IndexError:  # several go through the same images at once: this one reads for itself
            return _Done(cut_here())
        self._unwanted[slot] = False
        try:
            future = self._pool.submit(_cut_into, slot, cutter, rows, samples)
        except RuntimeError as error:
            self._free.append(slot)
            if isinstance(error, BrokenExecutor):
                self.note_broken()
            elif not self._closed:  # for those who need larger slots
                raise
            return _Done(cut_here())
        return _InProcess(self, slot, future, lambda: _describe(self._store(), rows), cut_here)

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
        """Its crops were used."""
        self._free.append(slot)

    def leave(self, slot: int) -> None:
        """Nobody waits for its crops any more."""
        self._unwanted[slot] = True

    def close(self, *, wait: bool = True) -> None:
        self._closed = True
        self._pool.shutdown(wait=wait, cancel_futures=True)


class _InProcess(Reading):
    def __init__(
        self,
        readers: Processes,
        slot: int,
        future: Future[list[tuple[int, int]]],
        describe: Callable[[], str],
        cut_here: Callable[[], list[Pixels]],
    ) -> None:
        self._readers, self._slot, self._future, self._describe = readers, slot, future, describe
        self._cut_here, self._released = cut_here, False

    def wait(self) -> list[Pixels]:
        try:
            shapes = _wait(self._future, self._readers, self._describe)
            return self._readers.look(self._slot, shapes)
        except BrokenExecutor:
            self._readers.note_broken()
        except CancelledError:
            if self._released:
                raise
        return self._cut_here()

    def release(self) -> None:
        self._released = True
        if self._future.cancel() or self._future.done():
            self._readers.give_back(self._slot)
        else:  # somebody still writes there
            self._readers.leave(self._slot)
            self._future.add_done_callback(lambda _: self._readers.give_back(self._slot))


def share_of(batch_size: int, count: int) -> int:
    """Samples of a batch for each of so many readers."""
    return -(-batch_size // count)


def _wait(future: Future[T], readers: Readers, describe: Callable[[], str]) -> T:
    """What comes of a reading, unless for too long nothing comes of any: others may stand before it."""
    before, since = readers.progress, time.monotonic()
    while True:
        try:
            return future.result(scan.PATIENCE / 20)
        except TimeoutError as error:
            if future.done():
                return future.result()
            if (now := readers.progress) != before:
                before, since = now, time.monotonic()
            elif time.monotonic() - since > scan.PATIENCE:
                raise HungError(f"Nothing came of {describe()} in {scan.PATIENCE:.0f} seconds.") from error


def _describe(store: Store | None, rows: Sequence[int]) -> str:
    assert store is not None  # somebody reads from it
    more = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
    return store.images.describe(rows[0]) + more


@dataclass(frozen=True)
class _Place:
    """What a process that was forked works with."""

    store: Store
    memory: mmap.mmap
    slot_bytes: int
    cut: np.ndarray
    unwanted: np.ndarray


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
        place.cut[slot] += 1
        if place.unwanted[slot]:
            break
    return shapes
