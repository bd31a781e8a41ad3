"""Copies between splits are found where images are at hand, and counted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from selfcon.data.copies import count_copies
from selfcon.data.resident import make_resident
from selfcon.data.source import ArrayImages


def test_copies_are_counted_and_near_ones_are_not() -> None:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (300, 8, 8, 3), dtype=np.uint8)
    pixels[250:] = pixels[:50]
    pixels[250, 0, 0, 0] ^= 1
    pixels[251, 7, 7, 2] ^= 128
    pixels[252] = pixels[2, ::-1]
    labels = np.zeros(300, np.int64)
    train, test = (ArrayImages(pixels[part], labels[part], "x") for part in (slice(250), slice(250, 300)))
    count = count_copies(make_resident(test), make_resident(train))
    assert count == 47


@pytest.mark.parametrize("values", [0, 255])
def test_flat_images_are_told_apart(values: int) -> None:
    one = np.full((1, 4, 4, 3), values, np.uint8)
    other = np.full((1, 4, 4, 3), 128, np.uint8)
    split = make_resident(ArrayImages(one, np.zeros(1, np.int64), "x"))
    assert count_copies(split, make_resident(ArrayImages(other, np.zeros(1, np.int64), "x"))) == 0
    assert count_copies(split, split) == 1
    assert torch.equal(split.pixels, torch.full_like(split.pixels, values))
