"""A split whose images are read while the device works: for what does not fit there, or is larger than what is seen.

Readers decode a few batches ahead and cut out what the views will see; it is laid into one pinned array a batch;
resizing with antialias, mirroring and colours happen on the device, all images at once. What was decoded stays in main
memory as long as there is room. N samples, B in a batch, V views, S output side.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from typing import Self

import numpy as np
import torch
from torch import Tensor

from selfcon.data import scan
from selfcon.data.augment import augment, augment_colours, normalise, take_own_step
from selfcon.data.cutting import Cutter, fit
from selfcon.data.draws import Draws
from selfcon.data.images import Pixels
from selfcon.data.orders import draw_order
from selfcon.data.parts import WHOLE, Part
from selfcon.data.policies import Policy
from selfcon.data.readers import Processes, Readers, Reading, Threads, share_of
from selfcon.data.resident import measure_statistics
from selfcon.data.source import Images
from selfcon.data.split import Batch, Split, cut
from selfcon.data.store import Store
from selfcon.errors import HungError, UsageError
from selfcon.memory import count_cores, free_memory

_AHEAD = 3  # batches
_STATISTICS = 1024  # images that mean and deviation are measured on
_SAMPLED = 64  # images whose contents are part of the fingerprint
_LISTED = 256  # files at a time
_WORTH_PROCESSES = 2  # cores


@dataclass(frozen=True)
class Streamed(Split):
    """The images of a split in their files, read when a batch wants them."""

    images: Store
    rows: Tensor  # [N] which of the images count, on the CPU
    labels: Tensor
    mean: Tensor
    std: Tensor
    size: int
    may_flip: bool = True
    workers: int = 0  # processes that read; 0 is threads of this one

    @property
    def stored_bytes(self) -> int:
        return self.images.used

    def batches(
        self,
        policy: Policy,
        *,
        batch_size: int,
        seed: int,
        epoch: int,
        views: int = 1,
        size: int | None = None,
        first: int = 0,
        part: Part = WHOLE,
        balanced: bool = False,
    ) -> Iterator[Batch]:
        order = draw_order(self.labels, seed=seed, epoch=epoch, balanced=balanced, device="cpu")
        wanted = [part.split(samples)[part.rank] for samples in cut(order, batch_size)[first:]]
        return self._stream(wanted, policy, seed=seed, epoch=epoch, views=views, size=size)

    def plain_batches(self, *, batch_size: int, size: int | None = None, part: Part = WHOLE) -> Iterator[Batch]:
        share = part.split(torch.arange(len(self)))[part.rank]
        return self._stream(cut(share, batch_size), Policy(), seed=0, epoch=0, views=1, size=size)

    def batch(
        self, samples: Tensor, policy: Policy, *, seed: int, epoch: int, views: int = 1, size: int | None = None
    ) -> Batch:
        return next(self._stream([samples.cpu()], policy, seed=seed, epoch=epoch, views=views, size=size))

    def take(self, samples: Tensor) -> Self:
        return replace(self, rows=self.rows[samples.cpu()], labels=self.labels[samples.to(self.device)])

    def pictures(self, samples: Tensor) -> Tensor:
        if not len(samples):
            return torch.empty(0, 3, self.size, self.size, dtype=torch.uint8)
        shown = scan.in_threads(lambda row: fit(self.images[row], self.size), self.rows[samples.cpu()].tolist())
        return torch.from_numpy(np.stack(list(shown))).permute(0, 3, 1, 2)

    def fingerprint(self) -> str:
        """SHA-256 of labels, names and sizes of all files, and of the contents of some images."""
        images = self.images.images
        digest = hashlib.sha256(self.labels.cpu().numpy().tobytes())
        rows = self.rows.tolist()
        several = [rows[start : start + _LISTED] for start in range(0, len(rows), _LISTED)]
        for lines in scan.in_threads(images.list_files, several, describe=lambda part: images.describe(part[0])):
            digest.update(lines)
        some = [rows[place] for place in np.linspace(0, len(rows) - 1, min(_SAMPLED, len(rows))).astype(int)]
        for pixels in self._look(some):
            digest.update(str(pixels.shape).encode() + np.ascontiguousarray(pixels).tobytes())
        return digest.hexdigest()

    def _look(self, rows: Sequence[int]) -> Iterator[Pixels]:
        return scan.in_threads(self.images.__getitem__, rows, describe=self.images.images.describe)

    def describe_place(self) -> str:
        kept = f"; up to {self.images.budget / 1e9:,.0f} GB of them stay in main memory" if self.images.budget else ""
        return f"{len(self):,} training images are read from disk while training{kept}"

    def finds_room(self) -> bool:
        """Whether all images can stay in main memory once they are decoded, judged by some; or need no decoding."""
        if not self.images.images.encoded:
            return True
        some = self.rows[np.linspace(0, len(self) - 1, min(16, len(self))).astype(int)].tolist()
        mean = np.mean([pixels.nbytes for pixels in self._look(some)])
        return bool(mean * len(self) <= self.images.budget)

    def _stream(
        self, wanted: Sequence[Tensor], policy: Policy, *, seed: int, epoch: int, views: int, size: int | None
    ) -> Iterator[Batch]:
        """A batch for each of these samples [B], a few of them in the making while one is used."""
        if policy.randaugment:
            raise UsageError("RandAugment is for images that stay in memory: --stream false keeps them there.")
        if views < 1:
            raise UsageError(f"A sample has at least one view, not {views}.")
        policy = policy if self.may_flip else replace(policy, flip_probability=0.0)
        # A step of one's own may be anything, and does not travel to readers.
        maker = _Maker(self, Cutter(replace(policy, then=None), seed, epoch, views, size or self.size), policy)
        yield from beside(map(maker.finish, self._read_ahead(wanted, maker)), self.device)

    def _read_ahead(self, wanted: Sequence[Tensor], maker: _Maker) -> Iterator[_Assembled]:
        """What is assembled of each batch of samples, in order, some batches ahead of whoever asks."""
        readers = self._choose_readers(max((len(samples) for samples in wanted), default=0), maker.cutter)
        assemblers = ThreadPoolExecutor(2, thread_name_prefix="assemble")
        waiting: deque[tuple[list[Reading], Future[_Assembled]]] = deque()
        hung = False

        def finish_one() -> _Assembled:
            readings, future = waiting.popleft()
            try:
                return future.result()
            finally:
                for reading in readings:
                    reading.release()

        try:
            for samples in wanted:
                readings = [
                    readers.read(maker.cutter, self.rows[part % len(self)].tolist(), part.tolist())
                    for part in samples.split(readers.share(len(samples)))
                    if len(part)
                ]
                waiting.append((readings, assemblers.submit(maker.assemble, samples, readings)))
                if len(waiting) > _AHEAD:
                    yield finish_one()
            while waiting:
                yield finish_one()
        except HungError:
            hung = True
            raise
        finally:
            for readings, _ in waiting:
                for reading in readings:
                    reading.release()
            assemblers.shutdown(wait=not hung, cancel_futures=True)
            if not isinstance(readers, Processes) or hung:
                readers.close(wait=not hung)

    def _choose_readers(self, batch_size: int, cutter: Cutter) -> Readers:
        if not self.workers or not batch_size:
            return Threads(self.images)
        share = share_of(batch_size, self.workers)
        slots = (_AHEAD + 2) * -(-batch_size // share)
        return _processes(self.images, self.workers, slots, share * cutter.drawn_views * cutter.most_bytes)


@dataclass(frozen=True)
class _Assembled:
    """What the views of a batch are made of: pixels [V·B, h, w, 3], uint8, and the draws, whose crops begin at 0, 0."""

    samples: Tensor
    pixels: Tensor
    draws: Draws | None


class _Maker:
    """The way of a batch: cut out image by image, assembled as a batch, finished on the device."""

    def __init__(self, data: Streamed, cutter: Cutter, policy: Policy) -> None:
        self.data, self.cutter, self.policy = data, cutter, policy

    def assemble(self, samples: Tensor, readings: Sequence[Reading]) -> _Assembled:
        """In a thread: what the views see, in one array that a GPU can fetch by itself."""
        policy, size, views = self.cutter.policy, self.cutter.size, self.cutter.drawn_views
        pin = self.data.device.type == "cuda"
        samples = samples.pin_memory() if pin else samples
        parts = [reading.wait() for reading in readings]
        crops: list[Pixels] = []
        for view in range(views):
            for part in parts:
                crops += part[view::views]
        if not crops:
            return _Assembled(samples, torch.empty(0, size, size, 3, dtype=torch.uint8), None)
        height, width = (max(crop.shape[axis] for crop in crops) for axis in (0, 1))
        if policy.crop_and_flip:  # sizes in steps, so that the device's memory is used again
            height, width = (-(-side // 32) * 32 for side in (height, width))
        pixels = torch.empty((len(crops), height, width, 3), dtype=torch.uint8, pin_memory=pin)
        array = pixels.numpy()
        for row, crop in enumerate(crops):
            array[row, : crop.shape[0], : crop.shape[1]] = crop
        if views < self.cutter.views:
            pixels = pixels.repeat(self.cutter.views, 1, 1, 1)
        if not policy.crop_and_flip and not policy.colour:
            return _Assembled(samples, pixels, None)
        draws = self.cutter.draw(samples, size, size)
        if policy.crop_and_flip:
            begin, sizes = torch.zeros_like(draws.top), torch.tensor([crop.shape[:2] for crop in crops])
            draws = replace(draws, top=begin, left=begin, height=sizes[:, 0], width=sizes[:, 1])
        return _Assembled(samples, pixels, draws.pin() if pin else draws)

    def finish(self, assembled: _Assembled) -> Batch:
        """On the device: the batch as the network sees it."""
        numbers = assembled.samples.to(self.data.device, non_blocking=True)
        own, mean, std, cutter = numbers % len(self.data), self.data.mean, self.data.std, self.cutter
        if self.policy.then is None:
            seen = self._see(assembled, mean, std)
        else:
            seen = self._see(assembled, torch.zeros_like(mean), torch.ones_like(std))
            drawn = {"seed": cutter.seed, "epoch": cutter.epoch, "views": cutter.views}
            seen = normalise(take_own_step(seen, self.policy, numbers, **drawn), mean, std)
        return Batch(seen, self.data.labels[own], own)

    def _see(self, assembled: _Assembled, mean: Tensor, std: Tensor) -> Tensor:
        device, policy = self.data.device, self.cutter.policy
        images = assembled.pixels.to(device, non_blocking=True).permute(0, 3, 1, 2)
        if assembled.draws is None:
            return normalise(images.float() / 255, mean, std)
        draws = assembled.draws.to(device)
        seen = augment(images, replace(policy, colour=False), draws, self.cutter.size)
        colour = _finish_compiled() if device.type == "cuda" else _finish
        return colour(seen, policy, draws, mean, std)


def _finish(seen: Tensor, policy: Policy, draws: Draws, mean: Tensor, std: Tensor) -> Tensor:
    """The colours of cut-out images [B, 3, S, S] in [0, 1], normalised."""
    return normalise(augment_colours(seen, policy, draws), mean, std)


@cache
def _finish_compiled() -> Callable[[Tensor, Policy, Draws, Tensor, Tensor], Tensor]:
    return torch.compile(_finish, dynamic=False) if find_spec("triton") else _finish


def make_streamed(
    images: Images,
    *,
    size: int,
    device: torch.device | str = "cpu",
    like: Split | None = None,
    budget: int | None = None,
    workers: int | None = None,
) -> Streamed:
    """A split that is read while it is used; statistics are measured on some of its images, or those of `like`.

    `budget` is how many bytes of decoded images may stay in main memory: a third of what is free, unless it is given,
    and none where nothing must be decoded.
    `workers` are processes that read: unless they are given, one for each core where images must be decoded for a GPU.
    """
    if not images.encoded:
        budget = 0
    elif budget is None:
        budget = free_memory() // (3 * int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    device = torch.device(device)
    store, rows = Store(images, budget), torch.arange(len(images))
    labels = torch.from_numpy(images.labels).to(device)
    if like is None:
        some = np.linspace(0, len(images) - 1, min(_STATISTICS, len(images))).astype(int).tolist()
        seen = scan.in_threads(lambda row: fit(store[row], size), some, describe=images.describe)
        mean, std = measure_statistics(torch.from_numpy(np.stack(list(seen))).permute(0, 3, 1, 2))
    else:
        mean, std = like.mean, like.std
    if workers is None:
        cores = count_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        workers = cores if device.type == "cuda" and images.encoded and cores >= _WORTH_PROCESSES else 0
    return Streamed(store, rows, labels, mean.to(device), std.to(device), size, images.may_flip, workers)


def _processes(store: Store, count: int, slots: int, slot_bytes: int) -> Processes:
    """The processes that read a store, which stay for as long as it does, unless more is wanted of them."""
    found: Processes | None = store.helpers[0] if store.helpers else None
    if found is not None and found.fits(slots, slot_bytes):
        return found
    if found is None:
        weakref.finalize(store, _end_all, store.helpers)
    else:
        found.close(wait=False)  # who uses them still goes on alone
        slots, slot_bytes = max(slots, found.slots), max(slot_bytes, found.slot_bytes)
    store.helpers[:] = [Processes(store, count, slots, slot_bytes)]
    return store.helpers[0]  # type: ignore[no-any-return]


def _end_all(helpers: list[Processes]) -> None:
    for each in helpers:
        each.close(wait=False)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all batches that are ever made: what PyTorch keeps of a stream's memory is not used by another."""
    return torch.cuda.Stream(device, priority=-1)


def beside(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """The same batches; a GPU makes each while it works on the one before, and is never more than that ahead."""
    if device.type != "cuda":
        yield from batches
        return
    own = _side_stream(device)
    own.wait_stream(torch.cuda.current_stream(device))
    used: deque[torch.cuda.Event] = deque()
    while True:
        if len(used) > 1:
            used.popleft().synchronize()
        with torch.cuda.stream(own):
            batch = next(batches, None)
        if batch is None:
            return
        user = torch.cuda.current_stream(device)
        user.wait_stream(own)
        for each in (batch.images, batch.labels, batch.samples):
            each.record_stream(user)
        yield batch
        used.append(torch.cuda.current_stream(device).record_event())
