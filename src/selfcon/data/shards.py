"""Tar files in WebDataset's form: of each sample an image and its label (`0017.jpg`, `0017.cls`), in whatever order.

A folder holds train-000000.tar, train-000001.tar, ... and the same of test (or val; of both, val is the held-out part),
and perhaps dataset.json, which names the classes. Nothing is unpacked: tar files are not compressed, so a sample is
read from its place, in any order and by any number of processes.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from PIL import Image

from selfcon.data.images import SUFFIXES, Pixels, decode
from selfcon.data.scan import PATIENCE, in_threads
from selfcon.data.source import FileImages, Images, Source, check_source
from selfcon.data.splits import Labels
from selfcon.errors import DataError, InputMissingError, SelfconError, StorageError, UsageError
from selfcon.progress import track

_NAME = re.compile(r"(train|val|test)-\d+\.tar")
_ABOUT = "dataset.json"
_LONGEST_LABEL, _LONGEST_NAME, _LARGEST_IMAGE = 32, 1 << 16, 1 << 30  # bytes
_SHUFFLED = 0


class Shard:
    """One tar file, opened for each reading: there may be more of them than a process may hold open."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, start: int, size: int) -> bytes:
        try:
            with self.path.open("rb") as file:
                data = os.pread(file.fileno(), size, start)
        except OSError as error:
            raise DataError(f"{self.path} cannot be read ({error.strerror or error}).") from error
        if len(data) < size:
            raise DataError(f"{self.path} is cut off at byte {start + len(data):,}.")
        return data

    def name_of(self, start: int) -> str:
        """What the member is called whose contents begin there, or the first 100 letters of it."""
        return self.read(start - tarfile.BLOCKSIZE, 100).split(b"\0")[0].decode("utf-8", "replace")


@dataclass(eq=False)
class ShardedImages(Images):
    """Images in tar files, decoded when they are asked for."""

    shards: Sequence[Shard]
    places: Labels  # [N, 3]: which shard, where in it, how many bytes
    labels: Labels  # [N]
    may_flip: bool = True

    def contents(self, index: int) -> tuple[str, bytes]:
        """The name of the sample's image file, and what is in it."""
        shard, start, size = (int(value) for value in self.places[index])
        return self.shards[shard].name_of(start), self.shards[shard].read(start, size)

    def __getitem__(self, index: int) -> Pixels:
        return decode(Path(self.describe(index)), self.contents(index)[1]).pixels

    def take(self, indices: Labels) -> Self:
        return replace(self, places=self.places[indices], labels=self.labels[indices])

    def describe(self, index: int) -> str:
        shard, start, _ = (int(value) for value in self.places[index])
        return f"{self.shards[shard].path}/{self.shards[shard].name_of(start)}"

    def list_files(self, indices: Sequence[int]) -> bytes:
        return np.ascontiguousarray(self.places[indices]).tobytes()


def is_sharded(folder: Path) -> bool:
    """Whether a folder holds tar files of training images."""
    return bool(_list_shards(folder).get("train"))


def _list_shards(folder: Path) -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    try:
        paths = sorted(folder.iterdir())
    except OSError as error:
        raise DataError(f"{folder} cannot be read ({error.strerror or error}).") from error
    for path in paths:
        if (match := _NAME.fullmatch(path.name)) and path.is_file():
            found.setdefault(match[1], []).append(path)
    return found


def load_shards(folder: Path) -> Source:
    """The data set in a folder of tar files."""
    shards = _list_shards(folder)
    parts = [part for part in ("val", "test") if part in shards]
    if not parts:
        raise InputMissingError(f"{folder} has train-*.tar but neither test-*.tar nor val-*.tar beside it.")
    about = _read_about(folder / _ABOUT)
    images = {part: _index(shards[part], ours=about is not None) for part in ("train", *parts)}
    if about is None:
        if (most := int(images["train"].labels.max())) >= len(images["train"]):
            raise DataError(f"{folder} has the label {most} in train, more than there are images.")
        about = {"name": folder.resolve().name, "classes": [str(label) for label in range(most + 1)], "may_flip": True}
    for each in images.values():
        each.may_flip = about["may_flip"]
    return check_source(
        Source(
            name=about["name"],
            classes=tuple(about["classes"]),
            train=images["train"],
            test=images[parts[-1]],
            val=images["val"] if len(parts) == 2 else None,
        )
    )


