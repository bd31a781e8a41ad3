"""From what `--data` says, a name or a path, to a data set."""

from __future__ import annotations

import difflib
import lzma
import math
import os
import zipfile
import zlib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch

from selfcon.data.fine_grained import FINE_GRAINED, load_fine_grained
from selfcon.data.folders import load_folder, load_imagenet, load_tiny_imagenet
from selfcon.data.named import NAMED, grey_to_rgb, load_named
from selfcon.data.packed import is_packed, load_packed
from selfcon.data.shards import is_sharded, load_shards
from selfcon.data.source import ArrayImages, Source, check_source
from selfcon.data.splits import hold_out
from selfcon.data.unreadable import drop_unreadable
from selfcon.errors import DataError, InputMissingError, SelfconError, UnsafeError, UsageError, hint_path, unknown_name

_ARRAYS = ("x_train", "y_train", "x_test", "y_test", "x_val", "y_val", "classes")
_BROKEN_ZIP = (zipfile.BadZipFile, zlib.error, lzma.LZMAError)
_ALWAYS_UNPACKED, _MOST_COMPRESSED = 1 << 30, 200  # bytes of a file; beyond them, what is unpacked over what is there
_LONGEST_HEADER, _MOST_CLASSES = 10_000, 1_000_000
_LONGEST_NAME = 255  # bytes, of file systems

BadImages = Literal["error", "skip"]
_BY_NAME = ("digits", "tiny-imagenet", "imagenet", "imagenet100", *NAMED, *FINE_GRAINED)
_DIGITS_TEST = 360
_ADDED: dict[str, Callable[[Path], Source]] = {}


def add_source(name: str, loader: Callable[[Path], Source]) -> None:
    """Make a data set known by a name, so that `--data` takes it in this process; `loader` is given `--data-root`.

    One that was added before is replaced.
    """
    if name in list_sources() and name not in _ADDED:
        raise UsageError(f"There is a data set {name!r} already: choose another name.")
    _ADDED[name] = loader


def is_path(data: str) -> bool:
    """Whether it leads to a file or a folder, and is no name of a data set."""
    return data not in list_sources() and Path(data).exists()


def load(
    data: str | Path,
    *,
    root: str | Path = "data",
    class_list: str | Path | None = None,
    seed: int = 0,
    download: bool = False,
    bad_images: BadImages = "error",
    problems: list[str] | None = None,
) -> Source:
    """The data set that `data` names: one of `list_sources()` below `root`, a folder, an .npz or a packed file.

    A single folder is split into training and test images, and for another `seed` otherwise. With `bad_images="skip"`
    every file is read once and the unreadable ones are left out, with a warning that lists them; more than one in a
    thousand are refused. With a list for `problems`, empty and differing classes are added to it instead of being
    refused.
    """
    if bad_images not in get_args(BadImages):
        raise unknown_name("way to treat bad images", bad_images, get_args(BadImages))
    source = _find(data, Path(root), class_list=class_list, seed=seed, download=download, problems=problems)
    return drop_unreadable(source) if bad_images == "skip" else source


def _find(
    data: str | Path,
    root: Path,
    *,
    class_list: str | Path | None,
    seed: int,
    download: bool,
    problems: list[str] | None,
) -> Source:
    name, path = ("" if isinstance(data, Path) else data), Path(data)  # a Path is never a name
    if any(len(os.fsencode(part)) > _LONGEST_NAME for part in path.parts):
        raise InputMissingError(f"There is no file or folder {str(path)[:60]}..., whose name is too long.")
    if class_list is not None and name not in ("imagenet", "imagenet100"):
        raise UsageError(f"A class list goes with imagenet or imagenet100, not with {data}.")
    if name in _ADDED:
        return check_source(_ADDED[name](root), problems)
    if name == "digits":
        return _load_digits()
    if name == "tiny-imagenet":
        return load_tiny_imagenet(root, problems)
    if name in ("imagenet", "imagenet100"):
        chosen = None if class_list is None else Path(class_list)
        return load_imagenet(root, name=name, class_list=chosen, problems=problems)
    if name in NAMED:
        return load_named(name, root, download=download)
    if name in FINE_GRAINED:
        return load_fine_grained(name, root)
    if path.is_dir() and is_sharded(path):
        return load_shards(path)
    if path.is_dir():
        return load_folder(path, seed=seed, problems=problems)
    return _load_file(path)


