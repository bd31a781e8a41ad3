"""What views see of decoded images, cut out on the CPU before it travels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import functional as tvf

from selfcon.data.draws import Draws, draw, join_draws
from selfcon.data.images import Pixels, middle
from selfcon.data.policies import Policy
from selfcon.data.store import Store

_LARGEST_CROP = 3  # times the output side; what is larger is made small before it travels
_EVALUATED = 256 / 224  # the shorter side over what is cut out of its middle
_TOGETHER = 8  # images that are decoded at a time


@dataclass(frozen=True)
class Cutter:
    """Which part of an image each of its views sees. Draws depend on the sample alone, so anybody may make them."""

    policy: Policy
    seed: int
    epoch: int
    views: int
    size: int

    @property
    def drawn_views(self) -> int:
        """How many crops there are of an image: where none are drawn, all views see the same."""
        return self.views if self.policy.crop_and_flip else 1

    @property
    def most_bytes(self) -> int:
        """Of one crop."""
        side = _LARGEST_CROP * self.size if self.policy.crop_and_flip else self.size
        return 3 * side * side

    def cut(self, store: Store, rows: Sequence[int], samples: Sequence[int]) -> Iterator[Pixels]:
        """The crops of these samples, whose images are those rows of a store: all views of the first, then the next."""
        for start in range(0, len(rows), _TOGETHER):
            images = [store[row] for row in rows[start : start + _TOGETHER]]
            if not self.policy.crop_and_flip:
                yield from (fit(image, self.size) for image in images)
                continue
            heights, widths = (torch.tensor([image.shape[axis] for image in images]) for axis in (0, 1))
            draws = self.draw(torch.tensor(samples[start : start + _TOGETHER]), heights, widths)
            boxes = torch.stack([draws.top, draws.left, draws.height, draws.width], dim=1).tolist()
            for number, image in enumerate(images):
                yield from (self._crop(image, box) for box in boxes[number :: len(images)])

    def draw(self, samples: Tensor, heights: int | Tensor, widths: int | Tensor) -> Draws:
        """What is drawn for every view of these samples, one view below the other."""
        options = {"height": heights, "width": widths, "seed": self.seed, "epoch": self.epoch}
        return join_draws([draw(self.policy, samples, view=view, **options) for view in range(self.views)])  # type: ignore[arg-type]

    def _crop(self, image: Pixels, box: Sequence[int]) -> Pixels:
        top, left, height, width = box
        crop = image[top : top + height, left : left + width]
        if max(crop.shape[:2]) <= _LARGEST_CROP * self.size:
            return crop
        small = tvf.resize(_as_tensor(crop), [self.size, self.size], antialias=True)
        return np.asarray(small.permute(1, 2, 0).numpy())


def resize_to(size: int) -> int:
    """What the shorter side is brought to before the middle is cut out."""
    return round(size * _EVALUATED)


def part_seen(size: int, *, streamed: bool) -> float:
    """How much of an image's shorter side is seen, where it is not of just that size."""
    return size / resize_to(size) if streamed else 1.0


def fit(image: Pixels, size: int) -> Pixels:
    """What is seen of an image where nothing is drawn: its middle, 224 of 256 parts of the shorter side.

    An image of just that size is seen whole.
    """
    if image.shape[:2] == (size, size):
        return image
    resized = tvf.resize(_as_tensor(middle(image)), [resize_to(size)], antialias=True)
    return np.asarray(tvf.center_crop(resized, [size, size]).permute(1, 2, 0).numpy())


def _as_tensor(image: Pixels) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)
