"""The batched augmentation equals torchvision's operations, image by image, with the same draws."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from selfcon.data.augment import augment, crop_and_flip
from selfcon.data.augment_reference import augment_reference
from selfcon.data.draws import draw
from selfcon.data.policies import POLICIES
from selfcon.data.randaugment import apply_randaugment, equalise
from selfcon.data.randaugment_masked import apply_masked
from selfcon.data.resident import Resident


def channels_first(pixels: Any) -> Tensor:
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()


def compare(pixels: Any, name: str, view: int, size: int = 32) -> None:
    images, policy = channels_first(pixels), POLICIES[name]
    samples = torch.arange(len(images))
    draws = draw(policy, samples, height=images.shape[2], width=images.shape[3], seed=3, epoch=5, view=view)
    ours, theirs = augment(images, policy, draws, size), augment_reference(images, policy, draws, size)
    assert ours.shape == (len(images), 3, size, size)
    difference = (ours - theirs).abs()
    if policy.randaugment:
        assert (difference > 2e-3).float().mean() < 0.005
    else:
        assert difference.max() < 2e-3


@pytest.mark.medium
@pytest.mark.parametrize("view", [0, 1])
@pytest.mark.parametrize("name", POLICIES)
def test_equals_the_reference_on_photographs(patches: Any, name: str, view: int) -> None:
    compare(patches, name, view)


@pytest.mark.medium
@pytest.mark.parametrize("view", [0, 1])
@pytest.mark.parametrize("name", POLICIES)
def test_equals_the_reference_on_cifar(cifar100: dict[str, Any], name: str, view: int) -> None:
    compare(cifar100["x_train"][::2][:2000], name, view)


@pytest.mark.parametrize("size", [12, 20, 48])
@pytest.mark.parametrize("name", ["standard", "none", "randaugment"])
def test_equals_the_reference_at_other_sizes(patches: Any, name: str, size: int) -> None:
    compare(patches[::20], name, 0, size)


def test_flat_and_extreme_images() -> None:
    flat = torch.stack([torch.full((32, 32, 3), value, dtype=torch.uint8) for value in (0, 1, 127, 255)])
    noise = torch.randint(0, 2, (4, 32, 32, 3), dtype=torch.uint8) * 255
    for name in POLICIES:
        for view in range(4):
            compare(torch.cat([flat, noise]).numpy(), name, view)


def test_equalise_is_torchvisions() -> None:
    from torchvision.transforms.functional import equalize

    few_values = torch.randint(0, 3, (6, 3, 9, 7), dtype=torch.uint8) * 100
    images = torch.cat([few_values, torch.randint(0, 256, (6, 3, 9, 7), dtype=torch.uint8)])
    assert torch.equal(equalise(images), torch.stack([equalize(image) for image in images]))


@pytest.mark.parametrize("magnitude", [0, 9, 30])
@pytest.mark.parametrize("shape", [(32, 32), (7, 12), (2, 5)])
def test_randaugment_without_asking_who_drew_what(shape: tuple[int, int], magnitude: int) -> None:
    policy, count = POLICIES["randaugment"], 600
    images = torch.randint(0, 256, (count, 3, *shape), dtype=torch.uint8)
    images[::5] = images[::5] // 9 + 70  # of little contrast
    images[::50] = 130  # and of none
    draws = draw(policy, torch.arange(count), height=shape[0], width=shape[1], seed=3, epoch=5)
    masked, asked = apply_masked(images, draws.choices, magnitude), apply_randaugment(images, draws.choices, magnitude)
    assert masked.dtype == torch.uint8
    assert torch.equal(masked, asked)
    assert not torch.equal(masked, images)


@pytest.mark.parametrize("name", ["standard", "randaugment-standard"])
def test_any_split_of_the_batch_gives_the_same(patches: Any, name: str) -> None:
    images, policy = channels_first(patches[:60]), POLICIES[name]
    samples = torch.randperm(50_000)[:60]
    keys: dict[str, Any] = {"height": 32, "width": 32, "seed": 7, "epoch": 2}
    whole = draw(policy, samples, **keys)
    parts = [draw(policy, samples[start : start + 7], **keys) for start in range(0, 60, 7)]
    for part in fields(whole):
        together = torch.cat([getattr(draws, part.name) for draws in parts])
        assert torch.equal(getattr(whole, part.name), together)
    augmented = torch.cat(
        [augment(images[7 * row : 7 * row + 7], policy, draws, 32) for row, draws in enumerate(parts)]
    )
    torch.testing.assert_close(augmented, augment(images, policy, whole, 32), rtol=0, atol=1e-6)


def test_autocast_does_not_reach_into_it(patches: Any) -> None:
    images, policy = channels_first(patches[:50]), POLICIES["standard"]
    draws = draw(policy, torch.arange(50), height=32, width=32, seed=0, epoch=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = augment(images, policy, draws, 32)
    assert torch.equal(inside, augment(images, policy, draws, 32))


def test_views_differ_and_are_reproduced(patches: Any) -> None:
    resident = Resident(
        channels_first(patches), torch.zeros(len(patches), dtype=torch.long), *torch.tensor([[0.5], [0.25]])
    )
    samples = torch.arange(8)
    batch = resident.batch(samples, POLICIES["standard"], seed=0, epoch=0, views=2)
    first, second = batch.images.chunk(2)
    assert not torch.allclose(first, second)
    again = resident.batch(samples, POLICIES["standard"], seed=0, epoch=0)
    assert torch.equal(again.images, first)


def test_a_crop_of_everything_is_the_image(patches: Any) -> None:
    images = channels_first(patches[:4]).float() / 255
    policy = POLICIES["simple"]
    draws = draw(policy, torch.arange(4), height=32, width=32, seed=0, epoch=0)
    whole = type(draws)(
        **{f.name: getattr(draws, f.name) for f in fields(draws)}
        | {
            "top": torch.zeros(4, dtype=torch.long),
            "left": torch.zeros(4, dtype=torch.long),
            "height": torch.full((4,), 32),
            "width": torch.full((4,), 32),
            "flip": torch.zeros(4, dtype=torch.bool),
        }
    )
    torch.testing.assert_close(crop_and_flip(images, whole, 32), images)
