"""What a data set is here: images and labels of each split, and the names of the classes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from selfcon.data.images import Pixels, read_image
from selfcon.data.splits import Labels, hold_out
from selfcon.errors import BadImageError, DataError, UsageError, name_some, printable

_LONGEST_NAME = 1000  # letters of a class


class Images(ABC):
    """The samples of one split. Indexing decodes one image: uint8 [H, W, 3]."""

    labels: Labels
    may_flip: bool  # digits and letters must not be mirrored
    encoded: bool = True  # whether indexing takes time

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, int] | None:
        """Height and width where all images are known to share them."""
        return None

    @abstractmethod
    def __getitem__(self, index: int) -> Pixels: ...

    @abstractmethod
    def take(self, indices: Labels) -> Self:
        """Those samples alone."""

    @abstractmethod
    def describe(self, index: int) -> str:
        """What a sample is called in a message: its file, or its row."""

    def list_files(self, indices: Sequence[int]) -> bytes:
        """What tells some samples from others without reading them all: of files, their names and sizes."""
        return b""


@dataclass(eq=False)
class ArrayImages(Images):
    """Images of one size in one array, in memory or mapped from a file; `rows` are those of the array that count."""

    pixels: Pixels  # [M, H, W, 3]
    labels: Labels  # [N]
    name: str
    may_flip: bool = True
    rows: Labels | None = None  # [N]; None is all, in order
    encoded = False

    def __post_init__(self) -> None:
        if self.pixels.dtype != np.uint8 or self.pixels.ndim != 4 or self.pixels.shape[3] != 3:
            found = f"{self.pixels.dtype} {list(self.pixels.shape)}"
            raise DataError(f"{self.name} wants pixels of uint8, 0 to 255, of the shape [N, H, W, 3], not {found}.")
        self.labels = _as_labels(self.labels, len(self.pixels) if self.rows is None else len(self.rows), self.name)

    @property
    def shape(self) -> tuple[int, int] | None:
        return int(self.pixels.shape[1]), int(self.pixels.shape[2])

    def as_array(self) -> Pixels:
        """All images, [N, H, W, 3]; a copy where only some rows count."""
        return self.pixels if self.rows is None else self.pixels[self.rows]

    def __getitem__(self, index: int) -> Pixels:
        pixels: Pixels = self.pixels[self._row(index)]
        return pixels

    def take(self, indices: Labels) -> Self:
        rows = indices if self.rows is None else self.rows[indices]
        return replace(self, labels=self.labels[indices], rows=rows)

    def describe(self, index: int) -> str:
        return f"{self.name}[{self._row(index)}]"

    def _row(self, index: int) -> int:
        return int(index if self.rows is None else self.rows[index])


@dataclass(eq=False)
class FileImages(Images):
    """Images in files of their own, decoded when they are asked for."""

    paths: Sequence[Path]
    labels: Labels
    may_flip: bool = True

    def __post_init__(self) -> None:
        given: Sequence[Any] = self.paths
        if len(given) and not isinstance(given[0], Path):
            self.paths = [Path(path) for path in given]
        self.labels = _as_labels(self.labels, len(self.paths), "FileImages")

    def __getitem__(self, index: int) -> Pixels:
        return read_image(self.paths[index])

    def take(self, indices: Labels) -> Self:
        return replace(self, paths=[self.paths[index] for index in indices], labels=self.labels[indices])

    def describe(self, index: int) -> str:
        return str(self.paths[index])

    def list_files(self, indices: Sequence[int]) -> bytes:
        lines = []
        for path in (self.paths[index] for index in indices):
            try:
                lines.append(f"{path.parent.name}/{path.name} {path.stat().st_size}\n")
            except OSError as error:
                raise BadImageError(f"{path} cannot be read: {error.strerror}.") from error
        return "".join(lines).encode("utf-8", "surrogateescape")


def _as_labels(given: Any, images: int, name: str) -> Labels:
    """Labels of whoever made images, as an array."""
    labels = np.asarray(given)
    if labels.ndim != 1 or (len(labels) and labels.dtype.kind not in "iu"):
        raise DataError(f"{name} wants one whole number a label, not an array of {labels.dtype} {list(labels.shape)}.")
    if len(labels) != images:
        raise DataError(f"{name} has {len(labels):,} labels for {images:,} images.")
    return labels.astype(np.int64, copy=False)


@dataclass(frozen=True)
class Source:
    """A data set: training and test images, perhaps a held-out part of the former, and what the labels mean."""

    name: str
    classes: tuple[str, ...]
    train: Images
    test: Images
    val: Images | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", printable(self.name))  # which a file of somebody else may have brought

    @property
    def may_flip(self) -> bool:
        """Whether mirroring leaves an image what it is."""
        return self.train.may_flip

    def splits(self) -> dict[str, Images]:
        """Every split by its name, in the order train, val, test."""
        every = {"train": self.train, "val": self.val, "test": self.test}
        return {name: images for name, images in every.items() if images is not None}

    def hold_out(self, fraction: float, seed: int = 0) -> Source:
        """The same data with a stratified part of the training images as `val`; test is untouched."""
        if not 0 <= fraction < 1:
            raise UsageError(f"The held-out fraction must be at least 0 and less than 1, not {fraction}.")
        if not fraction:
            return self
        count = round(fraction * len(self.train))
        if not count:
            raise UsageError(f"{fraction:g} of {len(self.train)} training images is none to hold out: choose more.")
        if self.val is not None:
            raise UsageError(f"{self.name} already has a held-out part, in val.")
        kept, held = hold_out(self.train.labels, count, seed)
        return replace(self, train=self.train.take(kept), val=self.train.take(held))

    def limit(self, count: int) -> Source:
        """At most so many images of each split, evenly over their order: enough to prove a set-up."""

        def some(images: Images) -> Images:
            return images.take(np.unique(np.linspace(0, len(images) - 1, min(count, len(images))).astype(np.int64)))

        return replace(
            self, train=some(self.train), test=some(self.test), val=None if self.val is None else some(self.val)
        )


def complain(problem: str, problems: list[str] | None) -> None:
    """Add to the problems where somebody collects them, else stop at this one."""
    if problems is None:
        raise DataError(problem)
    problems.append(problem)


def check_source(source: Source, problems: list[str] | None = None, *, told: bool = False) -> Source:
    """The source itself, once every class has training images and no label lies outside the classes.

    `told` is whether classes without training images are among the problems already. Names that are no text (folders
    may be called anything) are written with escapes.
    """
    if len(source.classes) < 2:
        complain(f"{source.name} has {len(source.classes)} class: at least two are needed.", problems)
    for split, images in source.splits().items():
        if not len(images):
            raise DataError(f"{source.name} has no images in {split}.")
        low, high = int(images.labels.min()), int(images.labels.max())
        if low < 0 or high >= len(source.classes):
            wrong = low if low < 0 else high
            raise DataError(
                f"{source.name} has the label {wrong} in {split}, and labels are 0 to {len(source.classes) - 1}."
            )
    if long := next((name for name in source.classes if len(name) > _LONGEST_NAME), None):
        raise DataError(f"{source.name} has a class whose name is {len(long):,} letters long: {long[:40]!r}...")
    if not all(map(_is_text, source.classes)):
        source = replace(source, classes=tuple(map(_as_text, source.classes)))
    present = np.bincount(source.train.labels, minlength=len(source.classes))
    empty = [source.classes[label] for label in np.flatnonzero(present == 0)]
    if empty and not told:
        complain(f"{source.name} has no training images of {name_some(empty)}.", problems)
    return source


def _is_text(name: str) -> bool:
    return name.isascii() or not any(0xD800 <= ord(letter) <= 0xDFFF for letter in name)


def _as_text(name: str) -> str:
    return name.encode("utf-8", "backslashreplace").decode()
