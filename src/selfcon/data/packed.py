"""A data set decoded once into one file that is mapped, not read: later starts take no time.

The file is a valid safetensors file. For each split it holds `x_SPLIT` (uint8, [N, H, W, 3]; or, where sizes differ,
all pixels in a row with `shape_SPLIT` [N, 2]; or image files as they are, in a row with `end_SPLIT` [N]) and
`y_SPLIT`; its metadata hold the classes, a hash of what it was made
from and one of what it holds.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
from PIL import Image

from selfcon.data.images import MAX_PIXELS, Pixels, decode
from selfcon.data.scan import in_threads
from selfcon.data.shards import ShardedImages
from selfcon.data.source import ArrayImages, FileImages, Images, Source, check_source
from selfcon.data.splits import Labels
from selfcon.errors import BadImageError, DataError, SelfconError, StorageError, UnsafeError, UsageError
from selfcon.progress import track

_FORMAT = "selfcon-pack-1"
_DTYPES: dict[str, np.dtype[Any]] = {"U8": np.dtype("<u1"), "I64": np.dtype("<i8")}
_MAX_HEADER = 100_000_000
_MOST_SIDES = 4
_LONGEST_NAME = 200  # bytes; file systems end at 255
_JPEG, _QUALITY = b"\xff\xd8", 95


@dataclass(eq=False)
class PackedImages(Images):
    """Images of different sizes, one behind the other in a mapped file."""

    flat: Pixels  # [bytes]
    starts: Labels  # [N]
    shapes: Labels  # [N, 2]
    labels: Labels
    name: str
    may_flip: bool = True
    encoded = False

    def __getitem__(self, index: int) -> Pixels:
        height, width = (int(side) for side in self.shapes[index])
        start = int(self.starts[index])
        return self.flat[start : start + height * width * 3].reshape(height, width, 3)

    def take(self, indices: Labels) -> Self:
        return replace(self, starts=self.starts[indices], shapes=self.shapes[indices], labels=self.labels[indices])

    def describe(self, index: int) -> str:
        return f"{self.name}[{index}]"

    def list_files(self, indices: Sequence[int]) -> bytes:
        return np.ascontiguousarray(self.shapes[indices]).tobytes()


@dataclass(eq=False)
class EncodedImages(Images):
    """Image files, one behind the other in a mapped file, decoded when they are asked for."""

    flat: Pixels  # [bytes]
    starts: Labels  # [N]
    ends: Labels  # [N]
    labels: Labels
    name: str
    may_flip: bool = True

    def contents(self, index: int) -> tuple[str, bytes]:
        """A name for the sample, and its image file."""
        return self.describe(index), self.flat[int(self.starts[index]) : int(self.ends[index])].tobytes()

    def __getitem__(self, index: int) -> Pixels:
        name, data = self.contents(index)
        return decode(Path(name), data).pixels

    def take(self, indices: Labels) -> Self:
        return replace(self, starts=self.starts[indices], ends=self.ends[indices], labels=self.labels[indices])

    def describe(self, index: int) -> str:
        return f"{self.name}[{index}]"

    def list_files(self, indices: Sequence[int]) -> bytes:
        return np.ascontiguousarray(self.ends[indices] - self.starts[indices]).tobytes()


@dataclass(frozen=True)
class Form:
    """How images are packed: made small where their longer side is above `max_side`, as pixels or as image files."""

    max_side: int | None = None
    encoded: bool = False

    def __post_init__(self) -> None:
        if self.max_side is not None and self.max_side < 1:
            raise UsageError(f"The longer side must be at least 1 pixel, not {self.max_side}.")

    def shape(self, raw: bytes, pixels: Pixels, *, is_file: bool) -> tuple[bytes, tuple[int, int]]:
        """What is stored of an image that was read from `raw`, perhaps a file, and its height and width."""
        small = _shrink(pixels, self.max_side)
        if not self.encoded:
            return np.ascontiguousarray(small).tobytes(), (small.shape[0], small.shape[1])
        if is_file and small is pixels and raw[:2] == _JPEG:
            return raw, (small.shape[0], small.shape[1])
        buffer = BytesIO()
        Image.fromarray(small).save(buffer, format="JPEG", quality=_QUALITY)
        return buffer.getvalue(), (small.shape[0], small.shape[1])


def _shrink(pixels: Pixels, max_side: int | None) -> Pixels:
    height, width = pixels.shape[:2]
    if max_side is None or max(height, width) <= max_side:
        return pixels
    size = [max(1, round(side * max_side / max(height, width))) for side in (width, height)]
    return np.asarray(Image.fromarray(pixels).resize((size[0], size[1]), Image.Resampling.BILINEAR))


def pack(source: Source, path: str | Path, *, max_side: int | None = None, encoded: bool = False) -> Path:
    """Write a data set into one file, whole or not at all; only a packed file is ever replaced. Returns its path.

    Images whose longer side is above `max_side` are made small. With `encoded`, JPEG files are stored as they are and
    the rest as JPEG: a smaller file, that is decoded whenever it is read.
    """
    path, form = Path(path), Form(max_side, encoded)
    if path.exists() and not (path.is_file() and is_packed(path)):
        raise UsageError(f"{path} is there and is no packed file: it is not replaced.")
    staged = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with staged.open("xb") as file:
            _write(file, source, form)
            file.flush()
            os.fsync(file.fileno())
        staged.replace(path)
    except OSError as error:
        if isinstance(error, SelfconError):
            raise
        raise StorageError(f"{path} cannot be written: {error.strerror or error}.") from error
    finally:
        with contextlib.suppress(OSError):
            staged.unlink(missing_ok=True)
    return path


def _write(file: BinaryIO, source: Source, form: Form) -> None:
    metadata = {
        "format": _FORMAT,
        "name": _as_file_name(source.name),
        "classes": json.dumps(source.classes),
        "may_flip": json.dumps(source.may_flip),
        "made_from_sha256": "0" * 64,
        "content_sha256": "0" * 64,
    }
    # The shapes are known only at the end, so room is left for the header and filled then; padding it is allowed.
    room = len(json.dumps(metadata)) + 4096
    file.write(b" " * (8 + room))
    tensors: dict[str, Any] = {}
    origin, content = hashlib.sha256(json.dumps(source.classes).encode()), hashlib.sha256()
    end = 0

    def add(name: str, dtype: str, shape: list[int], size: int) -> None:
        nonlocal end
        tensors[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size

    for split, images in source.splits().items():
        origin.update(f"{split} {len(images)}".encode() + images.labels.tobytes())
        shapes, ends = [], []
        size = 0
        for raw, pixels in track(_read(images), f"Packing {split}", len(images)):
            origin.update(len(raw).to_bytes(8, "little"))
            origin.update(raw)
            data, shape = form.shape(raw, pixels, is_file=isinstance(images, _OF_FILES))
            shapes.append(shape)
            file.write(data)
            content.update(data)
            size += len(data)
            ends.append(size)
        table = np.array(shapes, dtype="<i8").reshape(-1, 2)
        uniform = bool((table == table[0]).all()) and not form.encoded
        add(f"x_{split}", "U8", [len(table), *map(int, table[0]), 3] if uniform else [size], size)
        columns = {"y": images.labels.astype("<i8")}
        if form.encoded:
            columns["end"] = np.array(ends, dtype="<i8")
        elif not uniform:
            columns["shape"] = table
        for key, column in columns.items():
            file.write(column.tobytes())
            content.update(column.tobytes())
            add(f"{key}_{split}", "I64", list(column.shape), column.nbytes)
    metadata |= {"made_from_sha256": origin.hexdigest(), "content_sha256": content.hexdigest()}
    header = json.dumps({"__metadata__": metadata, **tensors}).encode()
    assert len(header) <= room
    file.seek(0)
    file.write(room.to_bytes(8, "little") + header.ljust(room))


_OF_FILES = (FileImages, EncodedImages, ShardedImages)


def _read(images: Images) -> Iterator[tuple[bytes, Pixels]]:
    """What each sample was made from, and its pixels: both of the same reading."""
    if isinstance(images, (EncodedImages, ShardedImages)):
        stored = (images.contents(index) for index in range(len(images)))
        return ((data, decode(Path(name), data).pixels) for name, data in stored)
    if not isinstance(images, FileImages):
        decoded = (images[index] for index in range(len(images)))
        return ((np.ascontiguousarray(pixels).tobytes(), pixels) for pixels in decoded)

    def read(path: Path) -> tuple[bytes, Pixels]:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise BadImageError(f"{path} cannot be read: {error.strerror}.") from error
        return data, decode(path, data).pixels

    return in_threads(read, images.paths)


def is_packed(path: Path) -> bool:
    """Whether a file looks like one that `pack` wrote."""
    with path.open("rb") as file:
        start = file.read(8 + len('{"__metadata__": {"format": "') + len(_FORMAT))
    return start[8:].endswith(_FORMAT.encode())


def load_packed(path: Path) -> Source:
    """A packed data set, its pixels mapped from the file."""
    header, offset = _read_header(path)
    metadata = header.pop("__metadata__")
    try:
        classes = _texts(json.loads(metadata["classes"]))
        name, may_flip = _file_name(str(metadata["name"])), bool(json.loads(metadata["may_flip"]))
        splits = {split: _open_split(path, header, offset, split, may_flip) for split in ("train", "val", "test")}
        train, test = splits["train"], splits["test"]
    except (KeyError, TypeError, ValueError) as error:
        raise UnsafeError(f"{path} has a header that describes no data set ({error}).") from error
    if train is None or test is None:
        raise DataError(f"{path} lacks training or test images.")
    return check_source(Source(name, classes, train=train, test=test, val=splits["val"]))


def _as_file_name(name: str) -> str:
    """What a folder may be called and a name may not, put right."""
    return name.replace("/", "-").replace("\\", "-").lstrip(".") or "data"


def _file_name(name: str) -> str:
    """A name that leads nowhere: others may name folders by it."""
    if (
        not name
        or len(name.encode()) > _LONGEST_NAME
        or name.startswith(".")
        or "/" in name
        or "\\" in name
        or "\0" in name
    ):
        raise ValueError(f"its name is {name!r}")
    return name


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise TypeError("its classes are no list of names")
    return tuple(value)


def hash_content(path: Path) -> tuple[str, str]:
    """The SHA-256 of a packed file's contents as it says and as it is."""
    header, offset = _read_header(path)
    digest = hashlib.sha256()
    with path.open("rb") as file:
        file.seek(offset)
        while block := file.read(1 << 24):
            digest.update(block)
    return str(header["__metadata__"].get("content_sha256")), digest.hexdigest()


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header and where the data begin, once every tensor lies inside the file, behind the one before it."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(_MAX_HEADER, size - 8):
            raise UnsafeError(f"{path} claims a header of {length} bytes, more than there can be.")
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError) as error:
            raise UnsafeError(f"{path} has a header that cannot be read.") from error
    if not isinstance(header, dict) or not isinstance(header.get("__metadata__"), dict):
        raise UnsafeError(f"{path} has a header that describes no data set.")
    end = 0
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        try:
            first, last = tensor["data_offsets"]
            shape, itemsize = tensor["shape"], _DTYPES[tensor["dtype"]].itemsize
            whole = len(shape) <= _MOST_SIDES and all(isinstance(side, int) and 0 <= side <= size for side in shape)
            fits = whole and first == end and last - first == math.prod(shape) * itemsize
        except (KeyError, TypeError, ValueError) as error:
            raise UnsafeError(f"{path} has a header whose {name!r} cannot be.") from error
        if not fits:
            raise UnsafeError(f"{path} has a header whose {name!r} does not lie where it should.")
        end = last
    if 8 + length + end > size:
        raise DataError(f"{path} is cut off: {size} of {8 + length + end} bytes are there.")
    return header, 8 + length


