"""RandAugment without asking who drew what: every operation is computed for all images, and each takes its own.

On a GPU that is cheaper than `randaugment`, where the host waits for the numbers of those that drew alike. A choice is
an operation and its sign. B images of H x W.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torchvision.transforms.functional as tvf
from torch import Tensor
from torch.nn.functional import avg_pool2d

from selfcon.data.policies import RANDAUGMENT_OPERATIONS
from selfcon.data.randaugment import OPERATIONS, Strength

_MOVES = ("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate")
_BLENDS = ("Brightness", "Color", "Contrast", "Sharpness")
_UNSIGNED = ("Posterize", "Solarize", "AutoContrast", "Equalize")


def apply_masked(images: Tensor, choices: Tensor, magnitude: int) -> Tensor:
    """As `randaugment.apply_randaugment`."""
    tables = _make_tables(magnitude, images.shape[2], images.shape[3], images.device)
    for choice in choices.unbind(1):
        images = _apply(images, choice, tables, magnitude)
    return images


@dataclass(frozen=True)
class _Tables:
    """What a choice means; rows are 2 · operation + negative."""

    sources: Tensor  # [choices, H·W] int64: the pixel that goes there, counted from 1; 0 for black
    factors: Tensor  # [choices, 2] float32: shares of the image and of what it is blended with


@cache
def _make_tables(magnitude: int, height: int, width: int, device: torch.device) -> _Tables:
    """torchvision's own operations tell where pixels go, from an image of their numbers."""
    numbers = torch.arange(1, height * width + 1, dtype=torch.float32).view(1, 1, height, width)
    sources, factors = [], []
    for name in RANDAUGMENT_OPERATIONS:
        for sign in (1, -1):
            strength = Strength(magnitude, sign)
            sources.append(OPERATIONS[name](numbers, strength) if name in _MOVES else numbers)
            as_it_is = name == "Sharpness" and min(height, width) <= 2  # there is nothing but border
            share = strength.factor if name in _BLENDS and not as_it_is else 1.0
            factors.append([share, 1 - share])
    return _Tables(torch.cat(sources).flatten(1).long().to(device), torch.tensor(factors, device=device))


def _apply(images: Tensor, choice: Tensor, tables: _Tables, magnitude: int) -> Tensor:
    operation = choice // 2

    def where(name: str, result: Tensor, otherwise: Tensor) -> Tensor:
        chosen = operation == RANDAUGMENT_OPERATIONS.index(name)
        return torch.where(chosen[:, None, None, None], result, otherwise)

    out = _move(images, tables.sources[choice])
    blended = _blend(images, tables.factors[choice], where)
    for name in _BLENDS:
        out = where(name, blended, out)
    for name in _UNSIGNED:
        out = where(name, OPERATIONS[name](images, Strength(magnitude, 1)), out)
    return out


def _move(images: Tensor, sources: Tensor) -> Tensor:
    index = (sources - 1).clamp(min=0)[:, None].expand(-1, images.shape[1], -1)
    return torch.where(sources[:, None] > 0, images.flatten(2).gather(2, index), 0).view_as(images)


def _blend(images: Tensor, factors: Tensor, where: Callable[[str, Tensor, Tensor], Tensor]) -> Tensor:
    """The four of them are one: towards black, grey, the mean grey or the blurred image, and away from it."""
    pixels = images.float()
    grey = tvf.rgb_to_grayscale(images).float()
    towards = where("Color", grey, torch.zeros_like(grey))
    towards = where("Contrast", grey.mean((1, 2, 3), keepdim=True), towards)
    towards = where("Sharpness", _blur(pixels), towards)
    share, rest = factors[:, :, None, None, None].unbind(1)
    return (share * pixels + rest * towards).clamp(0, 255).to(torch.uint8)


def _blur(pixels: Tensor) -> Tensor:
    """The border stays, other pixels are a mean of themselves, five times, and of their eight neighbours."""
    if min(pixels.shape[2:]) <= 2:
        return pixels
    inner = pixels[:, :, 1:-1, 1:-1]
    # Sums of integers, over 13 in the end: nothing comes to lie between two integers, however it is rounded.
    mean = (9 * avg_pool2d(pixels, 3, stride=1) + 4 * inner) / 13
    out = pixels.clone()
    out[:, :, 1:-1, 1:-1] = mean.round()
    return out