def _read_about(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        if not path.is_file():
            raise ValueError("it is no plain file")  # noqa: TRY301 - said like the others
        about = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as JSON ({error}).") from error
    kinds = {"name": str, "classes": list, "may_flip": bool}
    described = isinstance(about, dict) and all(isinstance(about.get(key), kind) for key, kind in kinds.items())
    if not described or not all(isinstance(name, str) for name in about["classes"]):
        raise DataError(f"{path} does not describe a data set by name, classes and may_flip.")
    return about  # type: ignore[no-any-return]


def _index(paths: Sequence[Path], *, ours: bool) -> ShardedImages:
    """Where every sample is, from the headers alone. Those that `write_shards` wrote are put in their first order."""
    shards = [Shard(path) for path in paths]
    samples: list[tuple[str, int, int, int, int]] = []
    listed = in_threads(_list_samples, shards, describe=lambda shard: str(shard.path), patience=20 * PATIENCE)
    for number, found in enumerate(track(listed, "Listing shards", len(shards))):
        samples += [(key, number, start, size, label) for key, start, size, label in found]
    if not samples:
        raise DataError(f"{paths[0].parent} has no samples in {paths[0].name} and its like.")
    if ours:
        samples.sort()
        twice = next((a[0] for a, b in itertools.pairwise(samples) if a[0] == b[0]), None)
        if twice is not None:
            raise DataError(f"{paths[0].parent} has the sample {twice} twice.")
    table = np.array([sample[1:] for sample in samples], dtype=np.int64)
    return ShardedImages(shards, table[:, :3].copy(), table[:, 3].copy())


def _list_samples(shard: Shard) -> list[tuple[str, int, int, int]]:
    """Key, place, size and label of every sample of a tar file."""
    images: dict[str, tuple[int, int]] = {}
    labels: dict[str, int] = {}
    for name, start, size in _members(shard.path):
        key, suffix = _split_name(name)
        known: dict[str, Any] = labels if suffix == ".cls" else images
        if not key.rpartition("/")[2] or (suffix != ".cls" and suffix not in SUFFIXES):
            continue
        if key in known:
            raise DataError(f"{shard.path} has two {'labels' if known is labels else 'images'} of the sample {key}.")
        if suffix == ".cls":
            labels[key] = _read_label(shard, name, start, size)
        elif size > _LARGEST_IMAGE:
            raise DataError(f"{shard.path} has an image {name} of {size:,} bytes.")
        else:
            images[key] = start, size
    for these, others, what in ((images, labels, "label (.cls)"), (labels, images, "image")):
        missing = next((key for key in these if key not in others), None)
        if missing is not None:
            raise DataError(f"{shard.path} has no {what} of the sample {missing}.")
    return [(key, *place, labels[key]) for key, place in images.items()]


def _members(path: Path) -> Iterator[tuple[str, int, int]]:
    """Name, place and size of every plain file; links and devices are nothing to us.

    Headers are walked here because `tarfile` takes a damaged one for the end, and a size below zero for a way back.
    """
    end, place, long_name = path.stat().st_size, 0, None
    with path.open("rb") as file:
        while True:
            file.seek(place)
            block = file.read(tarfile.BLOCKSIZE)
            if place and block == b"\0" * tarfile.BLOCKSIZE:
                return
            try:
                member = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
            except (tarfile.HeaderError, ValueError) as error:
                raise DataError(f"{path} is cut off or damaged at byte {place:,}.") from error
            start = place + tarfile.BLOCKSIZE
            if member.size < 0 or start + member.size > end:
                raise DataError(f"{path} is cut off or damaged in {member.name}.")
            place = start + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
            if member.type in (tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE):
                if member.size > _LONGEST_NAME:
                    raise DataError(f"{path} has a name of {member.size:,} bytes at byte {start:,}.")
                file.seek(start)
                long_name = _long_name(file.read(member.size), member.type) or long_name
                continue
            if member.type in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE):
                yield long_name or member.name, start, member.size
            long_name = None


