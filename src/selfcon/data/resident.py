"""A data set that stays on a device as uint8: batches are picked by index and augmented there, all at once.

The order and every draw follow from (seed, epoch, sample, view), so that a batch is the same wherever and whenever it
is made. N samples, B in a batch, V views, S output side.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import functional as tvf

from selfcon.data.images import Pixels, middle
from selfcon.data.orders import draw_order
from selfcon.data.parts import WHOLE, Part, all_agree, exchange, raise_together, sum_of_all, told_by_first
from selfcon.data.policies import Policy
from selfcon.data.scan import in_threads
from selfcon.data.source import ArrayImages, Images
from selfcon.data.split import Batch, Split, cut
from selfcon.data.views import Look, make_views
from selfcon.errors import UsageError
from selfcon.memory import free_memory
from selfcon.progress import track


@dataclass(frozen=True)
class Resident(Split):
    """All images of a split on one device, and the statistics that normalise them.

    Where they do not fit, they are spread over several processes: `pixels` are then those of the samples rank,
    rank + size, ..., and batches must be asked for by all processes alike.
    """

    pixels: Tensor  # [N, 3, H, W] uint8; in main memory where the device of the rest has no room for them
    labels: Tensor  # [N] int64
    mean: Tensor  # [3], of pixels in [0, 1]
    std: Tensor
    may_flip: bool = True
    spread: Part | None = None
    sha256: str | None = None  # of all images, where no process alone could tell

    @property
    def stored_bytes(self) -> int:
        return self.pixels.numel()

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
        order = draw_order(self.labels, seed=seed, epoch=epoch, balanced=balanced, device=self._order_device)
        for samples in cut(order, batch_size)[first:]:
            yield self._batch(part.split(samples), part, policy, seed=seed, epoch=epoch, views=views, size=size)

    def plain_batches(self, *, batch_size: int, size: int | None = None, part: Part = WHOLE) -> Iterator[Batch]:
        shares = [cut(share, batch_size) for share in part.split(torch.arange(len(self), device=self._order_device))]
        rounds = max(map(len, shares)) if self.spread else len(shares[part.rank])
        for number in range(rounds):
            wanted = [share[number] if number < len(share) else share[0][:0] for share in shares]
            batch = self._batch(wanted, part, Policy(), seed=0, epoch=0, size=size)
            if len(batch.samples) or number == 0:  # a share without samples is one empty batch
                yield batch

    def batch(
        self, samples: Tensor, policy: Policy, *, seed: int, epoch: int, views: int = 1, size: int | None = None
    ) -> Batch:
        """The batch of any samples [B]; not where images are spread."""
        return self._batch([samples], WHOLE, policy, seed=seed, epoch=epoch, views=views, size=size)

    def take(self, samples: Tensor) -> Resident:
        """Those samples [B] alone, never spread."""
        if self.spread:
            stored = exchange(self.pixels, [samples.cpu()] * self.spread.size, self.spread, self.device)
        else:
            stored = self.pixels[samples.to(self.pixels.device)]
        return replace(self, pixels=stored, labels=self.labels[samples], spread=None, sha256=None)

    def pictures(self, samples: Tensor) -> Tensor:
        return self.take(samples).pixels.cpu()

    def describe_place(self) -> str:
        if self.device.type == "cpu" and not self.spread:
            return ""
        place = "on the GPU" if self.pixels.is_cuda else "in main memory"
        if self.pixels.device != self.device:
            place += ", since the GPU has no room for them"
        if self.spread:
            place += f", spread over {self.spread.size} processes"
        return f"{len(self):,} training images, {self.pixels.numel() / 1e6:,.0f} MB here, stay {place}"

    def fingerprint(self) -> str:
        """SHA-256 of all pixels and labels, in order; of images that are spread, once all processes ask for it."""
        if self.sha256 is not None:
            return self.sha256
        digest = hashlib.sha256(str((len(self), *self.pixels.shape[1:])).encode())
        digest.update(self.labels.cpu().numpy().tobytes())
        for samples in torch.arange(len(self)).split(4096):
            pixels = self.pixels[int(samples[0]) : int(samples[-1]) + 1]
            if self.spread:  # the first process does it for all
                wanted = [samples, *[samples[:0]] * (self.spread.size - 1)]
                pixels = exchange(self.pixels, wanted, self.spread, self.device)
            digest.update(pixels.cpu().numpy().tobytes())
        return told_by_first(digest.hexdigest()) if self.spread else digest.hexdigest()

    @property
    def _order_device(self) -> torch.device:
        """Where it must be known which samples a batch holds."""
        return torch.device("cpu") if self.spread else self.device

    def _fetch(self, samples: Tensor, wanted: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Images on the device of batches, and which of them are `samples`; `wanted` are those of all processes."""
        if self.spread:
            stored = exchange(self.pixels, [each % len(self) for each in wanted], self.spread, self.device)
        elif self.pixels.device != self.device:
            stored = self.pixels[samples.to(self.pixels.device)].pin_memory().to(self.device, non_blocking=True)
        else:
            return self.pixels, samples
        return stored, torch.arange(len(samples), device=self.device)

    def _batch(
        self,
        wanted: Sequence[Tensor],
        part: Part,
        policy: Policy,
        *,
        seed: int,
        epoch: int,
        views: int = 1,
        size: int | None = None,
    ) -> Batch:
        """The batch of the samples [B] that this process wants, each view with a draw of its own."""
        policy = policy if self.may_flip else replace(policy, flip_probability=0.0)
        look = Look(
            policy=policy,
            mean=self.mean,
            std=self.std,
            size=size or self.pixels.shape[2],
            seed=seed,
            epoch=epoch,
            views=views,
        )
        numbers = wanted[part.rank].to(self.device)
        samples = numbers % len(self)
        stored, rows = self._fetch(samples, wanted)
        if not len(samples):
            return Batch(self.mean.new_empty(0, 3, look.size, look.size), self.labels[samples], samples)
        return Batch(make_views(stored, rows, numbers, look), self.labels[samples], samples)


