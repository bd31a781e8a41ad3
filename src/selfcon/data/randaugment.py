"""RandAugment for a batch: samples that drew the same operation are treated together, as torchvision defines it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torchvision.transforms.functional as tvf
from torch import Tensor
from torchvision.transforms import InterpolationMode

from selfcon.data.policies import RANDAUGMENT_OPERATIONS


def apply_randaugment(images: Tensor, choices: Tensor, magnitude: int) -> Tensor:
    """Two operations on each image [B, 3, H, W], uint8, at a magnitude of 0 to 30; choices [B, 2] as drawn."""
    images = images.clone()
    for chosen in choices.unbind(1):
        for number, name in enumerate(RANDAUGMENT_OPERATIONS):
            for negative in (0, 1):
                rows = (chosen == number * 2 + negative).nonzero()[:, 0]
                if len(rows):
                    strength = Strength(magnitude, sign=-1 if negative else 1)
                    images[rows] = OPERATIONS[name](images[rows], strength)
    return images


@dataclass(frozen=True)
class Strength:
    """How far an operation goes, and to which side."""

    magnitude: int
    sign: int

    def upto(self, limit: float) -> float:
        """A share of the limit. torchvision reads it off a float32 scale, and the last bit rounds some pixels."""
        return float(torch.linspace(0.0, limit, 31)[self.magnitude])

    def signed(self, limit: float) -> float:
        return self.sign * self.upto(limit)

    @property
    def shear(self) -> float:
        """In degrees, about the corner."""
        return math.degrees(math.atan(self.signed(0.3)))

    @property
    def factor(self) -> float:
        """Of brightness, colour, contrast and sharpness."""
        return 1 + self.signed(0.9)


OPERATIONS: dict[str, Callable[[Tensor, Strength], Tensor]] = {
    "Identity": lambda images, _: images,
    "ShearX": lambda images, by: _affine(images, shear=[by.shear, 0.0], center=[0.0, 0.0]),
    "ShearY": lambda images, by: _affine(images, shear=[0.0, by.shear], center=[0.0, 0.0]),
    "TranslateX": lambda images, by: _affine(images, translate=[int(by.signed(150 / 331 * images.shape[3])), 0]),
    "TranslateY": lambda images, by: _affine(images, translate=[0, int(by.signed(150 / 331 * images.shape[2]))]),
    "Rotate": lambda images, by: tvf.rotate(images, by.signed(30.0), interpolation=InterpolationMode.NEAREST),
    "Brightness": lambda images, by: tvf.adjust_brightness(images, by.factor),
    "Color": lambda images, by: tvf.adjust_saturation(images, by.factor),
    "Contrast": lambda images, by: tvf.adjust_contrast(images, by.factor),
    "Sharpness": lambda images, by: tvf.adjust_sharpness(images, by.factor),
    "Posterize": lambda images, by: tvf.posterize(images, 8 - round(4 * by.magnitude / 30)),
    "Solarize": lambda images, by: tvf.solarize(images, 255 - by.upto(255.0)),
    "AutoContrast": lambda images, _: tvf.autocontrast(images),
    "Equalize": lambda images, _: equalise(images),
}


def equalise(images: Tensor) -> Tensor:
    """Histogram equalisation of every channel of every image; torchvision's goes through them one by one."""
    values = images.flatten(2).flatten(0, 1).long()  # [B·3, H·W]
    histogram = torch.zeros(len(values), 256, dtype=torch.long, device=images.device)
    histogram.scatter_add_(1, values, torch.ones_like(values))
    brightest = histogram.gather(1, values.amax(1, keepdim=True))
    step = (values.shape[1] - brightest) // 255
    table = (histogram.cumsum(1) + step // 2) // step.clamp(min=1)
    table = torch.cat([torch.zeros_like(table[:, :1]), table[:, :-1]], dim=1).clamp(0, 255)
    return torch.where(step == 0, values, table.gather(1, values)).to(torch.uint8).view_as(images)


def _affine(
    images: Tensor,
    *,
    translate: list[int] | None = None,
    shear: list[float] | None = None,
    center: list[float] | None = None,
) -> Tensor:
    moved: Tensor = tvf.affine(
        images,
        angle=0.0,
        translate=translate or [0, 0],
        scale=1.0,
        shear=shear or [0.0, 0.0],
        interpolation=InterpolationMode.NEAREST,
        center=center,
    )
    return moved
