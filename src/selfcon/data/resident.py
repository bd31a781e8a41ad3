"""A data set that stays on a device as uint8: batches are picked by index and augmented there, all at once.

The order and every draw follow from (seed, epoch, sample, view), so that a batch is the same wherever and whenever it
is made. N samples, B in a batch, V views, S output side.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import functional as tvf

from selfcon.data.images import Pixels
from selfcon.data.policies import Policy
from selfcon.data.random import permute
from selfcon.data.scan import in_threads
from selfcon.data.source import ArrayImages, Images
from selfcon.data.views import Look, make_views
from selfcon.errors import UsageError
from selfcon.progress import track


@dataclass(frozen=True)
class Batch:
    """Augmented and normalised images [V·B, 3, S, S], all of view 1 first; labels [B]; samples [B] in the data set."""

    images: Tensor
    labels: Tensor
    samples: Tensor


@dataclass(frozen=True)
class Resident:
    """All images of a split on one device, and the statistics that normalise them."""

    pixels: Tensor  # [N, 3, H, W] uint8; in main memory where the device of the rest has no room for them
    labels: Tensor  # [N] int64
    mean: Tensor  # [3], of pixels in [0, 1]
    std: Tensor
    may_flip: bool = True

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def device(self) -> torch.device:
        """Where batches are made."""
        return self.labels.device

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
        share: Callable[[Tensor], Tensor] | None = None,
    ) -> Iterator[Batch]:
        """The batches of one epoch in its own order, from number `first` on; the last one may be smaller.

        With `share`, only those of a batch's samples that it picks are made.
        """
        order = permute(len(self), seed=seed, epoch=epoch, device=self.device)
        for samples in _split(order, batch_size)[first:]:
            wanted = samples if share is None else share(samples)
            yield self.batch(wanted, policy, seed=seed, epoch=epoch, views=views, size=size)

    def plain_batches(
        self, *, batch_size: int, size: int | None = None, share: Callable[[Tensor], Tensor] | None = None
    ) -> Iterator[Batch]:
        """All samples, or those that `share` picks, in their stored order, normalised only."""
        every = torch.arange(len(self), device=self.device)
        for samples in _split(every if share is None else share(every), batch_size):
            yield self.batch(samples, Policy(), seed=0, epoch=0, size=size)

    def batch(
        self, samples: Tensor, policy: Policy, *, seed: int, epoch: int, views: int = 1, size: int | None = None
    ) -> Batch:
        """The batch of these samples [B], each view with a draw of its own."""
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
        stored, rows = self.pixels, samples
        if stored.device != self.device:
            stored = stored[samples.to(stored.device)].pin_memory().to(self.device, non_blocking=True)
            rows = torch.arange(len(samples), device=self.device)
        return Batch(make_views(stored, rows, samples, look), self.labels[samples], samples)


def make_resident(
    images: Images,
    *,
    size: int | None = None,
    device: torch.device | str = "cpu",
    like: Resident | None = None,
) -> Resident:
    """Decode a split onto a device; images of other sizes get their shorter side resized to `size`, the rest cut off.

    Statistics are those of the images themselves, or of the split that this one is to be `like`: a test set follows
    its training set.
    """
    height, width = images.shape or (0, -1)
    if isinstance(images, ArrayImages) and height == width and size in (None, height):
        array: Pixels = images.as_array()
    elif size is None:
        raise UsageError("These images are not all squares of one size: say which size to bring them to.")
    else:
        array = np.empty((len(images), size, size, 3), np.uint8)
        fitted = in_threads(lambda index: _fit(images[index], size), range(len(images)))
        for index, pixels in enumerate(track(fitted, "Decoding", len(images))):
            array[index] = pixels
    device = torch.device(device)
    place = device if has_room(device, array.nbytes) else torch.device("cpu")
    stored = torch.empty((len(array), 3, *array.shape[1:3]), dtype=torch.uint8, device=place)
    for first in range(0, len(array), 4096):  # in parts, so that no second copy is needed
        stored[first : first + 4096] = torch.from_numpy(array[first : first + 4096]).to(place).permute(0, 3, 1, 2)
    labels = torch.from_numpy(images.labels).to(device)
    mean, std = (like.mean, like.std) if like is not None else measure(stored)
    return Resident(stored, labels, mean.to(device), std.to(device), images.may_flip)


def has_room(device: torch.device, wanted: int) -> bool:
    """Whether so many bytes can stay on a device and leave it at least as much for training."""
    return device.type != "cuda" or 2 * wanted <= torch.cuda.mem_get_info(device)[0]


def fingerprint(data: Resident) -> str:
    """SHA-256 of all stored pixels and labels, in order."""
    digest = hashlib.sha256(str(tuple(data.pixels.shape)).encode())
    digest.update(data.labels.cpu().numpy().tobytes())
    for part in data.pixels.split(4096):
        digest.update(part.cpu().numpy().tobytes())
    return digest.hexdigest()


def measure(pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel of [N, 3, H, W] in [0, 1], exactly, from counts of the 256 values."""
    values = torch.arange(256, dtype=torch.float64) / 255
    means, deviations = [], []
    for channel in pixels.unbind(1):
        counts = torch.zeros(256, dtype=torch.float64)
        for part in channel.split(4096):  # counting needs 8 bytes a pixel for a while
            counts += torch.bincount(part.flatten().long(), minlength=256).cpu()
        mean = (counts * values).sum() / counts.sum()
        means.append(mean)
        deviations.append(((counts * (values - mean) ** 2).sum() / counts.sum()).sqrt())
    # A channel of one value has no deviation; dividing by 1 leaves it at 0.
    std = torch.stack(deviations)
    return torch.stack(means).float(), torch.where(std > 0, std, 1.0).float()


def _fit(pixels: Pixels, size: int) -> Pixels:
    image = torch.from_numpy(np.array(pixels)).permute(2, 0, 1)
    if image.shape[1:] == (size, size):
        return np.array(pixels)
    resized = tvf.center_crop(tvf.resize(image, [size], antialias=True), [size, size])
    return np.asarray(resized.permute(1, 2, 0).numpy())


def _split(samples: Tensor, batch_size: int) -> Sequence[Tensor]:
    if batch_size < 1:
        raise UsageError(f"A batch holds at least one sample, not {batch_size}.")
    return torch.split(samples, batch_size)