def _load_file(path: Path) -> Source:
    if path.is_file() and is_packed(path):
        return load_packed(path)
    if path.is_file() and path.suffix.lower() == ".npz":
        return _load_npz(path)
    if path.is_file() and path.suffix.lower() == ".tar":
        raise UsageError(f"{path} is a tar file: name the folder that it and its like are in.")
    if path.is_file() and path.suffix.lower() in (".csv", ".tsv", ".txt", ".json"):
        raise DataError(
            f"{path} is a list, and labels are the names of folders here: put the images (or links to them) into a "
            f"folder for every class."
        )
    if path.is_file():
        raise DataError(f"{path} is neither an .npz nor a file that `selfcon data pack` wrote.")
    hint = hint_path(path)
    if path.suffix or len(path.parts) > 1 or hint != ".":
        raise InputMissingError(f"There is no file or folder {path}{hint}")
    near = difflib.get_close_matches(str(path).lower(), list_sources(), n=1)
    raise UsageError(
        f"There is no file or folder {path}, and no data set of that name"
        + (
            f"; did you mean {near[0]!r}?"
            if near
            else f" ({', '.join(list_sources())}; what a script adds is known to that script)."
        )
    )


def list_sources() -> list[str]:
    """The data sets that go by a name."""
    return sorted([*_BY_NAME, *_ADDED])


def _load_digits() -> Source:
    """scikit-learn's handwritten digits: 8x8 grey made 16x16 RGB, 1,437 to train with and 360 to test on."""
    rows = _read_digits()
    grey = torch.tensor(rows[:, :-1].reshape(-1, 1, 8, 8), dtype=torch.float32) * (255 / 16)
    larger = torch.nn.functional.interpolate(grey, size=16, mode="bilinear", align_corners=False)
    pixels = grey_to_rgb(larger[:, 0].round().to(torch.uint8).numpy())
    labels = rows[:, -1].astype(np.int64)
    kept, held = hold_out(labels, _DIGITS_TEST, seed=0)
    every = ArrayImages(pixels, labels, "digits", may_flip=False)
    classes = tuple(str(digit) for digit in range(10))
    return Source("digits", classes, train=every.take(kept), test=every.take(held))


def _read_digits() -> npt.NDArray[np.float64]:
    """Return 64 pixels and a label per row, from scikit-learn's own file: importing it takes a second."""
    package = find_spec("sklearn")
    assert package is not None
    assert package.origin is not None
    path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if not path.is_file():  # a version that keeps it elsewhere
        from sklearn.datasets import load_digits

        digits = load_digits()
        return np.column_stack([digits.data, digits.target])
    return np.loadtxt(path, delimiter=",")


def _load_npz(path: Path) -> Source:
    """An .npz with uint8 x_train and x_test, [N, H, W, 3] or [N, H, W], integer y_train and y_test, perhaps classes.

    `x_val` and `y_val` are a held-out part.
    """
    arrays = _read_npz(path)
    splits = ["train", "test", *(["val"] if {"x_val", "y_val"} & set(arrays) else [])]
    if missing := [key for split in splits for key in (f"x_{split}", f"y_{split}") if key not in arrays]:
        raise DataError(f"{path} has no {', '.join(missing)}; it has {', '.join(arrays) or 'none of these'}.")
    found = {}
    for split in splits:
        pixels, labels = arrays[f"x_{split}"], arrays[f"y_{split}"]
        _check_arrays(path, split, pixels, labels)
        found[split] = ArrayImages(grey_to_rgb(pixels), labels.astype(np.int64), f"{path} x_{split}")
        if found[split].shape != found["train"].shape:
            raise DataError(
                f"{path} has images of {found['train'].shape} to train with and of {found[split].shape} in x_{split}."
            )
    return check_source(Source(path.stem, _class_names(path, arrays.get("classes"), found["train"].labels), **found))


