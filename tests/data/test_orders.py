"""Balanced orders and thinned sources."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from selfcon.data.orders import draw_order
from selfcon.data.policies import get_policy
from selfcon.data.resident import make_resident
from selfcon.data.source import ArrayImages, Source
from selfcon.data.streamed import make_streamed
from selfcon.data.thinning import thin
from selfcon.errors import DataError


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(0, 5))
def test_classes_come_equally_often_and_in_pairs(sizes: list[int], epoch: int) -> None:
    labels = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    count = len(labels)
    numbers = draw_order(labels, seed=3, epoch=epoch, balanced=True, device="cpu")
    assert len(numbers) == count
    assert len(numbers.unique()) == count  # whoever comes again has another number, so another draw
    seen = labels[numbers % count]
    often = torch.bincount(seen, minlength=len(sizes))
    assert int(often.max() - often.min()) <= 2
    pairs = seen[: count // 2 * 2].view(-1, 2)
    assert torch.equal(pairs[:, 0], pairs[:, 1])
    for label in range(len(sizes)):  # nobody comes again before all of the class were there
        own = numbers[seen == label]
        times = own // count
        assert torch.equal(times, times.sort().values)
    again = draw_order(labels, seed=3, epoch=epoch, balanced=True, device="cpu")
    assert torch.equal(numbers, again)
    assert torch.equal(draw_order(labels, seed=3, epoch=epoch, device="cpu").sort().values, torch.arange(count))


def test_many_samples_of_two_classes_are_ordered_at_once() -> None:
    labels = (torch.arange(200_000) % 50 == 0).long()
    start = time.perf_counter()
    numbers = draw_order(labels, seed=0, epoch=0, balanced=True, device="cpu")
    assert time.perf_counter() - start < 3
    assert torch.bincount(labels[numbers % 200_000]).tolist() == [100_000, 100_000]


def unequal() -> ArrayImages:
    rng = np.random.default_rng(0)
    labels = np.array([0] * 20 + [1] * 4, dtype=np.int64)
    return ArrayImages(rng.integers(0, 256, (24, 16, 16, 3), dtype=np.uint8), labels, "x")


@pytest.mark.parametrize("streamed", [False, True])
def test_repeated_images_are_seen_in_different_ways(streamed: bool) -> None:
    images = unequal()
    data = make_streamed(images, size=16) if streamed else make_resident(images)
    options = {"batch_size": 12, "seed": 0, "epoch": 1, "balanced": True}
    batches = list(data.batches(get_policy("standard"), **options))  # type: ignore[arg-type]
    labels, samples = (torch.cat([getattr(each, name) for each in batches]) for name in ("labels", "samples"))
    assert torch.bincount(labels).tolist() == [12, 12]
    assert torch.equal(labels, torch.from_numpy(images.labels)[samples])
    pictures = torch.cat([each.images for each in batches])
    sample = int(samples[labels == 1][0])
    views = pictures[samples == sample]
    assert len(views) == 3
    assert not torch.equal(views[0], views[1])
    later = next(iter(data.batches(get_policy("standard"), first=1, **options)))  # type: ignore[arg-type]
    assert torch.equal(later.images, batches[1].images)


def source() -> Source:
    images = unequal()
    return Source("x", ("a", "b"), images, images, None)


def test_thinned_sources() -> None:
    few = thin(source(), per_class=3, imbalance=None, seed=0)
    assert np.bincount(few.train.labels).tolist() == [3, 3]
    assert len(few.test) == 24
    tail = thin(source(), per_class=None, imbalance=10, seed=0)
    assert np.bincount(tail.train.labels).tolist() == [20, 2]
    same = thin(source(), per_class=3, imbalance=None, seed=0)
    assert np.array_equal(same.train.as_array(), few.train.as_array())  # type: ignore[attr-defined]
    with pytest.raises(DataError, match="4 training images of 'b', and 5 were asked for"):
        thin(source(), per_class=5, imbalance=None, seed=0)