def make_resident(
    images: Images,
    *,
    size: int | None = None,
    device: torch.device | str = "cpu",
    like: Split | None = None,
    part: Part = WHOLE,
) -> Resident:
    """Decode a split onto a device; images of other sizes get their shorter side resized to `size`, the rest cut off.

    Statistics are those of the images themselves, or of the split that this one is to be `like`: a test set follows
    its training set. Where all images do not fit each of several processes, they are spread over them.
    """
    device = torch.device(device)
    labels = torch.from_numpy(images.labels).to(device)
    side = size or (images.shape or (0, 0))[0]
    spread = part.size > 1 and not all_agree(has_room(device, 3 * side * side * len(images)), device)
    if spread:
        images = images.take(np.arange(part.rank, len(images), part.size))
    with raise_together() if spread else nullcontext():
        array = _decode(images, size)
    place = device if device.type != "cuda" or has_room(device, array.nbytes) else torch.device("cpu")
    stored = torch.empty((len(array), 3, *array.shape[1:3]), dtype=torch.uint8, device=place)
    for first in range(0, len(array), 4096):  # in parts, so that no second copy is needed
        stored[first : first + 4096] = torch.from_numpy(array[first : first + 4096]).to(place).permute(0, 3, 1, 2)
    if like is not None:
        mean, std = like.mean, like.std
    else:
        counts = _count(stored)
        mean, std = _measure(sum_of_all(counts, device) if spread else counts)
    data = Resident(stored, labels, mean.to(device), std.to(device), images.may_flip, part if spread else None)
    return replace(data, sha256=data.fingerprint()) if spread else data


def _decode(images: Images, size: int | None) -> Pixels:
    """All images, [N, S, S, 3]."""
    height, width = images.shape or (0, -1)
    size = size or (height if height == width else None)
    if size is None:
        raise UsageError("These images are not all squares of one size: say which size to bring them to.")
    if type(images) is ArrayImages and height == width == size:  # those that build on it may index as they like
        return images.as_array()
    array = np.empty((len(images), size, size, 3), np.uint8)
    fitted = in_threads(lambda index: fit(images[index], size), range(len(images)), describe=images.describe)
    for index, pixels in enumerate(track(fitted, "Decoding", len(images))):
        array[index] = pixels
    return array


def has_room(device: torch.device, wanted: int) -> bool:
    """Whether so many bytes can stay on a device and leave it at least as much for training."""
    if device.type == "cuda":
        return 2 * wanted <= torch.cuda.mem_get_info(device)[0]
    return 2 * wanted * int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= free_memory()


def measure_statistics(pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the channels of images [N, 3, H, W], uint8, as parts of 1."""
    return _measure(_count(pixels))


def _count(pixels: Tensor) -> Tensor:
    """How often each channel of [N, 3, H, W] has each value: [3, 256]."""
    counts = torch.zeros(3, 256, dtype=torch.float64)
    for part in pixels.split(4096):  # counting needs 8 bytes a pixel for a while
        for channel, values in enumerate(part.unbind(1)):
            counts[channel] += torch.bincount(values.flatten().long(), minlength=256).cpu()
    return counts


def _measure(counts_CV: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel in [0, 1], exactly."""
    values = torch.arange(256, dtype=torch.float64) / 255
    means, deviations = [], []
    for counts in counts_CV:
        mean = (counts * values).sum() / counts.sum()
        means.append(mean)
        deviations.append(((counts * (values - mean) ** 2).sum() / counts.sum()).sqrt())
    # A channel of one value has no deviation; dividing by 1 leaves it at 0.
    std = torch.stack(deviations)
    return torch.stack(means).float(), torch.where(std > 0, std, 1.0).float()


def fit(pixels: Pixels, size: int) -> Pixels:
    """What is seen of an image: its middle, as large a square as there is."""
    if pixels.shape[:2] == (size, size):
        return np.array(pixels)
    image = torch.from_numpy(np.array(middle(pixels))).permute(2, 0, 1)
    resized = tvf.center_crop(tvf.resize(image, [size], antialias=True), [size, size])
    return np.asarray(resized.permute(1, 2, 0).numpy())
