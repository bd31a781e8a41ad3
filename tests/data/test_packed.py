"""A packed file holds the same data, opens at once, and is refused when it is damaged."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

import selfcon.data
from selfcon.data.packed import hash_content
from selfcon.data.source import Images, Source
from selfcon.errors import BadImageError, DataError, StorageError, UnsafeError, UsageError


def same(a: Images, b: Images) -> None:
    assert a.labels.tolist() == b.labels.tolist()
    for index in range(len(a)):
        assert np.array_equal(a[index], b[index])


def test_a_folder_packed_is_the_folder(folder: Path, tmp_path: Path) -> None:
    source = selfcon.data.load(folder)
    packed = selfcon.data.load(selfcon.data.pack(source, tmp_path / "x.pack"))
    assert (packed.name, packed.classes, packed.may_flip) == (source.name, source.classes, source.may_flip)
    same(packed.train, source.train)
    same(packed.test, source.test)
    assert packed.train.shape == (32, 32)
    said, found = hash_content(tmp_path / "x.pack")
    assert said == found
    assert [path.name for path in tmp_path.glob(".*")] == []
    # Any reader of safetensors can open it.
    assert load_file(tmp_path / "x.pack")["x_train"].shape == (18, 32, 32, 3)


def test_images_of_different_sizes(folder: Path, tmp_path: Path) -> None:
    Image.fromarray(np.full((5, 7, 3), 9, np.uint8)).save(folder / "train" / "zebra" / "0.png")
    source = selfcon.data.load(folder).hold_out(0.2)
    packed = selfcon.data.load(selfcon.data.pack(source, tmp_path / "x.pack"))
    for split, images in source.splits().items():
        same(packed.splits()[split], images)
    some = np.array([3, 0, 7])
    same(packed.train.take(some), source.train.take(some))


@pytest.mark.medium
def test_npz_folder_and_packed_file_are_the_same_data(cifar100: dict[str, Any], tmp_path: Path) -> None:
    np.savez(tmp_path / "cifar.npz", **cifar100)
    for split in ("train", "test"):
        for number, (pixels, label) in enumerate(zip(cifar100[f"x_{split}"], cifar100[f"y_{split}"], strict=True)):
            place = tmp_path / "png" / split / str(cifar100["classes"][label])
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(place / f"{number:05d}.png", compress_level=1)
    npz, png = selfcon.data.load(tmp_path / "cifar.npz"), selfcon.data.load(tmp_path / "png")
    selfcon.data.pack(png, tmp_path / "cifar.pack")
    start = time.perf_counter()
    packed = selfcon.data.load(tmp_path / "cifar.pack")
    assert time.perf_counter() - start < 0.2
    assert npz.classes == png.classes == packed.classes
    for split in ("train", "test"):
        same(png.splits()[split], npz.splits()[split])
        same(packed.splits()[split], npz.splits()[split])


def test_the_hash_is_of_what_it_was_made_from(folder: Path, tmp_path: Path) -> None:
    def origin() -> str:
        selfcon.data.pack(selfcon.data.load(folder), tmp_path / "x.pack")
        return str(read_header(tmp_path / "x.pack")["__metadata__"]["made_from_sha256"])

    before = origin()
    assert origin() == before
    same_pixels = Image.open(folder / "test" / "zebra" / "0.png")
    same_pixels.save(folder / "test" / "zebra" / "0.png", compress_level=0)
    assert origin() != before  # it is the files that count


def read_header(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    header: dict[str, Any] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return header


def write_header(path: Path, header: dict[str, Any]) -> None:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    path.write_bytes(data[:8] + json.dumps(header).encode().ljust(length) + data[8 + length :])


@pytest.fixture
def packed(folder: Path, tmp_path: Path) -> Path:
    return selfcon.data.pack(selfcon.data.load(folder), tmp_path / "x.pack")


def test_a_cut_file_is_refused(packed: Path) -> None:
    packed.write_bytes(packed.read_bytes()[:-100])
    with pytest.raises(DataError, match="is cut off"):
        selfcon.data.load(packed)


def test_a_flipped_bit_is_found_by_the_check(packed: Path) -> None:
    data = bytearray(packed.read_bytes())
    data[-1000] ^= 1
    packed.write_bytes(data)
    audit, _ = selfcon.data.check(packed)
    assert any("is damaged" in problem for problem in audit.problems)


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header["x_train"].update(shape=[10**12, 32, 32, 3]),
        lambda header: header["x_train"].update(data_offsets=[-1, 5]),
        lambda header: header["x_train"].update(dtype="F99"),
        lambda header: header["x_train"].update(shape="all"),
        lambda header: header["x_train"].update(shape=[-1, -1]),
        lambda header: header["y_test"].update(data_offsets=[0, 72]),
        lambda header: header["__metadata__"].pop("classes"),
        lambda header: header["__metadata__"].update(classes="{"),
        lambda header: header.update(x_train=3),
        lambda header: header["__metadata__"].update(classes='"abc"'),
        lambda header: header["y_test"].update(shape=[9, 1]),
        lambda header: header["x_train"].update(dtype="I64", shape=[18, 32, 4, 3]),
    ],
)
def test_hostile_headers_are_refused(packed: Path, change: Any) -> None:
    header = read_header(packed)
    change(header)
    write_header(packed, header)
    with pytest.raises(UnsafeError):
        selfcon.data.load(packed)


def test_a_giant_header_is_not_read(packed: Path) -> None:
    packed.write_bytes(b"\xff" * 8 + packed.read_bytes()[8:])
    with pytest.raises(UnsafeError, match="more than there can be"):
        selfcon.data.load(packed)


def test_packing_fails_whole(folder: Path, tmp_path: Path) -> None:
    (folder / "test" / "zebra" / "1.png").write_text("broken")
    target = tmp_path / "out" / "x.pack"
    with pytest.raises(BadImageError, match=r"zebra/1\.png is not an image"):
        selfcon.data.pack(selfcon.data.load(folder), target)
    assert list(target.parent.iterdir()) == []
    (folder / "test" / "zebra" / "1.png").unlink()
    (folder / "test" / "zebra" / "1.png").symlink_to("nowhere.png")
    with pytest.raises(BadImageError, match=r"zebra/1\.png cannot be read: No such file"):
        selfcon.data.pack(selfcon.data.load(folder), target)
    precious = tmp_path / "precious.txt"
    precious.write_text("mine")
    with pytest.raises(UsageError, match="is there and is no packed file"):
        selfcon.data.pack(selfcon.data.load("digits"), precious)
    assert precious.read_text() == "mine"
    with pytest.raises(UsageError, match="is there and is no packed file"):
        selfcon.data.pack(selfcon.data.load("digits"), tmp_path)
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        selfcon.data.pack(selfcon.data.load("digits"), blocked / "x.pack")


def test_every_split_and_fact_survives(tmp_path: Path) -> None:
    source: Source = selfcon.data.load("digits").hold_out(0.1)
    packed = selfcon.data.load(selfcon.data.pack(source, tmp_path / "digits.pack"))
    assert packed.may_flip is False
    assert list(packed.splits()) == ["train", "val", "test"]
    for split, images in source.splits().items():
        same(packed.splits()[split], images)
    resident = selfcon.data.make_resident(packed.train.take(np.arange(5)))  # rows of a mapped file
    assert np.array_equal(resident.pixels[3].permute(1, 2, 0).numpy(), source.train[3])
    assert packed.train.take(np.array([7])).describe(0).endswith("[7]")


@pytest.mark.parametrize("encoded", [False, True])
def test_large_images_are_packed_small_or_as_they_are(encoded: bool, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for index, (height, width) in enumerate([(300, 200), (90, 120), (64, 64), (100, 400)] * 2):
        folder = tmp_path / "photos" / ("train" if index < 4 else "val") / f"class{index % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8))
        suffix = "png" if index == 2 else "jpg"
        coarse.resize((width, height), Image.Resampling.BICUBIC).save(folder / f"{index}.{suffix}", quality=90)
    source = selfcon.data.load(tmp_path / "photos")
    packed = selfcon.data.load(str(selfcon.data.pack(source, tmp_path / "photos.pack", max_side=128, encoded=encoded)))
    for images, ours in ((source.train, packed.train), (source.test, packed.test)):
        assert np.array_equal(images.labels, ours.labels)
        for index in range(len(images)):
            whole, small = images[index], ours[index]
            assert max(small.shape[:2]) <= 128
            if max(whole.shape[:2]) <= 128:
                exact = not encoded or images.describe(index).endswith("jpg")
                assert np.array_equal(whole, small) if exact else np.abs(whole.astype(int) - small).mean() < 4
            else:
                assert whole.shape[0] / whole.shape[1] == pytest.approx(small.shape[0] / small.shape[1], rel=0.05)
    ours = packed.train.take(np.array([3, 1]))
    assert np.array_equal(ours[0], packed.train[3])
    with pytest.raises(UsageError, match="at least 1 pixel"):
        selfcon.data.pack(source, tmp_path / "other.pack", max_side=0)


def test_pixels_that_look_like_a_jpeg_are_none(tmp_path: Path) -> None:
    pixels = np.zeros((4, 8, 8, 3), np.uint8)
    pixels[:, 0, 0] = (255, 216, 7)
    np.savez(tmp_path / "x.npz", x_train=pixels, y_train=[0, 1, 0, 1], x_test=pixels, y_test=[0, 1, 0, 1])
    packed = selfcon.data.pack(selfcon.data.load(tmp_path / "x.npz"), tmp_path / "x.pack", encoded=True)
    assert selfcon.data.load(packed).train[0].shape == (8, 8, 3)


@pytest.mark.parametrize("name", ["../../out", "/etc/x", ".hidden", ""])
def test_a_name_that_leads_elsewhere_is_refused(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("selfcon.data.packed._as_file_name", str)  # as a file may say that is not ours
    source = selfcon.data.load(folder)
    packed = selfcon.data.pack(Source(name, source.classes, source.train, source.test), tmp_path / "x.pack")
    with pytest.raises(UnsafeError, match="its name is"):
        selfcon.data.load(packed)


def test_jpegs_stay_as_they_are_wherever_they_come_from(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for split in ("train", "test"):
        for name in ("a", "b"):
            (tmp_path / "photos" / split / name).mkdir(parents=True)
            pixels = rng.integers(0, 256, (20, 24, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / split / name / "x.jpg", quality=80)
    source = selfcon.data.load(tmp_path / "photos")
    once = selfcon.data.load(selfcon.data.pack(source, tmp_path / "once.pack", encoded=True))
    again = selfcon.data.load(selfcon.data.pack(once, tmp_path / "again.pack", encoded=True))
    selfcon.data.write_shards(source, tmp_path / "shards", images_each=10)
    sharded = selfcon.data.load(tmp_path / "shards")
    packed = selfcon.data.load(selfcon.data.pack(sharded, tmp_path / "sharded.pack", encoded=True))
    for index in range(2):
        for other in (once, again):
            assert np.array_equal(other.train[index], source.train[index])
        assert np.array_equal(packed.train[index], sharded.train[index])


@pytest.mark.parametrize("name", [".photos", "a/b"])
def test_names_that_lead_somewhere_are_put_right(name: str, tmp_path: Path) -> None:
    images = selfcon.data.ArrayImages(np.zeros((4, 8, 8, 3), np.uint8), np.arange(4) % 2, "zeros")
    path = selfcon.data.pack(Source(name, ("a", "b"), train=images, test=images), tmp_path / "data.selfcon")
    assert selfcon.data.load(path).name in {"photos", "a-b"}
