"""Images that are read while the device works: the same batches as ever, from wherever they come."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision.transforms.functional as tvf
from PIL import Image

import selfcon
from selfcon.data import cutting, readers, scan
from selfcon.data.cutting import fit
from selfcon.data.draws import draw
from selfcon.data.images import Pixels, read_image
from selfcon.data.parts import Part
from selfcon.data.policies import POLICIES, Policy
from selfcon.data.resident import make_resident
from selfcon.data.source import ArrayImages, FileImages
from selfcon.data.split import Batch
from selfcon.data.store import Store
from selfcon.data.streamed import Streamed, make_streamed
from selfcon.errors import BadImageError, HungError, UsageError

SIZES = [(90, 61), (48, 48), (130, 200), (33, 77)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Photographs of sorts, of different sizes, in ImageFolder's layout."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 14), ("val", 6)):
        for index in range(count):
            height, width = SIZES[index % 4]
            coarse = rng.integers(0, 256, (5, 5, 3), dtype=np.uint8)
            image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
            path = tmp_path / "photos" / split / f"class{index % 2}" / f"{index:02d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            image.save(path, quality=95)
    return tmp_path / "photos"


def stream(folder: Path, budget: int | None = None) -> Streamed:
    return make_streamed(selfcon.data.load(str(folder)).train, size=32, budget=budget)


def equal(one: Batch, other: Batch) -> bool:
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in ("images", "labels", "samples"))


@pytest.mark.parametrize("policy", ["standard", "simple", "none"])
def test_batches_are_those_of_images_that_stay(policy: str) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (20, 24, 24, 3), dtype=np.uint8)
    images = ArrayImages(pixels, np.arange(20) % 4, "random")
    options: Any = {"batch_size": 8, "seed": 3, "epoch": 2, "views": 2}
    kept, read = make_resident(images), make_streamed(images, size=24)
    assert torch.equal(kept.mean, read.mean)
    pairs = list(zip(kept.batches(POLICIES[policy], **options), read.batches(POLICIES[policy], **options), strict=True))
    assert [len(one.labels) for one, _ in pairs] == [8, 8, 4]
    for one, other in pairs:
        assert torch.equal(one.labels, other.labels)
        torch.testing.assert_close(one.images, other.images, atol=2e-5, rtol=1e-4)
    for one, other in zip(kept.plain_batches(batch_size=7), read.plain_batches(batch_size=7), strict=True):
        torch.testing.assert_close(one.images, other.images)
    assert torch.equal(kept.pictures(torch.tensor([3, 5])), read.pictures(torch.tensor([3, 5])))


def test_a_step_of_ones_own_is_that_of_images_that_stay(folder: Path) -> None:
    def darken(pixels: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:  # which no other process could be sent
        return pixels * numbers[:, :1, None, None]

    pixels = np.random.default_rng(0).integers(0, 256, (20, 24, 24, 3), dtype=np.uint8)
    images = ArrayImages(pixels, np.arange(20) % 4, "random")
    options: Any = {"batch_size": 8, "seed": 3, "epoch": 2, "views": 2}
    for policy in (Policy(crop_and_flip=True, then=darken), Policy(then=darken)):
        kept, read = (
            each.batches(policy, **options) for each in (make_resident(images), make_streamed(images, size=24))
        )
        for one, other in zip(kept, read, strict=True):
            torch.testing.assert_close(one.images, other.images, atol=2e-5, rtol=1e-4)
    files = selfcon.data.load(str(folder)).train
    alone, helped = (make_streamed(files, size=32, workers=workers).batches(policy, **options) for workers in (0, 2))
    assert all(equal(*pair) for pair in zip(alone, helped, strict=True))


def crops_as_torchvision(images: list[Pixels], size: int, policy: Policy) -> float:
    """The largest difference of a batch's crops to torchvision's, one by one."""
    data = make_streamed(FileLike(images), size=size)
    data = replace(data, mean=torch.zeros(3), std=torch.ones(3))
    (batch,) = data.batches(policy, batch_size=len(images), seed=0, epoch=0)
    worst = 0.0
    for row, sample in enumerate(batch.samples.tolist()):
        image = torch.from_numpy(np.array(images[sample])).permute(2, 0, 1).float() / 255
        height, width = image.shape[1:]
        drawn = draw(policy, torch.tensor([sample]), height=height, width=width, seed=0, epoch=0)
        box = [int(getattr(drawn, name)[0]) for name in ("top", "left", "height", "width")]
        theirs = tvf.resized_crop(image, *box, [size, size], antialias=True)
        theirs = tvf.hflip(theirs) if bool(drawn.flip[0]) else theirs
        worst = max(worst, float((theirs - batch.images[row]).abs().max()))
    return worst


class FileLike(FileImages):
    """Images in memory that have different sizes."""

    def __init__(self, images: list[Pixels]) -> None:
        super().__init__([Path(str(number)) for number in range(len(images))], np.zeros(len(images), np.int64))
        self.decoded = images

    def __getitem__(self, index: int) -> Pixels:
        return self.decoded[index]


def test_crops_equal_torchvisions() -> None:
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (*SIZES[row % 4], 3), dtype=np.uint8) for row in range(40)]
    assert crops_as_torchvision(images, 72, POLICIES["simple"]) < 1e-5
    # A crop of more than three times the output is made small by itself, in whole steps of 1/255.
    assert crops_as_torchvision(images, 20, POLICIES["simple"]) < 3e-3


@pytest.mark.medium
def test_crops_of_real_images_equal_torchvisions() -> None:
    root = Path(os.environ.get("SELFCON_TEST_DATA", "nowhere"))
    if not root.is_dir():
        pytest.skip("SELFCON_TEST_DATA does not name a folder with real images")
    paths = [
        path
        for name in ("voc2012-small", "coco-small", "cub-small", "imagenette-small")
        for path in sorted((root / name).rglob("*.[jJ][pP]*[gG]"))[:160]
    ]
    paths = paths[:500]
    assert len(paths) == 500
    worst = [
        crops_as_torchvision([read_image(path) for path in paths[first : first + 50]], 224, POLICIES["simple"])
        for first in range(0, 500, 50)
    ]
    assert max(worst) < 3e-3


def test_evaluation_sees_the_middle_of_images() -> None:
    image = np.random.default_rng(0).integers(0, 256, (300, 401, 3), dtype=np.uint8)
    theirs = tvf.center_crop(tvf.resize(torch.from_numpy(image).permute(2, 0, 1), [256], antialias=True), [224, 224])
    assert torch.equal(torch.from_numpy(fit(image, 224)).permute(2, 0, 1), theirs)
    assert fit(image[:32, :32], 32) is not None
    assert np.array_equal(fit(image[:32, :32], 32), image[:32, :32])


def test_a_folder_a_packed_file_and_going_on_give_the_same_batches(folder: Path, tmp_path: Path) -> None:
    packed = selfcon.data.pack(selfcon.data.load(str(folder)), tmp_path / "photos.pack")
    options: Any = {"batch_size": 4, "seed": 1, "epoch": 5, "views": 2}
    policy = POLICIES["standard"]
    whole = list(stream(folder).batches(policy, **options))
    assert len(whole) == 4
    again = list(stream(packed).batches(policy, **options))
    rest = list(stream(folder).batches(policy, first=2, **options))
    assert all(equal(*pair) for pair in zip(whole, again, strict=True))
    assert all(equal(*pair) for pair in zip(whole[2:], rest, strict=True))
    halves = [list(stream(folder).batches(policy, part=Part(rank, 2), **options)) for rank in range(2)]
    for batch, *shares in zip(whole, *halves, strict=True):
        assert torch.equal(torch.cat([share.samples for share in shares]), batch.samples)
        first = batch.images.view(2, -1, *batch.images.shape[1:])
        joined = torch.cat([share.images.view(2, -1, *batch.images.shape[1:]) for share in shares], dim=1)
        torch.testing.assert_close(joined, first)


def test_what_was_decoded_stays_as_long_as_there_is_room(folder: Path) -> None:
    roomy, tight = stream(folder), stream(folder, budget=0)
    assert roomy.stored_bytes == sum(3 * height * width for height, width in [SIZES[row % 4] for row in range(14)])
    assert tight.stored_bytes == 0
    options: Any = {"batch_size": 4, "seed": 0, "epoch": 0}
    pairs = zip(*(data.batches(POLICIES["simple"], **options) for data in (roomy, tight)), strict=True)
    assert all(equal(*pair) for pair in pairs)
    assert "read from disk" in roomy.describe_place()


def test_some_samples_alone_and_the_fingerprint(folder: Path) -> None:
    data = stream(folder)
    some = data.take(torch.tensor([5, 2]))
    assert torch.equal(some.labels, data.labels[[5, 2]])
    (batch,) = some.plain_batches(batch_size=9)
    torch.testing.assert_close(batch.images, next(data.plain_batches(batch_size=14)).images[[5, 2]])
    assert torch.equal(data.batch(torch.tensor([5, 2]), Policy(), seed=0, epoch=0).images, batch.images)
    assert data.fingerprint() == stream(folder).fingerprint() != some.fingerprint()
    file = next(folder.rglob("train/*/*.jpg"))
    Image.open(file).rotate(180).save(file, quality=30)
    assert stream(folder).fingerprint() != data.fingerprint()


def test_what_goes_wrong_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = stream(folder, budget=0)
    with pytest.raises(UsageError, match="RandAugment"):
        next(data.batches(POLICIES["randaugment"], batch_size=4, seed=0, epoch=0))
    with pytest.raises(UsageError, match="at least one view"):
        next(data.batches(POLICIES["simple"], batch_size=4, seed=0, epoch=0, views=0))
    broken = next(folder.rglob("train/*/*.jpg"))
    broken.write_bytes(broken.read_bytes()[:200])
    with pytest.raises(BadImageError, match=broken.name):
        list(data.batches(POLICIES["simple"], batch_size=4, seed=0, epoch=0))
    monkeypatch.setattr(scan, "PATIENCE", 0.2)
    monkeypatch.setattr(Store, "__getitem__", lambda self, index: time.sleep(1.5))
    with pytest.raises(HungError, match=r"\.jpg in 0 seconds"):
        list(data.plain_batches(batch_size=4))


@pytest.mark.parametrize("workers", [0, 2])
def test_slow_readers_that_go_on_are_waited_for(folder: Path, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data = make_streamed(selfcon.data.load(str(folder)).train, size=32, workers=workers)
    read = Store.__getitem__

    def slowly(self: Store, index: int) -> Pixels:
        time.sleep(0.08)
        return read(self, index)

    monkeypatch.setattr(scan, "PATIENCE", 0.3)  # until something comes of any, not for a batch or its share
    monkeypatch.setattr(cutting, "_TOGETHER", 1)
    monkeypatch.setattr(Store, "__getitem__", slowly)
    assert [len(batch.labels) for batch in data.plain_batches(batch_size=7)] == [7, 7]


@pytest.mark.parametrize("workers", [0, 2])
def test_what_nobody_waits_for_is_not_read(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "_TOGETHER", 1)
    slow = make_streamed(FileLike([np.zeros((40, 40, 3), np.uint8)] * 400), size=32, budget=0, workers=workers)

    def slowly(self: FileLike, index: int) -> Pixels:
        time.sleep(0.02)
        return self.decoded[index]

    monkeypatch.setattr(FileLike, "__getitem__", slowly)
    batches = slow.plain_batches(batch_size=80)
    assert len(next(batches).labels) == 80
    start = time.monotonic()
    batches.close()  # type: ignore[attr-defined]
    assert time.monotonic() - start < 0.8  # where one batch takes as long with two readers


def test_images_that_need_no_decoding_are_not_kept_again() -> None:
    images = ArrayImages(np.zeros((20, 40, 40, 3), np.uint8), np.zeros(20, np.int64), "grey")
    data = make_streamed(images, size=32)
    list(data.plain_batches(batch_size=10))
    assert data.stored_bytes == 0
    assert "main memory" not in data.describe_place()


@pytest.mark.parametrize("policy", ["standard", "none"])
def test_processes_give_the_same_batches(folder: Path, policy: str) -> None:
    images = selfcon.data.load(str(folder)).train
    options: Any = {"batch_size": 5, "seed": 1, "views": 2}
    alone, helped, large = (make_streamed(images, size=32, workers=workers) for workers in (0, 2, 3))
    for epoch in range(2):
        batches = [list(each.batches(POLICIES[policy], epoch=epoch, **options)) for each in (alone, helped, large)]
        assert all(equal(one, two) and equal(one, three) for one, two, three in zip(*batches, strict=True))
    assert helped.stored_bytes == alone.stored_bytes  # what processes decode stays, too
    first = next(helped.batches(POLICIES[policy], epoch=0, **options))  # and is left in the middle
    assert equal(first, next(alone.batches(POLICIES[policy], epoch=0, **options)))
    at_once = [helped.batches(POLICIES[policy], epoch=3, **options) for _ in range(5)]  # more than there are slots for
    for many in zip(*at_once, alone.batches(POLICIES[policy], epoch=3, **options), strict=True):
        assert all(equal(batch, many[-1]) for batch in many)
    begun = helped.batches(POLICIES[policy], epoch=4, **options)
    seen = [next(begun)]
    wide = {**options, "batch_size": 14, "views": 3}  # more than there was room for
    pairs = zip(*(each.batches(POLICIES[policy], epoch=9, **wide) for each in (alone, helped)), strict=True)
    assert all(equal(*pair) for pair in pairs)
    seen += begun  # whose processes were replaced meanwhile
    assert all(equal(*pair) for pair in zip(seen, alone.batches(POLICIES[policy], epoch=4, **options), strict=True))


def slowly_again(data: Streamed) -> Iterator[list[Batch]]:
    """All batches again and again, until it is noticed that somebody who makes them is gone."""
    for _ in range(100):
        yield list(data.plain_batches(batch_size=4))
        time.sleep(0.1)


@pytest.mark.medium
def test_processes_tell_what_goes_wrong_and_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = selfcon.data.load(str(folder)).train
    data = make_streamed(images, size=32, budget=0, workers=2)
    broken = next(folder.rglob("train/*/*.jpg"))
    whole = broken.read_bytes()
    broken.write_bytes(whole[:200])
    with pytest.raises(BadImageError, match=broken.name):
        list(data.plain_batches(batch_size=4))
    broken.write_bytes(whole)
    assert len(list(data.plain_batches(batch_size=4))) == 4
    monkeypatch.setattr(readers, "_GRACE", 1.0)
    (pool,) = data.images.helpers
    gone = list(pool._pool._processes)
    assert len(gone) == 2
    os.kill(gone[0], signal.SIGKILL)
    assert len(list(data.plain_batches(batch_size=4))) == 4  # what is under way is finished
    with pytest.raises(HungError, match="has ended"):
        list(itertools.chain.from_iterable(slowly_again(data)))
    assert len(list(data.plain_batches(batch_size=4))) == 4  # others take over
    slow = make_streamed(FileLike([np.zeros((40, 40, 3), np.uint8)] * 8), size=32, budget=0, workers=2)
    monkeypatch.setattr(FileLike, "__getitem__", lambda self, index: time.sleep(3))
    monkeypatch.setattr(scan, "PATIENCE", 0.5)
    with pytest.raises(HungError, match="0 and 1 more"):
        list(slow.plain_batches(batch_size=4))
    left = {*gone, *(data.images.helpers[0]._pool._processes or ())}
    del data, slow, pool
    gc.collect()
    deadline = time.monotonic() + 20
    while left & {child.pid for child in multiprocessing.active_children()} and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left & {child.pid for child in multiprocessing.active_children()}
