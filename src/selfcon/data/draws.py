"""What a policy draws for each sample and view: keyed random words, turned into the parameters of its steps.

Applying them is another matter: `augment` does it for a batch at once, `augment_reference` image by image with
torchvision. The distributions are torchvision's: `tests/data/test_policies.py` compares them with its own classes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from selfcon.data.policies import RANDAUGMENT_OPERATIONS, Policy
from selfcon.data.random import Stream, draw_words, to_integer, to_uniform

JITTER_ORDERS = tuple(itertools.permutations(range(4)))
"""Brightness, contrast, saturation and hue (0 to 3) in every order."""

_TRIES = 10
# Which word of a sample's stream is for what; a GPU kernel that draws for itself must use the same.
_TOP, _LEFT, _FLIP, _JITTER, _ORDER, _FACTORS, _GREY, _CHOICES = 20, 21, 22, 23, 24, 25, 29, 30
_WORDS = 32


@dataclass(frozen=True)
class Draws:
    """The parameters of one view of B samples."""

    top: Tensor  # [B] int64; the crop in pixels of the stored image
    left: Tensor
    height: Tensor
    width: Tensor
    flip: Tensor  # [B] bool
    jitter: Tensor  # [B] bool, whether the four colour steps are applied
    order: Tensor  # [B, 4] int64, in which order
    factors: Tensor  # [B, 4] float32: brightness, contrast, saturation, hue
    grey: Tensor  # [B] bool
    choices: Tensor  # [B, 2] int64, of RandAugment: 2 · operation, and 1 more if a signed one is turned around

    def to(self, device: torch.device) -> Draws:
        """The same on a device."""
        return Draws(*(getattr(self, each.name).to(device, non_blocking=True) for each in fields(self)))

    def pin(self) -> Draws:
        """The same where a GPU can fetch it by itself."""
        return Draws(*(getattr(self, each.name).pin_memory() for each in fields(self)))


def join_draws(parts: Sequence[Draws]) -> Draws:
    """Draws one below the other."""
    return Draws(*(torch.cat([getattr(part, each.name) for part in parts]) for each in fields(Draws)))


def draw(
    policy: Policy,
    samples: Tensor,
    *,
    height: int | Tensor,
    width: int | Tensor,
    seed: int,
    epoch: int,
    view: int = 0,
) -> Draws:
    """What the policy draws for samples [B] (indices in the data set) whose stored images are height x width.

    Both may be [B], where images differ.
    """
    words = draw_words(samples, seed=seed, epoch=epoch, stream=Stream.AUGMENT + view, words=_WORDS)
    uniform = to_uniform(words)
    top, left, crop_height, crop_width = _draw_crop(policy, words, height, width)
    factors = [
        _around_one(uniform[:, _FACTORS + column], strength)
        for column, strength in enumerate((policy.brightness, policy.contrast, policy.saturation))
    ]
    hue = (2 * uniform[:, _FACTORS + 3] - 1) * policy.hue
    return Draws(
        top=top,
        left=left,
        height=crop_height,
        width=crop_width,
        flip=uniform[:, _FLIP] < policy.flip_probability,
        jitter=uniform[:, _JITTER] < policy.jitter_probability,
        order=order_colours(to_integer(words[:, _ORDER], len(JITTER_ORDERS))),
        factors=torch.stack([*factors, hue], dim=1),
        grey=uniform[:, _GREY] < policy.grey_probability,
        choices=_choose_operations(words),
    )


def draw_choices(samples: Tensor, *, seed: int, epoch: int, view: int = 0) -> Tensor:
    """Of what `draw` gives, the choices alone."""
    return _choose_operations(draw_words(samples, seed=seed, epoch=epoch, stream=Stream.AUGMENT + view, words=_WORDS))


def draw_numbers(samples: Tensor, count: int, *, seed: int, epoch: int, view: int = 0) -> Tensor:
    """Numbers in [0, 1) for a policy's own step, [B, count]."""
    return to_uniform(draw_words(samples, seed=seed, epoch=epoch, stream=Stream.OWN + view, words=count))


def _choose_operations(words: Tensor) -> Tensor:
    ours = words[:, _CHOICES : _CHOICES + 2]
    return 2 * to_integer(ours, len(RANDAUGMENT_OPERATIONS)) + (ours & 1)


def _around_one(uniform: Tensor, strength: float) -> Tensor:
    around = torch.full_like(uniform, strength)
    lowest = (1 - around).clamp(min=0)
    return lowest + uniform * (1 + around - lowest)


def order_colours(index: Tensor) -> Tensor:
    """Rows [B, 4] of JITTER_ORDERS, worked out: a table would have to come from the host, which would wait for it."""
    order = [index // 6, index // 2 % 3, index % 2, torch.zeros_like(index)]  # how many of the numbers left are smaller
    for place in (2, 1, 0):
        for later in range(place + 1, 4):
            order[later] = order[later] + (order[later] >= order[place])
    return torch.stack(order, dim=1)


def _draw_crop(
    policy: Policy, words: Tensor, height: int | Tensor, width: int | Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """torchvision's RandomResizedCrop: the first of ten tries that fits, else the largest centred crop.

    In float64, so that no device rounds a size differently.
    """
    tall, wide = (side[:, None] if isinstance(side, Tensor) else side for side in (height, width))
    tries = to_uniform(words[:, : 2 * _TRIES]).double().view(-1, _TRIES, 2)
    area = tall * wide * (policy.scale[0] + tries[..., 0] * (policy.scale[1] - policy.scale[0]))
    low, high = math.log(policy.ratio[0]), math.log(policy.ratio[1])
    aspect = torch.exp(low + tries[..., 1] * (high - low))
    widths, heights = (area * aspect).sqrt().round().long(), (area / aspect).sqrt().round().long()
    fits = (widths > 0) & (widths <= wide) & (heights > 0) & (heights <= tall)
    first = fits.long().argmax(1, keepdim=True)
    found = fits.any(1)

    fallback_height, fallback_width = _largest_crops(policy, height, width)
    crop_height = torch.where(found, heights.gather(1, first)[:, 0], fallback_height)
    crop_width = torch.where(found, widths.gather(1, first)[:, 0], fallback_width)
    top = torch.where(found, to_integer(words[:, _TOP], height - crop_height + 1), (height - crop_height) // 2)
    left = torch.where(found, to_integer(words[:, _LEFT], width - crop_width + 1), (width - crop_width) // 2)
    return top, left, crop_height, crop_width


def _largest_crops(policy: Policy, height: int | Tensor, width: int | Tensor) -> tuple[int | Tensor, int | Tensor]:
    """Heights and widths of the largest crops whose shape is allowed."""
    if isinstance(height, Tensor) and isinstance(width, Tensor):
        sizes = zip(height.tolist(), width.tolist(), strict=True)
        each = torch.tensor([_largest_crop(policy, *size) for size in sizes], device=height.device)
        return each[:, 0], each[:, 1]
    return _largest_crop(policy, int(height), int(width))


def _largest_crop(policy: Policy, height: int, width: int) -> tuple[int, int]:
    if width / height < policy.ratio[0]:
        return round(width / policy.ratio[0]), width
    if width / height > policy.ratio[1]:
        return height, round(height * policy.ratio[1])
    return height, width
