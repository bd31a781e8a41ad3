"""Data that stays on a device: the same batches from the same keys, all samples, the last batch kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import selfcon.data
from selfcon.data import ArrayImages, Policy, get_policy, make_resident
from selfcon.data.images import Pixels
from selfcon.data.resident import Resident
from selfcon.errors import UsageError


@pytest.fixture(scope="module")
def digits() -> Resident:
    return make_resident(selfcon.data.load("digits").train)


def test_an_epoch_holds_every_sample_once(digits: Resident) -> None:
    batches = list(digits.batches(get_policy("standard"), batch_size=100, seed=0, epoch=3, views=2))
    assert [len(batch.labels) for batch in batches] == [100] * 14 + [37]
    assert [len(batch.images) for batch in batches] == [200] * 14 + [74]
    samples = torch.cat([batch.samples for batch in batches])
    assert torch.equal(samples.sort().values, torch.arange(1437))
    labels = torch.cat([batch.labels for batch in batches])
    assert torch.equal(labels, digits.labels[samples])


def test_batches_follow_from_their_keys(digits: Resident) -> None:
    def run(**keys: Any) -> list[torch.Tensor]:
        settings = {"batch_size": 500, "seed": 0, "epoch": 1, **keys}
        return [batch.images for batch in digits.batches(get_policy("standard"), **settings)]

    for first, again in zip(run(), run(), strict=True):
        assert torch.equal(first, again)
    assert not torch.equal(run()[0], run(epoch=2)[0])
    assert not torch.equal(run()[0], run(seed=2)[0])
    # A sample looks the same whatever the size of the batch that it comes in.
    assert torch.allclose(torch.cat(run(batch_size=130)), torch.cat(run(batch_size=600)), atol=1e-6)


def test_statistics_are_those_of_the_pixels(digits: Resident) -> None:
    pixels = digits.pixels.double() / 255
    torch.testing.assert_close(digits.mean.double(), pixels.mean((0, 2, 3)), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(digits.std.double(), pixels.std((0, 2, 3), correction=0), rtol=1e-6, atol=1e-6)
    images = torch.cat([batch.images for batch in digits.plain_batches(batch_size=400)])
    torch.testing.assert_close(images.mean((0, 2, 3)), torch.zeros(3), rtol=0, atol=1e-4)
    torch.testing.assert_close(images.std((0, 2, 3)), torch.ones(3), rtol=0, atol=1e-3)
    test = make_resident(selfcon.data.load("digits").test, like=digits)
    assert torch.equal(test.mean, digits.mean)


def test_cifars_statistics_are_the_known_ones(cifar100: dict[str, Any], tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", **cifar100)
    resident = make_resident(selfcon.data.load(tmp_path / "x.npz").train)
    known_mean, known_std = torch.tensor([0.5071, 0.4865, 0.4409]), torch.tensor([0.2673, 0.2564, 0.2762])
    torch.testing.assert_close(resident.mean, known_mean, rtol=0, atol=6e-3)  # of a tenth of the images
    torch.testing.assert_close(resident.std, known_std, rtol=0, atol=6e-3)


def test_plain_batches_keep_the_order(digits: Resident) -> None:
    batches = list(digits.plain_batches(batch_size=1000))
    assert torch.equal(torch.cat([batch.samples for batch in batches]), torch.arange(1437))
    restored = batches[0].images[5] * digits.std[:, None, None] + digits.mean[:, None, None]
    torch.testing.assert_close(restored * 255, digits.pixels[5].float(), rtol=0, atol=1e-3)


def test_images_of_other_sizes_are_fitted(folder: Path) -> None:
    source = selfcon.data.load(folder)
    with pytest.raises(UsageError, match="say which size"):
        make_resident(source.train)
    resident = make_resident(source.train, size=24)
    assert resident.pixels.shape == (18, 3, 24, 24)
    same = make_resident(source.train, size=32)
    assert np.array_equal(same.pixels[4].permute(1, 2, 0).numpy(), source.train[4])


class Inverted(ArrayImages):
    """Images that are something else than their array."""

    def __getitem__(self, index: int) -> Pixels:
        return 255 - super().__getitem__(index)


def test_images_that_index_as_they_like_are_asked() -> None:
    data = make_resident(Inverted(np.full((4, 8, 8, 3), 250, np.uint8), np.arange(4) % 2, "dark"))
    assert data.pixels.unique().tolist() == [5]


def test_flat_channels_do_not_divide_by_zero() -> None:
    from selfcon.data.source import ArrayImages

    flat = ArrayImages(np.full((4, 8, 8, 3), 7, np.uint8), np.array([0, 1, 0, 1]), "flat")
    batch = next(iter(make_resident(flat).plain_batches(batch_size=4)))
    assert batch.images.abs().max() < 1e-6


def test_wrong_numbers(digits: Resident) -> None:
    with pytest.raises(UsageError, match="at least one sample"):
        list(digits.plain_batches(batch_size=0))
    with pytest.raises(UsageError, match="at least one view"):
        digits.batch(torch.arange(3), get_policy("none"), seed=0, epoch=0, views=0)
    with pytest.raises(UsageError, match="magnitude is 0 to 30"):
        Policy(magnitude=31)


def test_digits_are_not_mirrored(digits: Resident) -> None:
    only_flip = Policy(crop_and_flip=True, scale=(1.0, 1.0), ratio=(1.0, 1.0), flip_probability=1.0)
    batch = digits.batch(torch.arange(64), only_flip, seed=0, epoch=0)
    plain = next(iter(digits.plain_batches(batch_size=64)))
    torch.testing.assert_close(batch.images, plain.images, rtol=0, atol=1e-5)


def test_an_epoch_may_begin_in_its_middle(digits: Resident) -> None:
    settings: dict[str, Any] = {"batch_size": 200, "seed": 0, "epoch": 1}
    whole = list(digits.batches(get_policy("simple"), **settings))
    rest = list(digits.batches(get_policy("simple"), **settings, first=5))
    assert [batch.samples.tolist() for batch in rest] == [batch.samples.tolist() for batch in whole[5:]]
