"""The augmentation as one GPU kernel: a program makes one view of one sample, from its draws to normalised pixels.

It draws for itself, from the same words as `draws.draw`, and gives what `augment` and `normalise` give, but for
RandAugment. N stored images, B samples, V views, S output side.
"""

from __future__ import annotations

import math
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfcon.data.draws import JITTER_ORDERS
from selfcon.data.random import Stream
from selfcon.data.views import Look

LARGEST_SIDE = 128
"""A program holds a whole image in registers."""


def augment_views(stored: Tensor, rows: Tensor, samples: Tensor, look: Look, first: int = 0) -> Tensor:
    """Views [V·B, 3, S, S], channels last, from the view `first` on: see `views.make_views`."""
    height, width = stored.shape[2:]
    policy, size = look.policy, look.size
    out = torch.empty((look.views * len(rows), 3, size, size), device=stored.device, memory_format=torch.channels_last)
    block = triton.next_power_of_2(size * size)
    _augment[len(rows), look.views](
        stored,
        rows,
        samples,
        _orders(stored.device),
        look.mean,
        look.std,
        out,
        look.seed,
        look.epoch,
        len(rows),
        H=height,
        W=width,
        S=size,
        BLOCK=block,
        TAPS_Y=math.ceil(2 * max(height / size, 1)),
        TAPS_X=math.ceil(2 * max(width / size, 1)),
        STREAM=int(Stream.AUGMENT) + first,
        CROP=policy.crop_and_flip,
        COLOUR=policy.colour,
        LEAST_AREA=height * width * policy.scale[0],
        MORE_AREA=height * width * (policy.scale[1] - policy.scale[0]),
        LEAST_ASPECT=math.log(policy.ratio[0]),
        MORE_ASPECT=math.log(policy.ratio[1]) - math.log(policy.ratio[0]),
        FALLBACK_H=round(width / policy.ratio[0]) if width / height < policy.ratio[0] else height,
        FALLBACK_W=round(height * policy.ratio[1]) if width / height > policy.ratio[1] else width,
        FLIP=policy.flip_probability,
        JITTER=policy.jitter_probability,
        GREY=policy.grey_probability,
        BRIGHTNESS=policy.brightness,
        CONTRAST=policy.contrast,
        SATURATION=policy.saturation,
        HUE=policy.hue,
        num_warps=min(16, max(4, block // 512)),
    )
    return out


@cache
def _orders(device: torch.device) -> Tensor:
    return torch.tensor(JITTER_ORDERS, dtype=torch.int32, device=device)


@triton.jit
def _uniform(word):
    return (word >> 8).to(tl.float32) * 5.9604644775390625e-08  # 2^-24


@triton.jit
def _below(word, limit):
    """An integer in [0, limit)."""
    return ((word.to(tl.uint64) * limit.to(tl.uint64)) >> 32).to(tl.int32)


@triton.jit
def _round_half_even(x):
    down = tl.floor(x)
    rest = x - down
    odd = (down.to(tl.int32) & 1) == 1
    return tl.where((rest > 0.5) | ((rest == 0.5) & odd), down + 1, down).to(tl.int32)


@triton.jit
def _sides(area_word, aspect_word, LEAST_AREA, MORE_AREA, LEAST_ASPECT, MORE_ASPECT):
    """Height and width of the crops that these words try, in float64 as in `policies`."""
    area = LEAST_AREA + _uniform(area_word).to(tl.float64) * MORE_AREA
    aspect = tl.exp(LEAST_ASPECT + _uniform(aspect_word).to(tl.float64) * MORE_ASPECT)
    return _round_half_even(tl.sqrt(area / aspect)), _round_half_even(tl.sqrt(area * aspect))


@triton.jit
def _tap(start, length, output, tap, S: tl.constexpr):
    """The stored pixel that is tap number `tap` of an output pixel, and its weight before they are made to sum to 1."""
    scale = length.to(tl.float32) / S
    support = tl.maximum(scale, 1.0)
    centre = start + (output + 0.5) * scale
    place = (tl.floor(centre - support - 0.5) + 1).to(tl.int32) + tap
    weight = tl.maximum(1 - tl.abs(place + 0.5 - centre) / support, 0.0)
    inside = (place >= start) & (place < start + length)
    return place, tl.where(inside, weight, 0.0)


@triton.jit
def _clamp(x):
    return tl.minimum(tl.maximum(x, 0.0), 1.0)


@triton.jit
def _grey(r, g, b):
    return 0.2989 * r + 0.587 * g + 0.114 * b


@triton.jit
def _turned(value, chroma, six, n):
    k = six + n
    k = k - 6 * tl.floor(k / 6)
    return value - chroma * _clamp(tl.minimum(k, 4 - k))


@triton.jit
def _factor(word, STRENGTH):
    lowest = tl.maximum(1.0 - STRENGTH, 0.0)
    return lowest + _uniform(word) * (1.0 + STRENGTH - lowest)


@triton.jit(do_not_specialize=["seed", "epoch", "batch"])
def _augment(
    pixels,
    rows,
    samples,
    orders,
    mean,
    std,
    out,
    seed,
    epoch,
    batch,
    H: tl.constexpr,
    W: tl.constexpr,
    S: tl.constexpr,
    BLOCK: tl.constexpr,
    TAPS_Y: tl.constexpr,
    TAPS_X: tl.constexpr,
    STREAM: tl.constexpr,
    CROP: tl.constexpr,
    COLOUR: tl.constexpr,
    LEAST_AREA: tl.constexpr,
    MORE_AREA: tl.constexpr,
    LEAST_ASPECT: tl.constexpr,
    MORE_ASPECT: tl.constexpr,
    FALLBACK_H: tl.constexpr,
    FALLBACK_W: tl.constexpr,
    FLIP: tl.constexpr,
    JITTER: tl.constexpr,
    GREY: tl.constexpr,
    BRIGHTNESS: tl.constexpr,
    CONTRAST: tl.constexpr,
    SATURATION: tl.constexpr,
    HUE: tl.constexpr,
):
    row = tl.program_id(0)
    view = tl.program_id(1)
    key = tl.load(samples + row).to(tl.int32)
    stream = view + STREAM
    epoch = epoch.to(tl.int32)

    # The stored rectangle that this view shows. Words 0 to 19 are ten tries, two in each block of four words.
    top = tl.full((), 0, tl.int32)
    left = tl.full((), 0, tl.int32)
    height = tl.full((), H, tl.int32)
    width = tl.full((), W, tl.int32)
    flip = tl.full((), 0, tl.int32)
    five = tl.full((), 5, tl.int32)
    w_top, w_left, w_flip, w_jitter = tl.philox(seed, five, key, epoch, stream)
    if CROP:
        blocks = tl.arange(0, 8)
        zeros = tl.zeros_like(blocks)
        a0, a1, b0, b1 = tl.philox(seed, blocks, zeros + key, zeros + epoch, zeros + stream)
        heights_a, widths_a = _sides(a0, a1, LEAST_AREA, MORE_AREA, LEAST_ASPECT, MORE_ASPECT)
        heights_b, widths_b = _sides(b0, b1, LEAST_AREA, MORE_AREA, LEAST_ASPECT, MORE_ASPECT)
        fits_a = (blocks < 5) & (widths_a > 0) & (widths_a <= W) & (heights_a > 0) & (heights_a <= H)
        fits_b = (blocks < 5) & (widths_b > 0) & (widths_b <= W) & (heights_b > 0) & (heights_b <= H)
        first_a = tl.min(tl.where(fits_a, 2 * blocks, 99), axis=0)
        first_b = tl.min(tl.where(fits_b, 2 * blocks + 1, 99), axis=0)
        first = tl.minimum(first_a, first_b)
        is_a = 2 * blocks == first
        is_b = 2 * blocks + 1 == first
        if first < 99:
            height = tl.sum(tl.where(is_a, heights_a, 0) + tl.where(is_b, heights_b, 0), axis=0)
            width = tl.sum(tl.where(is_a, widths_a, 0) + tl.where(is_b, widths_b, 0), axis=0)
            top = _below(w_top, H - height + 1)
            left = _below(w_left, W - width + 1)
        else:
            height = tl.full((), FALLBACK_H, tl.int32)
            width = tl.full((), FALLBACK_W, tl.int32)
            top = (H - height) // 2
            left = (W - width) // 2
        flip = (_uniform(w_flip) < FLIP).to(tl.int32)

    # Bilinear samples of it, with as many taps as a crop of the whole image needs where that is shrunk.
    place = tl.arange(0, BLOCK)
    inside = place < S * S
    y = place // S
    x = place % S
    x = tl.where(flip == 1, S - 1 - x, x)
    stored = pixels + tl.load(rows + row).to(tl.int64) * (3 * H * W)
    r = tl.zeros((BLOCK,), tl.float32)
    g = tl.zeros((BLOCK,), tl.float32)
    b = tl.zeros((BLOCK,), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for tap_y in tl.static_range(TAPS_Y):
        from_y, weight_y = _tap(top, height, y, tap_y, S)
        for tap_x in tl.static_range(TAPS_X):
            from_x, weight_x = _tap(left, width, x, tap_x, S)
            weight = weight_y * weight_x
            address = stored + from_y * W + from_x
            wanted = inside & (weight > 0)
            r += weight * tl.load(address, mask=wanted, other=0).to(tl.float32)
            g += weight * tl.load(address + H * W, mask=wanted, other=0).to(tl.float32)
            b += weight * tl.load(address + 2 * H * W, mask=wanted, other=0).to(tl.float32)
            total += weight
    total = tl.where(inside, total, 1.0) * 255
    r = r / total
    g = g / total
    b = b / total

    if COLOUR:
        six = tl.full((), 6, tl.int32)
        seven = tl.full((), 7, tl.int32)
        w_order, w_brightness, w_contrast, w_saturation = tl.philox(seed, six, key, epoch, stream)
        w_hue, w_grey, _, _ = tl.philox(seed, seven, key, epoch, stream)
        if _uniform(w_jitter) < JITTER:
            order = _below(w_order, tl.full((), 24, tl.int32))
            for step in tl.static_range(4):
                kind = tl.load(orders + order * 4 + step)
                if kind == 0:
                    factor = _factor(w_brightness, BRIGHTNESS)
                    r = _clamp(factor * r)
                    g = _clamp(factor * g)
                    b = _clamp(factor * b)
                elif kind == 1:
                    factor = _factor(w_contrast, CONTRAST)
                    rest = (1 - factor) * tl.sum(tl.where(inside, _grey(r, g, b), 0.0), axis=0) / (S * S)
                    r = _clamp(factor * r + rest)
                    g = _clamp(factor * g + rest)
                    b = _clamp(factor * b + rest)
                elif kind == 2:
                    factor = _factor(w_saturation, SATURATION)
                    rest = (1 - factor) * _grey(r, g, b)
                    r = _clamp(factor * r + rest)
                    g = _clamp(factor * g + rest)
                    b = _clamp(factor * b + rest)
                else:
                    value = tl.maximum(tl.maximum(r, g), b)
                    chroma = value - tl.minimum(tl.minimum(r, g), b)
                    divisor = tl.where(chroma == 0, 1.0, chroma)
                    sixth = tl.where(
                        value == r,
                        (g - b) / divisor,
                        tl.where(value == g, 2 + (b - r) / divisor, 4 + (r - g) / divisor),
                    )
                    sixth += (2 * _uniform(w_hue) - 1) * HUE * 6
                    r = _turned(value, chroma, sixth, 5)
                    g = _turned(value, chroma, sixth, 3)
                    b = _turned(value, chroma, sixth, 1)
        if _uniform(w_grey) < GREY:
            r = _grey(r, g, b)
            g = r
            b = r

    target = out + (view * batch + row).to(tl.int64) * (3 * S * S) + 3 * place
    tl.store(target, (r - tl.load(mean)) / tl.load(std), mask=inside)
    tl.store(target + 1, (g - tl.load(mean + 1)) / tl.load(std + 1), mask=inside)
    tl.store(target + 2, (b - tl.load(mean + 2)) / tl.load(std + 2), mask=inside)