def _long_name(data: bytes, kind: bytes) -> str | None:
    """A name that does not fit the header, from what stands before it."""
    if kind == tarfile.GNUTYPE_LONGNAME:
        return data.rstrip(b"\0").decode("utf-8", "surrogateescape")
    found = re.search(rb"(?:^|\n)\d+ path=([^\n]*)\n", data)
    return found[1].decode("utf-8", "surrogateescape") if found else None


def _split_name(name: str) -> tuple[str, str]:
    """WebDataset's key, up to the first dot of the last part, and the ending."""
    folder, _, last = name.rpartition("/")
    stem, _, ending = last.partition(".")
    return f"{folder}/{stem}" if folder else stem, f".{ending.lower()}"


def _read_label(shard: Shard, name: str, start: int, size: int) -> int:
    text = shard.read(start, min(size, _LONGEST_LABEL)).decode("ascii", "replace").strip()
    if size > _LONGEST_LABEL or not re.fullmatch(r"\d{1,9}", text):
        raise DataError(f"{shard.path} has a label {name} that is no number: {text[:20]!r}.")
    return int(text)


def write_shards(source: Source, folder: str | Path, images_each: int) -> Path:
    """Write a data set as a folder of tar files, whole or not at all. Files keep their bytes, arrays become PNG.

    Training images are mixed, so that readers which only go forwards see all classes.
    """
    if images_each < 1:
        raise UsageError(f"A tar file holds at least one image, not {images_each}.")
    folder = Path(folder).absolute()
    staged = None
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(f"{folder} is there and not empty: choose another name.")
        folder.parent.mkdir(parents=True, exist_ok=True)
        staged = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", suffix=".part", dir=folder.parent))
        for split, images in source.splits().items():
            order = np.arange(len(images))
            if split == "train":
                np.random.default_rng(_SHUFFLED).shuffle(order)
            _write_split(staged, split, images, order, images_each)
        about = {"name": source.name, "classes": list(source.classes), "may_flip": source.may_flip}
        (staged / _ABOUT).write_text(json.dumps(about), encoding="ascii")
        staged.chmod(0o755)
        staged.replace(folder)
    except OSError as error:
        if isinstance(error, SelfconError):
            raise
        raise StorageError(f"{folder} cannot be written: {error.strerror or error}.") from error
    finally:
        if staged is not None:
            shutil.rmtree(staged, ignore_errors=True)
    return folder


def _write_split(folder: Path, split: str, images: Images, order: Labels, images_each: int) -> None:
    contents = in_threads(
        lambda index: _contents(images, int(index)), order, describe=lambda index: images.describe(int(index))
    )
    places = iter(zip(order, track(contents, f"Packing {split}", len(order)), strict=True))
    for number in range(-(-len(order) // images_each)):
        with (folder / f"{split}-{number:06d}.tar").open("wb") as file:
            with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
                for _, (index, (suffix, data)) in zip(range(images_each), places, strict=False):
                    _add(tar, f"{index:09d}{suffix}", data)
                    _add(tar, f"{index:09d}.cls", str(images.labels[index]).encode())
            os.fsync(file.fileno())


def _contents(images: Images, index: int) -> tuple[str, bytes]:
    """The ending and the bytes of a sample's image file, once they are known to be one."""
    if isinstance(images, FileImages):
        path = images.paths[index]
        try:
            data = path.read_bytes()
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}.") from error
        decode(path, data)
        return path.suffix.lower(), data
    if isinstance(images, ShardedImages):
        name, data = images.contents(index)
        decode(Path(images.describe(index)), data)
        if (suffix := _split_name(name)[1]) in SUFFIXES:  # not so where a long name is cut off
            return suffix, data
    written = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(images[index])).save(written, "PNG")
    return ".png", written.getvalue()


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))
