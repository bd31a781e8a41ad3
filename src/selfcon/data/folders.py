"""Data sets in folders: ImageFolder's convention, Tiny-ImageNet's own layout, ImageNet and its subsets by a class list.

Classes are the names of folders, sorted as torchvision sorts them. Folders are walked, never globbed: brackets, spaces
and unicode in paths mean nothing here.
"""

from __future__ import annotations

import difflib
import os
import warnings
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from selfcon.data.images import SUFFIXES
from selfcon.data.source import FileImages, Source, check_source, complain
from selfcon.data.splits import hold_out
from selfcon.errors import DataError, InputMissingError, SelfconWarning, UsageError, name_some

_SINGLE_FOLDER_TEST_FRACTION = 0.2
_SPLIT_NAMES = frozenset(("train", "training", "test", "testing", "val", "valid", "validation"))


def load_folder(folder: Path, *, seed: int = 0, problems: list[str] | None = None) -> Source:
    """A folder with train/ and test/ or val/ (of both, val/ is the held-out part), or of classes, split by class."""
    if not (folder / "train").is_dir():
        return _split_single(folder, seed, problems)
    classes = list_classes(folder / "train")
    parts = [part for part in ("val", "test") if (folder / part).is_dir()]
    if not parts:
        if others := [name for name in list_classes(folder) if name != "train" and name.lower() in _SPLIT_NAMES]:
            raise InputMissingError(f"{folder} has {name_some(others)} beside train: call it test (or val).")
        raise InputMissingError(
            f"{folder} has train but neither test nor val beside it; "
            f"name {folder / 'train'} itself to have it split, a fifth to test on."
        )
    _note_unused(folder, ("train", *parts))
    for part in parts:
        _check_same_classes(folder, classes, list_classes(folder / part), part, problems)
    images = _read_parts(folder, classes, parts, problems)
    return check_source(
        Source(
            name=folder.resolve().name,
            classes=tuple(classes),
            train=images["train"],
            test=images[parts[-1]],
            val=images["val"] if len(parts) == 2 else None,
        ),
        problems,
        told=True,
    )


def is_to_be_split(folder: Path) -> bool:
    """Whether it is a folder of classes, which is split into images to train with and to test on."""
    return folder.is_dir() and not (folder / "train").is_dir() and bool(list_classes(folder))


def describe_split(folder: Path, source: Source, seed: int) -> str | None:
    """Return how many images of a folder of classes are test images; None where the folder names them itself."""
    if not is_to_be_split(folder):
        return None
    every = len(source.train) + len(source.test)
    runs = "whatever --seed a run has" if seed == 0 else "but runs always use seed 0"
    return (
        f"{folder} has no train folder, so {len(source.test):,} of its {every:,} images are held out for testing "
        f"(stratified, with the fixed seed {seed}, {runs})."
    )


def describe_val(folder: Path, *, advise: bool = True) -> str | None:
    """Return a sentence where val is the test set of a folder; None where it is not."""
    if not (folder / "train").is_dir() or not (folder / "val").is_dir() or (folder / "test").is_dir():
        return None
    more = " Use --val-fraction to hold out part of train." if advise else ""
    return f"{folder} has no test folder, so val is the test set.{more}"


def _split_single(folder: Path, seed: int, problems: list[str] | None) -> Source:
    classes = list_classes(folder)
    if not classes:
        raise DataError(f"{folder} has no folders in it: each class needs one, with its images.")
    if splits := [name for name in classes if name.lower() in _SPLIT_NAMES]:
        raise DataError(
            f"{folder} has {name_some(splits)} in it, which look like splits and not like classes: "
            f"call them train and test (or val)."
        )
    if len(classes) == 1 and len(list_classes(folder / classes[0])) > 1:
        raise DataError(f"{folder} holds nothing but {classes[0]}, which has folders in it: use {folder / classes[0]}.")
    every = read_classes(folder, classes, problems)
    alone = [classes[label] for label in np.flatnonzero(np.bincount(every.labels, minlength=len(classes)) == 1)]
    if alone:
        raise DataError(
            f"{folder} has one image of {name_some(alone)}, and needs one to train with and one to test on."
        )
    if not len(every):
        raise DataError(f"{folder} has no images in it.")
    count = round(_SINGLE_FOLDER_TEST_FRACTION * len(every))
    kept, held = hold_out(every.labels, count, seed, of_every_class=True)
    source = Source(folder.resolve().name, tuple(classes), train=every.take(kept), test=every.take(held))
    return check_source(source, problems, told=True)


def list_classes(folder: Path) -> list[str]:
    """The folders in a folder, sorted; hidden ones are none."""
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def _read_parts(
    folder: Path, classes: list[str], parts: Sequence[str], problems: list[str] | None
) -> dict[str, FileImages]:
    """The images of train and of other parts; of a class that train has none of, it is told once."""
    train = read_classes(folder / "train", classes, problems)
    told = set(classes) - {classes[label] for label in train.labels}
    return {"train": train} | {part: read_classes(folder / part, classes, problems, told) for part in parts}


def read_classes(
    folder: Path, classes: list[str], problems: list[str] | None = None, told: Collection[str] = ()
) -> FileImages:
    """All image files below each class's folder, in the order of classes and sorted within; none may be empty.

    With a list for `problems`, empty ones are told there, except those of `told`.
    """
    paths: list[Path] = []
    labels: list[int] = []
    empty = []
    for label, name in enumerate(classes):
        found = list_images(folder / name)
        there = (folder / name).is_dir() or problems is None  # what is missing was told
        if not found and there and name not in told:
            empty.append(name)
        paths += found
        labels += [label] * len(found)
    if empty:
        complain(f"{folder} has no images of {name_some(empty)}: fill the folder or remove it.", problems)
    return FileImages(paths, np.array(labels, dtype=np.int64))


