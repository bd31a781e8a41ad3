"""Augmentation of a whole batch at once, each sample by its own draw, in plain PyTorch on any device.

B samples, S output side, H x W stored images. What it must equal, image by image, is `augment_reference`.
"""

from __future__ import annotations

import torch
import torchvision.transforms.functional as tvf
from torch import Tensor

from selfcon.data.draws import Draws, draw_numbers
from selfcon.data.policies import Policy
from selfcon.data.randaugment import apply_randaugment
from selfcon.data.randaugment_masked import apply_masked
from selfcon.errors import UsageError

_GREY_WEIGHTS = (0.2989, 0.587, 0.114)
_HUE = 3


def augment(images: Tensor, policy: Policy, draws: Draws, size: int) -> Tensor:
    """Stored images [B, 3, H, W], uint8, augmented as drawn: float32 [B, 3, S, S] in [0, 1], not yet normalised."""
    with torch.autocast(images.device.type, enabled=False):
        if policy.randaugment:
            images = randaugment(images, draws.choices, policy.magnitude)
        pixels = images.to(torch.float32) / 255
        if policy.crop_and_flip:
            pixels = crop_and_flip(pixels, draws, size)
        elif pixels.shape[2:] != (size, size):
            pixels = tvf.resize(pixels, [size, size], antialias=True)
        return augment_colours(pixels, policy, draws)


def randaugment(images: Tensor, choices: Tensor, magnitude: int) -> Tensor:
    """RandAugment's part of a policy, by the form that suits the device."""
    apply = apply_randaugment if images.device.type == "cpu" else apply_masked
    return apply(images, choices, magnitude)


def augment_colours(pixels: Tensor, policy: Policy, draws: Draws) -> Tensor:
    """The part of a policy that leaves every pixel in its place, on pixels in [0, 1]."""
    if policy.colour:
        with torch.autocast(pixels.device.type, enabled=False):
            pixels = jitter_colours(pixels, draws)
            pixels = torch.where(draws.grey[:, None, None, None], _grey(pixels), pixels)
    return pixels


def take_own_step(pixels: Tensor, policy: Policy, samples: Tensor, *, seed: int, epoch: int, views: int) -> Tensor:
    """The policy's own step on pixels [V·B, 3, S, S] in [0, 1] of samples [B], all of view 1 first."""
    assert policy.then is not None
    numbers = [draw_numbers(samples, policy.numbers, seed=seed, epoch=epoch, view=view) for view in range(views)]
    with torch.autocast(pixels.device.type, enabled=False):
        changed = policy.then(pixels, torch.cat(numbers))
    if not isinstance(changed, Tensor) or changed.shape != pixels.shape or changed.device != pixels.device:
        told = f"{list(changed.shape)} on {changed.device}" if isinstance(changed, Tensor) else type(changed).__name__
        raise UsageError(
            f"The policy's own step was given pixels {list(pixels.shape)} on {pixels.device} and returned {told}."
        )
    return changed.to(pixels.dtype)


def normalise(pixels: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Pixels [B, 3, S, S] with mean and standard deviation [3] of the data set taken out."""
    return (pixels - mean[:, None, None]) / std[:, None, None]


def crop_and_flip(pixels: Tensor, draws: Draws, size: int) -> Tensor:
    """Resized crops: out = R_y · image · R_xᵀ with one small matrix a sample and axis; a flip reverses R_x."""
    rows = _resize_matrix(draws.top, draws.height, pixels.shape[2], size)
    columns = _resize_matrix(draws.left, draws.width, pixels.shape[3], size)
    columns = torch.where(draws.flip[:, None, None], columns.flip(1), columns)
    return rows[:, None] @ pixels @ columns[:, None].transpose(2, 3)


def _resize_matrix(start: Tensor, length: Tensor, stored: int, size: int) -> Tensor:
    """[B, S, stored]: weights of the stored pixels in each output pixel, antialiased where the crop is shrunk.

    Triangles around the output pixel's centre, cut off at the crop and made to sum to 1.
    """
    scale = (length.float() / size)[:, None, None]
    outputs = torch.arange(size, device=start.device, dtype=torch.float32)[None, :, None]
    inputs = torch.arange(stored, device=start.device)[None, None, :]
    centre = start[:, None, None] + (outputs + 0.5) * scale
    weights = (1 - (inputs + 0.5 - centre).abs() / scale.clamp(min=1)).clamp(min=0)
    inside = (inputs >= start[:, None, None]) & (inputs < (start + length)[:, None, None])
    weights = weights * inside
    return weights / weights.sum(2, keepdim=True)


def jitter_colours(pixels: Tensor, draws: Draws) -> Tensor:
    """Brightness, contrast, saturation and hue, for each sample in its own order, where its gate is open."""
    for step in range(4):
        kind = torch.where(draws.jitter, draws.order[:, step], -1)
        pixels = _blend(pixels, kind, draws.factors)
        pixels = _turn_hue(pixels, kind == _HUE, draws.factors[:, _HUE])
    return pixels


def _blend(pixels: Tensor, kind: Tensor, factors: Tensor) -> Tensor:
    """Three of the four colour steps are one: factor · image + (1 - factor) · black, mean grey or grey."""
    factor = factors.gather(1, kind.clamp(0, 2)[:, None])
    factor = torch.where((kind >= 0)[:, None] & (kind != _HUE)[:, None], factor, 1.0)[:, :, None, None]
    grey = _grey(pixels)
    towards = torch.where((kind == 2)[:, None, None, None], grey, grey.mean((1, 2, 3), keepdim=True))
    towards = torch.where((kind == 0)[:, None, None, None], 0.0, towards)
    return (factor * pixels + (1 - factor) * towards).clamp(0, 1)


def _grey(pixels: Tensor) -> Tensor:
    red, green, blue = pixels.unbind(1)
    return (_GREY_WEIGHTS[0] * red + _GREY_WEIGHTS[1] * green + _GREY_WEIGHTS[2] * blue)[:, None]


def _turn_hue(pixels: Tensor, chosen: Tensor, turns: Tensor) -> Tensor:
    if pixels.device.type != "cpu":  # choosing rows would make the host wait
        return torch.where(chosen[:, None, None, None], _turned(pixels, turns), pixels)
    rows = chosen.nonzero()[:, 0]
    return pixels.index_copy(0, rows, _turned(pixels[rows], turns[rows]))


def _turned(pixels: Tensor, turns: Tensor) -> Tensor:
    """Hue moved by `turns` of the colour circle, saturation and value kept.

    With value V and chroma C, a channel is V - C · clamp(min(k, 4 - k), 0, 1), k = (n + 6·hue) mod 6, n = 5, 3 or 1.
    """
    value, chroma, hue = _hue(pixels)
    six = (hue + turns[:, None, None]) * 6
    channels = []
    for n in (5, 3, 1):
        k = (six + n) % 6
        channels.append(value - chroma * torch.minimum(k, 4 - k).clamp(0, 1))
    return torch.stack(channels, dim=1)


def _hue(pixels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    red, green, blue = pixels.unbind(1)
    value, least = pixels.amax(1), pixels.amin(1)
    chroma = value - least
    divisor = torch.where(chroma == 0, 1.0, chroma)
    sixth = torch.where(
        value == red,
        (green - blue) / divisor,
        torch.where(value == green, 2 + (blue - red) / divisor, 4 + (red - green) / divisor),
    )
    return value, chroma, sixth / 6
