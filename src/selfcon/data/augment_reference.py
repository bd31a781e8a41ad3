"""Augmentation image by image with torchvision's own operations and our draws: what the batched form must equal."""

from __future__ import annotations

import torch
import torchvision.transforms.functional as tvf
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.autoaugment import RandAugment, _apply_op

from selfcon.data.draws import Draws
from selfcon.data.policies import RANDAUGMENT_OPERATIONS, Policy


def augment_reference(images: Tensor, policy: Policy, draws: Draws, size: int) -> Tensor:
    """As `augment.augment`, one image after the other."""
    return torch.stack([_augment_one(image, policy, draws, row, size) for row, image in enumerate(images)])


def _augment_one(image: Tensor, policy: Policy, draws: Draws, row: int, size: int) -> Tensor:
    if policy.randaugment:
        image = _randaugment(image, draws, row, policy.magnitude)
    pixels = tvf.convert_image_dtype(image, torch.float32)
    if policy.crop_and_flip:
        crop = (int(draws.top[row]), int(draws.left[row]), int(draws.height[row]), int(draws.width[row]))
        pixels = tvf.resized_crop(pixels, *crop, [size, size], antialias=True)
        if draws.flip[row]:
            pixels = tvf.hflip(pixels)
    elif pixels.shape[1:] != (size, size):
        pixels = tvf.resize(pixels, [size, size], antialias=True)
    if policy.colour:
        steps = (tvf.adjust_brightness, tvf.adjust_contrast, tvf.adjust_saturation, tvf.adjust_hue)
        if draws.jitter[row]:
            for step in draws.order[row].tolist():
                pixels = steps[step](pixels, float(draws.factors[row, step]))
        if draws.grey[row]:
            pixels = tvf.rgb_to_grayscale(pixels, num_output_channels=3)
    augmented: Tensor = pixels
    return augmented


def _randaugment(image: Tensor, draws: Draws, row: int, magnitude: int) -> Tensor:
    theirs = RandAugment(num_ops=2, magnitude=magnitude)
    space = theirs._augmentation_space(theirs.num_magnitude_bins, tuple(image.shape[1:]))
    for choice in draws.choices[row].tolist():
        operation, negative = divmod(choice, 2)
        name = RANDAUGMENT_OPERATIONS[operation]
        magnitudes, signed = space[name]
        strength = float(magnitudes[magnitude]) if magnitudes.ndim > 0 else 0.0
        if signed and negative:
            strength = -strength
        image = _apply_op(image, name, strength, interpolation=InterpolationMode.NEAREST, fill=None)
    return image
