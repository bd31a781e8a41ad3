"""Tar files in WebDataset's form: what is written is read again, by us and by WebDataset; nothing bad passes."""

from __future__ import annotations

import importlib
import io
import os
import resource
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import selfcon.data
from selfcon.data.resident import make_resident
from selfcon.data.source import ArrayImages, Source
from selfcon.errors import BadImageError, DataError, InputMissingError, SelfconWarning, UsageError


@pytest.fixture
def digits(tmp_path: Path) -> tuple[Source, Path]:
    source = selfcon.data.load("digits").hold_out(0.1)
    return source, selfcon.data.write_shards(source, tmp_path / "shards", 300)


def write_tar(path: Path, **members: bytes) -> None:
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            member = tarfile.TarInfo(name.replace("__", "."))
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


def png(value: int = 0, side: int = 4) -> bytes:
    written = io.BytesIO()
    Image.fromarray(np.full((side, side, 3), value, np.uint8)).save(written, "PNG")
    return written.getvalue()


@pytest.mark.medium
def test_a_round_trip_changes_nothing(digits: tuple[Source, Path]) -> None:
    source, folder = digits
    assert len(list(folder.glob("train-*.tar"))) == 5
    again = selfcon.data.load(folder)
    assert (again.name, again.classes, again.may_flip) == (source.name, source.classes, False)
    for split, images in source.splits().items():
        ours = make_resident(again.splits()[split], size=16)
        assert ours.fingerprint() == make_resident(images).fingerprint()
    few = again.train.take(np.array([7, 3]))
    assert (few[0] == source.train[7]).all()
    assert few.describe(1).endswith(".tar/000000003.png")
    # the same once more from tar files: the files' bytes are kept
    twice = selfcon.data.write_shards(again, folder.parent / "twice", 300)
    assert all((twice / path.name).read_bytes() == path.read_bytes() for path in folder.iterdir())


@pytest.mark.slow  # needs webdataset
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it leaves files open
def test_webdataset_reads_what_we_write(digits: tuple[Source, Path]) -> None:
    webdataset = importlib.import_module("webdataset")
    source, folder = digits
    urls = [str(path) for path in sorted(folder.glob("train-*.tar"))]
    seen, labels = set(), []
    for key, image, label in (
        webdataset.WebDataset(urls, shardshuffle=False).decode("rgb8").to_tuple("__key__", "png", "cls")
    ):
        assert (image == source.train[int(key)]).all()
        assert label == source.train.labels[int(key)]
        seen.add(key)
        labels.append(label)
    assert len(seen) == len(source.train)
    assert len(set(labels[:100])) == 10  # mixed, though the source is sorted


@pytest.mark.slow  # needs webdataset
def test_we_read_what_webdataset_writes(tmp_path: Path) -> None:
    webdataset = importlib.import_module("webdataset")
    for split, count in (("train", 7), ("val", 3)):
        with webdataset.ShardWriter(str(tmp_path / f"{split}-%06d.tar"), maxcount=3, verbose=0) as writer:
            for index in range(count):
                image = np.full((8, 8, 3), 20 * index, np.uint8)
                writer.write({"__key__": f"{split}/{index:03d}", "png": image, "cls": index % 2})
    source = selfcon.data.load(tmp_path)
    assert source.classes == ("0", "1")
    assert [int(image[0, 0, 0]) for image in (source.train[i] for i in range(7))] == [0, 20, 40, 60, 80, 100, 120]
    assert source.train.labels.tolist() == [0, 1, 0, 1, 0, 1, 0]
    assert len(source.test) == 3
    assert source.val is None


def test_photographs_keep_their_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        for number in range(5):
            path = tmp_path / "photos" / name / f"{number}.JPG"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((9 + number, 12, 3), 40 * number, np.uint8)).save(path, "JPEG")
    source = selfcon.data.load(tmp_path / "photos")
    folder = selfcon.data.write_shards(source, tmp_path / "tars", 3)
    again = selfcon.data.load(folder)
    with tarfile.open(folder / "test-000000.tar") as tar:
        assert {member.name for member in tar} == {f"{index:09d}.{end}" for index in range(2) for end in ("jpg", "cls")}
    assert all((again.train[index] == source.train[index]).all() for index in range(len(source.train)))


