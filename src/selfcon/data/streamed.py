"""A split whose images are read while the device works: for what does not fit there, or is larger than what is seen.

Threads decode a few batches ahead (decoding leaves Python's lock), cut out what the views will see, and lay it into one
pinned array a batch; resizing with antialias, mirroring and colours happen on the device, all images at once. What was
decoded stays in main memory as long as there is room. N samples, B in a batch, V views, S output side.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import functional as tvf

from selfcon.data import scan
from selfcon.data.augment import augment, augment_colours, normalise
from selfcon.data.images import Pixels, middle
from selfcon.data.orders import draw_order
from selfcon.data.parts import WHOLE, Part
from selfcon.data.policies import Draws, Policy, draw, join_draws
from selfcon.data.resident import measure_statistics
from selfcon.data.source import FileImages, Images
from selfcon.data.split import Batch, Split, cut
from selfcon.errors import BadImageError, HungError, UsageError
from selfcon.memory import free_memory

_AHEAD = 3  # batches
_STATISTICS = 1024  # images that mean and deviation are measured on
_SAMPLED = 64  # images whose contents are part of the fingerprint
_LARGEST_CROP = 3  # times the output side; what is larger is made small before it travels
_EVALUATED = 256 / 224  # the shorter side over what is cut out of its middle


class Store:
    """Decoded images by their number, as many as a budget of bytes allows."""

    def __init__(self, images: Images, budget: int) -> None:
        self.images, self.budget, self.used = images, budget, 0
        self._kept: dict[int, Pixels] = {}
        self._lock = threading.Lock()

    def __getitem__(self, index: int) -> Pixels:
        kept = self._kept.get(index)
        if kept is not None:
            return kept
        pixels = self.images[index]
        with self._lock:
            if index not in self._kept and self.used + pixels.nbytes <= self.budget:
                self._kept[index] = pixels
                self.used += pixels.nbytes
        return pixels


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
        if isinstance(images, FileImages):
            for row in rows:
                path = images.paths[row]
                digest.update(f"{path.parent.name}/{path.name} {_size_of(path)}\n".encode())
        for place in np.linspace(0, len(rows) - 1, min(_SAMPLED, len(rows))).astype(int):
            pixels = self.images[rows[place]]
            digest.update(str(pixels.shape).encode() + np.ascontiguousarray(pixels).tobytes())
        return digest.hexdigest()

    def describe_place(self) -> str:
        return (
            f"{len(self):,} training images are read from disk while training; up to "
            f"{self.images.budget / 1e9:,.0f} GB of them stay in main memory"
        )

    def finds_room(self) -> bool:
        """Whether all images can stay in main memory once they are decoded, judged by some."""
        some = np.linspace(0, len(self) - 1, min(16, len(self))).astype(int)
        mean = np.mean([self.images[int(self.rows[place])].nbytes for place in some])
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
        maker = _Maker(self, policy, seed=seed, epoch=epoch, views=views, size=size or self.size)
        assembled = _ahead(wanted, maker.read, maker.assemble)
        yield from beside(map(maker.finish, assembled), self.device)


@dataclass(frozen=True)
class _Assembled:
    """What the views of a batch are made of: pixels [V·B, h, w, 3], uint8, and the draws, whose crops begin at 0, 0."""

    samples: Tensor
    pixels: Tensor
    draws: Draws | None


class _Maker:
    """The way of a batch: read image by image, assembled as a batch, finished on the device."""

    def __init__(self, data: Streamed, policy: Policy, *, seed: int, epoch: int, views: int, size: int) -> None:
        self.data, self.policy, self.size = data, policy, size
        self.seed, self.epoch, self.views = seed, epoch, views

    def read(self, sample: int) -> Pixels:
        """In a thread: the image, or where nothing is drawn, what is seen of it."""
        pixels = self.data.images[int(self.data.rows[sample % len(self.data)])]
        return pixels if self.policy.crop_and_flip else fit(pixels, self.size)

    def assemble(self, samples: Tensor, images: Sequence[Pixels]) -> _Assembled:
        """In a thread: what the views see, in one array that a GPU can fetch by itself."""
        pin = self.data.device.type == "cuda"
        samples = samples.pin_memory() if pin else samples
        if not images:
            return _Assembled(samples, torch.empty(0, self.size, self.size, 3, dtype=torch.uint8), None)
        if not self.policy.crop_and_flip:
            pixels = torch.empty((len(images), self.size, self.size, 3), dtype=torch.uint8, pin_memory=pin)
            pixels.numpy()[:] = images
            draws = None
            if self.policy.colour:
                draws = join_draws([self._draw(samples, self.size, self.size, view) for view in range(self.views)])
                draws = draws.pin() if pin else draws
            return _Assembled(samples, pixels if self.views == 1 else pixels.repeat(self.views, 1, 1, 1), draws)
        heights, widths = (torch.tensor([image.shape[axis] for image in images]) for axis in (0, 1))
        draws = join_draws([self._draw(samples, heights, widths, view) for view in range(self.views)])
        crops = [
            self._crop(image, draws, view * len(images) + row)
            for view in range(self.views)
            for row, image in enumerate(images)
        ]
        height, width = (max(crop.shape[axis] for crop in crops) for axis in (0, 1))
        # Sizes in steps, so that the device's memory is used again.
        height, width = (-(-side // 32) * 32 for side in (height, width))
        pixels = torch.empty((len(crops), height, width, 3), dtype=torch.uint8, pin_memory=pin)
        array = pixels.numpy()
        for row, crop in enumerate(crops):
            array[row, : crop.shape[0], : crop.shape[1]] = crop
        begin = torch.zeros_like(draws.top)
        sizes = torch.tensor([crop.shape[:2] for crop in crops])
        draws = replace(draws, top=begin, left=begin, height=sizes[:, 0], width=sizes[:, 1])
        return _Assembled(samples, pixels, draws.pin() if pin else draws)

    def finish(self, assembled: _Assembled) -> Batch:
        """On the device: the batch as the network sees it."""
        own = assembled.samples.to(self.data.device, non_blocking=True) % len(self.data)
        return Batch(self._see(assembled), self.data.labels[own], own)

    def _see(self, assembled: _Assembled) -> Tensor:
        device = self.data.device
        images = assembled.pixels.to(device, non_blocking=True).permute(0, 3, 1, 2)
        if assembled.draws is None:
            return normalise(images.float() / 255, self.data.mean, self.data.std)
        draws = assembled.draws.to(device)
        seen = augment(images, replace(self.policy, colour=False), draws, self.size)
        colour = _finish_compiled() if device.type == "cuda" else _finish
        return colour(seen, self.policy, draws, self.data.mean, self.data.std)

    def _draw(self, samples: Tensor, height: int | Tensor, width: int | Tensor, view: int) -> Draws:
        return draw(self.policy, samples, height=height, width=width, seed=self.seed, epoch=self.epoch, view=view)

    def _crop(self, image: Pixels, draws: Draws, row: int) -> Pixels:
        top, left = int(draws.top[row]), int(draws.left[row])
        crop = image[top : top + int(draws.height[row]), left : left + int(draws.width[row])]
        if max(crop.shape[:2]) <= _LARGEST_CROP * self.size:
            return crop
        small = tvf.resize(_as_tensor(crop), [self.size, self.size], antialias=True)
        return np.asarray(small.permute(1, 2, 0).numpy())


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
) -> Streamed:
    """A split that is read while it is used; statistics are measured on some of its images, or those of `like`.

    `budget` is how many bytes of decoded images may stay in main memory: a third of what is free, unless it is given.
    """
    if budget is None:
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
    return Streamed(store, rows, labels, mean.to(device), std.to(device), size, images.may_flip)


def resize_to(size: int) -> int:
    """What the shorter side is brought to before the middle is cut out."""
    return round(size * _EVALUATED)


def fit(image: Pixels, size: int) -> Pixels:
    """What is seen of an image where nothing is drawn: its middle, 224 of 256 parts of the shorter side."""
    if image.shape[:2] == (size, size):
        return image
    resized = tvf.resize(_as_tensor(middle(image)), [resize_to(size)], antialias=True)
    return np.asarray(tvf.center_crop(resized, [size, size]).permute(1, 2, 0).numpy())


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise BadImageError(f"{path} cannot be read: {error.strerror}.") from error


def _as_tensor(image: Pixels) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def beside(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """The same batches; a GPU makes each while it works on the one before, and is never more than that ahead."""
    if device.type != "cuda":
        yield from batches
        return
    own = torch.cuda.Stream(device, priority=-1)
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


def _ahead(
    wanted: Sequence[Tensor],
    read: Callable[[int], Pixels],
    assemble: Callable[[Tensor, Sequence[Pixels]], _Assembled],
) -> Iterator[_Assembled]:
    """What is assembled of each batch of samples, in order, some batches ahead of whoever asks."""
    readers = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="read")
    assemblers = ThreadPoolExecutor(2, thread_name_prefix="assemble")
    waiting: deque[Future[_Assembled]] = deque()
    hung = False

    def prepare(samples: Tensor, images: list[Future[Pixels]]) -> _Assembled:
        return assemble(samples, [_wait(image, int(sample)) for sample, image in zip(samples, images, strict=True)])

    try:
        for samples in wanted:
            images = [readers.submit(read, sample) for sample in samples.tolist()]
            waiting.append(assemblers.submit(prepare, samples, images))
            if len(waiting) > _AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except HungError:
        hung = True
        raise
    finally:
        for pool in (readers, assemblers):
            pool.shutdown(wait=not hung, cancel_futures=True)


def _wait(image: Future[Pixels], sample: int) -> Pixels:
    """One image, unless nothing comes of it for too long; those before it were waited for already."""
    try:
        return image.result(scan.PATIENCE)
    except TimeoutError as error:
        if image.done():
            raise
        raise HungError(f"Nothing came of sample {sample} in {scan.PATIENCE:.0f} seconds.") from error