def _class_names(path: Path, classes: Any, y_train: Any) -> tuple[str, ...]:
    if classes is None:
        if int(y_train.max()) >= len(y_train):
            raise DataError(f"{path} has the label {int(y_train.max())} in y_train, more than there are images.")
        return tuple(str(label) for label in range(int(y_train.max()) + 1))
    if classes.ndim != 1 or classes.dtype.kind not in "US":
        raise DataError(f"{path} must hold classes as a row of texts, not {classes.dtype} {list(classes.shape)}.")
    names = tuple(name.decode("utf-8", "replace") if isinstance(name, bytes) else name for name in classes.tolist())
    if len(set(names)) < len(names):
        raise DataError(f"{path} names a class twice.")
    return names


def _read_npz(path: Path) -> dict[str, Any]:
    try:
        with zipfile.ZipFile(path) as file:
            present = {info.filename.removesuffix(".npy"): info for info in file.infolist()}
            wanted = {key: present[key] for key in _ARRAYS if key in present}
            _check_room(path, sum(info.file_size for info in wanted.values()))
            _check_room(path, sum(_check_header(path, file, info) for info in wanted.values()))
            return {key: _read_array(file, info) for key, info in wanted.items()}
    except (OSError, EOFError, ValueError, RuntimeError, NotImplementedError, *_BROKEN_ZIP) as error:
        if isinstance(error, SelfconError):
            raise
        raise DataError(f"{path} cannot be read as an .npz: {str(error).rstrip('.')}.") from error


def _check_room(path: Path, taken: int) -> None:
    stored = path.stat().st_size
    if taken > max(_ALWAYS_UNPACKED, _MOST_COMPRESSED * stored):
        raise UnsafeError(f"{path} would unpack {stored:,} bytes to {taken:,}.")


def _check_header(path: Path, file: zipfile.ZipFile, info: zipfile.ZipInfo) -> int:
    """How much memory an array takes, once its header agrees with its size and tells of no Python objects."""
    read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    with file.open(info) as member:
        version = np.lib.format.read_magic(member)
        if version not in read_header:
            raise DataError(f"{path} has an array {info.filename} of an unknown kind.")
        start = member.tell()
        if int.from_bytes(member.read(2 * version[0]), "little") > _LONGEST_HEADER:
            raise UnsafeError(f"{path} has an array {info.filename} whose header is too long.")
        member.seek(start)
        shape, _, dtype = read_header[version](member)
        held = math.prod(shape) * dtype.itemsize
        if dtype.hasobject:
            raise UnsafeError(f"{path} holds Python objects, which can run code when they are read.")
        if not dtype.itemsize or held != info.file_size - member.tell():
            raise DataError(f"{path} has an array {info.filename} whose header does not fit its contents.")
    if dtype.kind in "US" and math.prod(shape) > _MOST_CLASSES:
        raise UnsafeError(f"{path} names {math.prod(shape):,} classes.")
    return held * (3 if len(shape) == 3 else 1)  # grey images become coloured ones


def _read_array(file: zipfile.ZipFile, info: zipfile.ZipInfo) -> Any:
    with file.open(info) as member:
        return np.lib.format.read_array(member, allow_pickle=False)


def _check_arrays(path: Path, split: str, images: Any, labels: Any) -> None:
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or (images.ndim == 4 and images.shape[3] != 3):
        raise DataError(
            f"{path} must hold x_{split} as uint8 [N, H, W, 3] or [N, H, W], not {images.dtype} {list(images.shape)}."
        )
    if not np.issubdtype(labels.dtype, np.integer) or labels.shape != images.shape[:1]:
        raise DataError(
            f"{path} must hold y_{split} as {len(images)} integers, one for each image, "
            f"not {labels.dtype} {list(labels.shape)}."
        )
    if 0 in images.shape:
        raise DataError(f"{path} has no images in x_{split}.")