def list_images(folder: Path) -> list[Path]:
    """The image files below a folder, by their endings, in torchvision's order; links that lead back are left."""

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename} cannot be read ({error.strerror}).") from error

    if not folder.exists():
        return []
    seen: set[tuple[int, int]] = set()
    places = []
    for place, folders, files in os.walk(folder, followlinks=True, onerror=refuse):
        status = Path(place).stat()
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        places.append((place, sorted(files)))
    return [
        Path(place) / file
        for place, files in sorted(places)
        for file in files
        if Path(file).suffix.lower() in SUFFIXES and _may_be_image(Path(place) / file)
    ]


def _may_be_image(path: Path) -> bool:
    """A file, or a link to nothing, which reading will name; never a pipe or a device, which reading would wait for."""
    return path.is_file() or not path.exists()


def list_others(folder: Path) -> list[Path]:
    """Files below a folder that are not taken for images by their endings, hidden ones aside."""
    return [
        Path(place) / file
        for place, _, files in os.walk(folder)
        for file in sorted(files)
        if not file.startswith(".") and Path(file).suffix.lower() not in SUFFIXES
    ]


def describe_others(folder: Path) -> str | None:
    """A sentence about files below a folder that are not taken for images; None where there are none."""
    if not (others := list_others(folder)):
        return None
    endings = name_some(sorted({path.suffix or path.name for path in others}))
    some = "1 file is" if len(others) == 1 else f"{len(others):,} files are"
    return f"{some} not taken for images, by the endings: {endings}."


def list_strays(folder: Path) -> list[Path]:
    """Images beside the folders of the classes, in a folder of them or of its splits: they belong to none."""
    places = [folder, *(folder / name for name in list_classes(folder) if name.lower() in _SPLIT_NAMES)]
    return [
        path
        for place in places
        for path in sorted(place.iterdir())
        if path.suffix.lower() in SUFFIXES and path.is_file() and not path.name.startswith(".")
    ]


def _note_unused(folder: Path, used: tuple[str, ...]) -> None:
    others = [name for name in list_classes(folder) if name not in used and name.lower() in _SPLIT_NAMES]
    if others:
        warnings.warn(f"{folder} has {name_some(others)} too, which is not used.", SelfconWarning, stacklevel=3)


def load_tiny_imagenet(root: Path, problems: list[str] | None = None) -> Source:
    """Tiny-ImageNet as it is published: train/WNID/images, val/images and val/val_annotations.txt."""
    folder = _find(root, "tiny-imagenet-200", "train", "val/val_annotations.txt")
    classes = list_classes(folder / "train")
    label_of = {name: label for label, name in enumerate(classes)}
    paths: list[Path] = []
    labels: list[int] = []
    annotations = folder / "val" / "val_annotations.txt"
    for number, line in enumerate(_read_lines(annotations), start=1):
        fields = line.split("\t")
        if len(fields) < 2 or fields[1] not in label_of or Path(fields[0]).name != fields[0]:
            raise DataError(f"{annotations}, line {number}, does not name an image and a class of train.")
        paths.append(folder / "val" / "images" / fields[0])
        labels.append(label_of[fields[1]])
    return check_source(
        Source(
            name="tiny-imagenet",
            classes=tuple(classes),
            train=read_classes(folder / "train", classes, problems),
            test=FileImages(paths, np.array(labels, dtype=np.int64)),
        ),
        problems,
        told=True,
    )


def load_imagenet(root: Path, *, name: str, class_list: Path | None, problems: list[str] | None = None) -> Source:
    """ImageNet as train/WNID and val/WNID; with a class list only those classes, in sorted order."""
    folder = _find(root, "imagenet", "train", "val")
    classes = list_classes(folder / "train")
    if class_list is not None:
        wanted = read_class_list(class_list)
        if missing := sorted(wanted - set(classes)):
            raise DataError(f"{class_list} names {name_some(missing)}, not in {folder / 'train'}.")
        classes = sorted(wanted)
    elif name == "imagenet100":
        raise UsageError("imagenet100 is a choice of classes: name the file that lists them with --class-list.")
    others = list_classes(folder / "val")
    if class_list is not None:
        others = [other for other in others if other in set(classes)]
    _check_same_classes(folder, classes, others, "val", problems)
    images = _read_parts(folder, classes, ["val"], problems)
    source = Source(name=name, classes=tuple(classes), train=images["train"], test=images["val"])
    return check_source(source, problems, told=True)


def read_class_list(path: Path) -> set[str]:
    """The first word of each line that is neither empty nor a comment."""
    if not path.is_file():
        raise InputMissingError(f"The class list {path} is not there.")
    lines = (line.split() for line in _read_lines(path))
    return {words[0] for words in lines if words and not words[0].startswith("#")}


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as text ({error}).") from error


def _find(root: Path, usual_name: str, *needed: str) -> Path:
    """The folder itself or the one of the usual name in it, whichever holds what is needed."""
    for folder in (root / usual_name, root):
        if all((folder / part).exists() for part in needed):
            return folder
    raise InputMissingError(f"{root} holds neither {usual_name} nor its {' and '.join(needed)}: unpack it there.")


def _check_same_classes(
    folder: Path, train: list[str], other: list[str], part: str, problems: list[str] | None = None
) -> None:
    if missing := sorted(set(train) - set(other)):
        complain(f"{folder / part} has no folder for {name_some(missing)}, which train has.", problems)
    if extra := sorted(set(other) - set(train)):
        near = difflib.get_close_matches(extra[0], missing, n=1)
        hint = f" Is {extra[0]!r} meant to be {near[0]!r}?" if near else ""
        complain(f"{folder / part} has the classes {name_some(extra)}, which train has not.{hint}", problems)
