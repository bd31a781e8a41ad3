"""From whatever people call an image to what the network was shown in training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from selfcon.data import cutting, resident
from selfcon.data.images import Pixels, decode, from_pillow, read_image
from selfcon.errors import UsageError

Picture = str | Path | bytes | BinaryIO | Pixels | Tensor | Image.Image
"""A file, one that is open, its contents, uint8 pixels [H, W, 3] or [H, W], Pillow's image, or a tensor [3, H, W].

Grey ones may be [H, W, 1] and [1, H, W], too.

Tensors are uint8, or floating point from 0 to 1, as torchvision makes them.
"""


def read_picture(picture: Picture) -> Pixels:
    """The pixels [H, W, 3]; BadImageError for files that are none."""
    if isinstance(picture, str | Path):
        return read_image(Path(picture))
    if isinstance(picture, bytes) or hasattr(picture, "read"):
        return decode(Path("The image"), picture if isinstance(picture, bytes) else picture.read()).pixels
    if isinstance(picture, Image.Image):
        return from_pillow(picture)
    return _as_pixels(picture)


def _as_pixels(picture: Any) -> Pixels:
    floating = isinstance(picture, Tensor) and picture.is_floating_point()
    kind = str(picture.dtype).removeprefix("torch.") if isinstance(picture, Tensor) else None
    picture = picture.float() if floating else picture  # NumPy has no bfloat16
    array = picture.numpy(force=True) if isinstance(picture, Tensor) else np.asarray(picture)
    given = f"{kind or array.dtype} {list(array.shape)}"
    if floating and array.size:
        if not (array.min() >= 0 and array.max() <= 1):
            raise UsageError(f"A floating-point tensor is an image where its values are 0 to 1, which {given} are not.")
        array = (array * 255).round().astype(np.uint8)
    if isinstance(picture, Tensor) and array.ndim == 3 and array.shape[0] in (1, 3):
        array = array.transpose(1, 2, 0)
    if array.ndim == 2:
        array = array[:, :, None]
    if array.ndim == 3 and array.shape[2] == 1:
        array = np.repeat(array, 3, axis=2)
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3 or not array.size:
        raise UsageError(f"An image is a file, uint8 pixels [H, W, 3] or a tensor [3, H, W], not {given}.")
    return array


@dataclass(frozen=True)
class Eye:
    """How a model sees: its image side, its statistics, and whether it was trained on images read from disk."""

    size: int
    mean: Tensor
    std: Tensor
    streamed: bool

    @classmethod
    def of(cls, facts: dict[str, Any], device: torch.device) -> Eye:
        mean, std = (torch.tensor(facts[key], device=device) for key in ("mean", "std"))
        return cls(int(facts["image_size"]), mean, std, bool(facts.get("streamed")))

    @property
    def part(self) -> float:
        """How much of an image's shorter side is seen, where it is not of just that size."""
        return cutting.part_seen(self.size, streamed=self.streamed)

    def crop(self, pixels: Pixels) -> Pixels:
        """What is seen of an image, [S, S, 3]: as in the evaluation of the run."""
        return (cutting.fit if self.streamed else resident.fit)(pixels, self.size)

    def stack(self, crops: Sequence[Pixels]) -> Tensor:
        """Cut-out images as one normalised batch [B, 3, S, S]."""
        pixels = torch.from_numpy(np.stack(crops)).to(self.mean.device)
        seen = pixels.float().mul_(1 / (255 * self.std)).sub_(self.mean / self.std)  # channels last, as it lies there
        return seen.permute(0, 3, 1, 2)
