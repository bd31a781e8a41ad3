"""Data sets for transfer that torchvision does not know, in the layouts and splits that their authors publish."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from selfcon.data.source import FileImages, Source, check_source
from selfcon.errors import DataError, InputMissingError, name_some

Listed = list[tuple[str, str]]  # file below the folder of images, and class


def load_fine_grained(name: str, root: Path) -> Source:
    """The data set of that name from its folder below `root`."""
    folder, read = FINE_GRAINED[name]
    place = root / folder
    if not place.is_dir():
        raise InputMissingError(f"{name} is not in {root}: put the folder {folder} there, as its authors publish it.")
    images, train, test = read(place)
    classes = tuple(sorted({label for _, label in (*train, *test)}))
    number = {label: index for index, label in enumerate(classes)}

    def make(listed: Listed) -> FileImages:
        return FileImages([images / file for file, _ in listed], np.array([number[label] for _, label in listed]))

    source = Source(name, classes, train=make(train), test=make(test))
    every = [path for split in (source.train, source.test) for path in split.paths]  # type: ignore[attr-defined]
    if missing := [str(path) for path in every if not path.is_file()]:
        raise DataError(f"{name} lists {len(missing)} images that are not there: {name_some(missing)}.")
    return check_source(source)


def _read_cub(folder: Path) -> tuple[Path, Listed, Listed]:
    """CUB-200-2011: four tables of `number value`."""
    files, labels = _table(folder / "images.txt"), _table(folder / "image_class_labels.txt")
    classes, training = _table(folder / "classes.txt"), _table(folder / "train_test_split.txt")
    splits: dict[str, Listed] = {"1": [], "0": []}
    for number, file in files.items():
        try:
            splits[training[number]].append((file, classes[labels[number]]))
        except KeyError as error:
            raise DataError(f"{folder} lists image {number} without a class or a split ({error}).") from error
    return folder / "images", splits["1"], splits["0"]


def _table(path: Path) -> dict[str, str]:
    rows = [line.split(maxsplit=1) for line in _lines(path)]
    if wrong := next((row for row in rows if len(row) != 2), None):
        raise DataError(f"{path} holds the line {' '.join(wrong)!r}, and not a number with a value.")
    return dict(rows)


def _read_dogs(folder: Path) -> tuple[Path, Listed, Listed]:
    """Stanford Dogs: lists of files in MATLAB's format, each below the folder of its class."""
    from scipy.io import loadmat

    def read(name: str) -> Listed:
        path = folder / name
        _check_there(path)
        try:
            files = [str(cell[0]) for cell in loadmat(path)["file_list"][:, 0]]
        except Exception as error:  # whatever a broken file makes of scipy's reader
            raise DataError(f"{path} holds no file_list that can be read ({error}).") from error
        return [(file, file.split("/", maxsplit=1)[0]) for file in files]

    return folder / "Images", read("train_list.mat"), read("test_list.mat")


def _read_mit67(folder: Path) -> tuple[Path, Listed, Listed]:
    """MIT indoor scenes: two lists of CLASS/FILE."""
    train, test = (
        [(line, line.split("/", maxsplit=1)[0]) for line in _lines(folder / name)]
        for name in ("TrainImages.txt", "TestImages.txt")
    )
    return folder / "Images", train, test


def _read_stanford40(folder: Path) -> tuple[Path, Listed, Listed]:
    """Stanford 40 actions: two lists of files for each action; the table of actions has a line of titles."""
    splits = folder / "ImageSplits"
    actions = [line.split()[0] for line in _lines(splits / "actions.txt")[1:]]
    train, test = (
        [(file, action) for action in actions for file in _lines(splits / f"{action}_{split}.txt")]
        for split in ("train", "test")
    )
    return folder / "JPEGImages", train, test


def _lines(path: Path) -> list[str]:
    _check_there(path)
    return [line.strip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]


def _check_there(path: Path) -> None:
    if not path.is_file():
        raise InputMissingError(f"{path} is not there, which says what belongs to which split.")


FINE_GRAINED: dict[str, tuple[str, Callable[[Path], tuple[Path, Listed, Listed]]]] = {
    "cub": ("CUB_200_2011", _read_cub),
    "stanford-dogs": ("stanford-dogs", _read_dogs),
    "mit67": ("mit67", _read_mit67),
    "stanford40": ("stanford40", _read_stanford40),
}
"""By name: the folder, and how it is read."""

MEAN_PER_CLASS = frozenset(("flowers102", "oxford-iiit-pet", "fgvc-aircraft", "mit67"))
"""Data sets whose accuracy is by convention the mean over classes."""