def test_what_is_refused(tmp_path: Path) -> None:
    good = {"a__png": png(), "a__cls": b"0", "b__png": png(9), "b__cls": b"1\n"}

    def load() -> Source:
        return selfcon.data.load(tmp_path)

    write_tar(tmp_path / "train-000000.tar", **good)
    with pytest.raises(InputMissingError, match="neither test"):
        load()
    write_tar(tmp_path / "test-000000.tar", **good)
    assert len(load().train) == 2
    for members, match in (
        ({**good, "c__png": png()}, "no label"),
        ({**good, "c__cls": b"1"}, "no image of the sample c"),
        ({**good, "a__jpg": png()}, "two images of the sample a"),
        ({**good, "b__cls": b"cat"}, "no number: 'cat'"),
        ({"__png": png()}, "no samples"),
        ({**good, "b__cls": b"1" * 40}, "no number"),
        ({**good, "b__cls": b"7"}, "more than there are images"),
        ({"readme__txt": b"hello"}, "no samples"),
    ):
        write_tar(tmp_path / "train-000000.tar", **members)
        with pytest.raises(DataError, match=match):
            load()
    write_tar(tmp_path / "train-000000.tar", **good)
    whole = (tmp_path / "train-000000.tar").read_bytes()
    second = whole.index(b"b.png")
    damaged = whole[:second] + b"\xff" * 40 + whole[second + 40 :]
    below_zero = tarfile.TarInfo("x.png").tobuf()
    below_zero = below_zero[:124] + b"\xff" * 12 + below_zero[136:148] + b"        " + below_zero[156:]
    below_zero = below_zero[:148] + b"%06o\0 " % sum(below_zero) + below_zero[156:]
    for data in (whole[: second + 600], whole[:second], whole[:700], whole[:100], b"", damaged, below_zero + whole):
        (tmp_path / "train-000000.tar").write_bytes(data)
        with pytest.raises(DataError, match="cut off or damaged"):
            load()
    (tmp_path / "train-000000.tar").write_bytes(whole)
    for text, match in (("{", "as JSON"), ("[]", "does not describe"), ('{"name": "x", "classes": [1]}', "does not")):
        (tmp_path / "dataset.json").write_text(text)
        with pytest.raises(DataError, match=match):
            load()
    (tmp_path / "dataset.json").write_text('{"name": "x", "classes": ["a", "b"], "may_flip": true}')
    write_tar(tmp_path / "train-000001.tar", **good)
    with pytest.raises(DataError, match="the sample a twice"):
        load()


def test_links_lead_nowhere_and_bad_images_are_named(tmp_path: Path) -> None:
    many = {
        f"{index:04d}__{end}": data
        for index in range(1200)
        for end, data in (("png", png()), ("cls", b"%d" % (index % 2)))
    }
    many["0007__png"] = b"no image"
    write_tar(tmp_path / "train-000000.tar", **many)
    write_tar(tmp_path / "test-000000.tar", a__png=png(), a__cls=b"0", b__png=png(), b__cls=b"1")
    with tarfile.open(tmp_path / "test-000000.tar", "a") as tar:
        link = tarfile.TarInfo("c.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    source = selfcon.data.load(tmp_path)
    assert len(source.test) == 2
    with pytest.raises(BadImageError, match=r"train-000000.tar/0007.png is not an image"):
        source.train[7]
    with pytest.warns(SelfconWarning, match=r"0007.png"):
        assert len(selfcon.data.load(tmp_path, bad_images="skip").train) == 1199


def test_long_names_odd_members_and_many_files(tmp_path: Path) -> None:
    """Names beyond 100 letters in both ways of writing them; what is no sample is left; no file is kept open."""
    long = "class/" + "n" * 120
    for number, style in enumerate((tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)):
        with tarfile.open(tmp_path / f"train-00000{number}.tar", "w", format=style) as tar:
            for name, data in ((f"{long}{number}.JPG", png()), (f"{long}{number}.cls", b"%d" % number), (".cls", b"7")):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    for number in range(2, 60):
        write_tar(tmp_path / f"train-{number:06d}.tar", x__png=png(), x__cls=b"0")
    write_tar(tmp_path / "test-000000.tar", a__png=png(), a__cls=b"0", b__png=png(), b__cls=b"1")
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + 12, limit[1]))
    try:
        source = selfcon.data.load(tmp_path)
        assert all(source.train[index].shape == (4, 4, 3) for index in range(60))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    assert source.train.labels[:2].tolist() == [0, 1]
    again = selfcon.data.load(selfcon.data.write_shards(source, tmp_path / "again", 100))
    assert len(again.train) == 60
    (tmp_path / "train-000005.tar").write_bytes(b"")
    with pytest.raises(DataError, match="cut off at byte"):
        source.train[5]


def test_a_changed_image_is_noticed_without_reading_it(tmp_path: Path) -> None:
    digits = selfcon.data.load("digits")
    assert isinstance(digits.train, ArrayImages)
    pixels = digits.train.as_array()[:150].copy()
    found = []
    for name in ("before", "after"):
        train = ArrayImages(pixels, digits.train.labels[:150], "digits", may_flip=False)
        folder = selfcon.data.write_shards(replace(digits, train=train), tmp_path / name, 300)
        read = selfcon.data.load(folder).train
        found.append(read.list_files(range(len(read))))
        pixels[70] = np.random.default_rng(0).integers(0, 256, pixels[70].shape)
    assert len(found[0]) == len(found[1])
    assert found[0] != found[1]


def test_a_pipe_is_no_tar_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "train-000000.tar")
    with pytest.raises(DataError, match="has no folders in it"):
        selfcon.data.load(tmp_path)


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match="not empty"):
        selfcon.data.write_shards(selfcon.data.load("digits"), tmp_path / "mine", 100)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
