"""Every implementation of the augmentation gives the same views."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from selfcon.data.policies import POLICIES
from selfcon.data.views import Look, make_views
from selfcon.errors import UsageError

SHAPES = [(32, 32, 32), (64, 48, 32), (20, 20, 24), (33, 40, 17), (12, 80, 16)]


def some_images(height: int, width: int) -> Tensor:
    images = torch.randint(
        0, 256, (60, 3, height, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    images[5], images[6], images[7] = images[5, :1], 0, 255  # grey, black, white: where hue has no meaning
    return images


def some_look(policy: str, size: int, device: str = "cpu", **more: Any) -> Look:
    mean, std = torch.tensor([0.5, 0.4, 0.3], device=device), torch.tensor([0.2, 0.25, 0.3], device=device)
    keys = {"seed": 123_456_789_012, "epoch": 17, "views": 2, **more}
    return Look(policy=POLICIES[policy], mean=mean, std=std, size=size, **keys)


def compare(implementation: str, device: str, *, count: int, tolerance: float) -> None:
    """An implementation against the plain one, over shapes (the last crops fall back to the centre) and policies."""
    rows = torch.arange(count, device=device).flip(0)
    for height, width, size in SHAPES:
        images = some_images(height, width).to(device)
        for policy in POLICIES:
            if POLICIES[policy].randaugment and size != 16:
                continue  # the kernel does the same after it as without it
            look = some_look(policy, size, device)
            ours = make_views(images, rows, 1000 + rows, look, implementation)
            expected = make_views(images, rows, 1000 + rows, look, "plain")
            difference = (ours - expected).abs().max()
            assert ours.shape == (2 * count, 3, size, size)
            assert difference < tolerance, (height, width, size, policy, difference)


@pytest.mark.slow
def test_the_kernel_in_tritons_interpreter() -> None:
    pytest.importorskip("triton", reason="Triton is made for Linux only")
    script = "from tests.data.test_views import compare\ncompare('triton', 'cpu', count=12, tolerance=2e-5)"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}  # runs its language without a GPU
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=300)


def test_a_step_of_ones_own_sees_each_view_before_it_is_normalised() -> None:
    images, look, rows = some_images(32, 32), some_look("standard", 32), torch.tensor([3, 9, 4])
    told: list[tuple[Tensor, Tensor]] = []

    def darken(pixels: Tensor, numbers: Tensor) -> Tensor:
        told.append((pixels, numbers))
        return pixels * numbers[:, :1, None, None]

    own = replace(look, policy=replace(look.policy, then=darken, numbers=2))
    with torch.autocast("cpu", torch.bfloat16):
        ours = make_views(images, rows, rows, own)
    pixels, numbers = told[0]
    assert pixels.dtype == torch.float32
    assert pixels.min() >= 0
    assert pixels.max() <= 1
    assert numbers.shape == (6, 2)
    assert len(numbers.unique()) == 12, "each view of each sample has its own"
    mean, std = look.mean[:, None, None], look.std[:, None, None]
    plain = make_views(images, rows, rows, look) * std + mean
    torch.testing.assert_close(ours * std + mean, plain * numbers[:, :1, None, None])
    make_views(images, rows[1:], rows[1:], own)
    assert torch.equal(told[1][1], numbers[[1, 2, 4, 5]]), "whatever the batch"
    for wrong in (lambda pixels, numbers: pixels[:2], lambda pixels, numbers: None):
        with pytest.raises(UsageError, match=r"given pixels \[6, 3, 32, 32\] on cpu and returned (\[2, 3|NoneType)"):
            make_views(images, rows, rows, replace(own, policy=replace(own.policy, then=wrong)))


def test_a_view_belongs_to_its_sample() -> None:
    images, look = some_images(32, 32), some_look("standard", 32)
    rows = torch.tensor([3, 9])
    both = make_views(images, rows, rows, look)
    assert torch.equal(make_views(images[rows], torch.arange(2), rows, look), both)  # the key counts, not the place
    assert not torch.equal(make_views(images, rows, rows + 1, look), both)
    with pytest.raises(UsageError, match="did you mean 'triton'"):
        make_views(images, rows, rows, look, "tritn")
    with pytest.raises(UsageError, match="at least one view"):
        make_views(images, rows, rows, some_look("standard", 32, views=0))