def _open_split(path: Path, header: dict[str, Any], offset: int, split: str, may_flip: bool) -> Images | None:
    def view(key: str, dtype: str) -> Any:
        tensor = header[f"{key}_{split}"]
        if tensor["dtype"] != dtype:
            raise ValueError(f"{key}_{split} is of {tensor['dtype']}, not of {dtype}")
        start = offset + tensor["data_offsets"][0]
        # Copy-on-write: nobody can change the file, and tensors can be made of the arrays.
        return np.memmap(path, _DTYPES[dtype], mode="c", offset=start, shape=tuple(tensor["shape"]))

    if f"x_{split}" not in header:
        return None
    pixels, labels, name = view("x", "U8"), np.array(view("y", "I64")), f"{path} x_{split}"
    if labels.ndim != 1:
        raise ValueError(f"y_{split} is not one row")
    if pixels.ndim == 4:
        if pixels.shape[0] != len(labels) or pixels.shape[3] != 3:
            raise ValueError(f"x_{split} and y_{split} do not fit")
        return ArrayImages(pixels, labels, name, may_flip)
    if f"end_{split}" in header:
        ends = np.array(view("end", "I64"))
        starts = np.concatenate([np.zeros(min(1, len(ends)), np.int64), ends[:-1]])
        if not len(ends) or ends.shape != labels.shape or (ends <= starts).any() or int(ends[-1]) != pixels.size:
            raise ValueError(f"x_{split} and end_{split} do not fit")
        return EncodedImages(pixels, starts, ends, labels, name, may_flip)
    shapes = np.array(view("shape", "I64"))
    wrong = shapes.shape != (len(labels), 2) or (shapes <= 0).any() or (shapes > MAX_PIXELS).any()
    if wrong or (shapes.prod(1) > MAX_PIXELS).any() or shapes.prod(1).sum() * 3 != pixels.size:
        raise ValueError(f"x_{split} and shape_{split} do not fit")
    ends = np.cumsum(shapes.prod(1) * 3)
    return PackedImages(pixels, ends - shapes.prod(1) * 3, shapes, labels, name, may_flip)
