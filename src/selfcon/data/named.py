"""Data sets that torchvision knows by name. Nothing is downloaded unless that is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from selfcon.data.archives import guarded_torchvision
from selfcon.data.source import ArrayImages, FileImages, Images, Source, check_source
from selfcon.data.splits import Labels
from selfcon.errors import DataError, InputMissingError, SelfconError, UnsafeError


@dataclass(frozen=True)
class Named:
    """A class of `torchvision.datasets`, what it is given for each split, and where its files lie below the root."""

    torchvision: str
    files: str
    train: dict[str, Any]
    test: dict[str, Any]
    may_flip: bool = True
    val: dict[str, Any] | None = None  # where its authors have such images


_BOOLEAN: tuple[dict[str, Any], dict[str, Any]] = ({"train": True}, {"train": False})
_SPLIT: tuple[dict[str, Any], dict[str, Any]] = ({"split": "train"}, {"split": "test"})

NAMED = {
    "cifar10": Named("CIFAR10", "cifar-10-batches-py", *_BOOLEAN),
    "cifar100": Named("CIFAR100", "cifar-100-python", *_BOOLEAN),
    "mnist": Named("MNIST", "MNIST/raw", *_BOOLEAN, may_flip=False),
    "fashion-mnist": Named("FashionMNIST", "FashionMNIST/raw", *_BOOLEAN),
    "kmnist": Named("KMNIST", "KMNIST/raw", *_BOOLEAN, may_flip=False),
    "svhn": Named("SVHN", "train_32x32.mat and test_32x32.mat", *_SPLIT, may_flip=False),
    "stl10": Named("STL10", "stl10_binary", *_SPLIT),
    "food101": Named("Food101", "food-101", *_SPLIT),
    "flowers102": Named("Flowers102", "flowers-102", *_SPLIT, val={"split": "val"}),
    "dtd": Named("DTD", "dtd", *_SPLIT, val={"split": "val"}),
    "oxford-iiit-pet": Named("OxfordIIITPet", "oxford-iiit-pet", {"split": "trainval"}, {"split": "test"}),
    "stanford-cars": Named("StanfordCars", "stanford_cars", *_SPLIT),
    "fgvc-aircraft": Named("FGVCAircraft", "fgvc-aircraft-2013b", {"split": "trainval"}, {"split": "test"}),
}


def load_named(name: str, root: Path, *, download: bool) -> Source:
    """The data set of that name, from its files below `root`."""
    from torchvision import datasets

    entry = NAMED[name]
    create = getattr(datasets, entry.torchvision)
    try:
        with guarded_torchvision():
            train = create(root, download=download, **entry.train)
            test = create(root, download=download, **entry.test)
            val = None if entry.val is None else create(root, download=download, **entry.val)
    except SelfconError:
        raise
    except (AssertionError, ValueError, EOFError) as error:
        raise DataError(f"{name} in {root} cannot be read ({_first_line(error)}).") from error
    except (RuntimeError, OSError) as error:
        if download and "corrupted" in str(error):
            raise UnsafeError(
                f"What was downloaded of {name} to {root} has not the hash that it should have."
            ) from error
        if download:
            raise InputMissingError(f"{name} could not be downloaded ({_first_line(error)}).") from error
        raise InputMissingError(
            f"{name} is not in {root}: put {entry.files} there, or download it: "
            f"`selfcon data check {name} --data-root {root} --download`."
        ) from error
    return check_source(
        Source(
            name=name,
            classes=_classes(train),
            train=_images(train, f"{name} train", entry.may_flip),
            test=_images(test, f"{name} test", entry.may_flip),
            val=None if val is None else _images(val, f"{name} val", entry.may_flip),
        )
    )


def _images(dataset: Any, name: str, may_flip: bool) -> Images:
    if hasattr(dataset, "_samples"):
        return FileImages([Path(path) for path, _ in dataset._samples], _labels(dataset), may_flip)
    labels = _labels(dataset)
    files = _first_of(dataset, "_image_files", "_images")
    if files is not None:
        return FileImages([Path(file) for file in files], labels, may_flip)
    pixels = dataset.data.numpy() if isinstance(dataset.data, Tensor) else np.asarray(dataset.data)
    if pixels.ndim == 4 and pixels.shape[1] == 3:  # SVHN and STL10 keep channels first
        pixels = np.ascontiguousarray(pixels.transpose(0, 2, 3, 1))
    return ArrayImages(grey_to_rgb(pixels), labels, name, may_flip)


def _labels(dataset: Any) -> Labels:
    if hasattr(dataset, "_samples"):
        return np.array([label for _, label in dataset._samples], dtype=np.int64)
    return np.asarray(_first_of(dataset, "targets", "labels", "_labels"), dtype=np.int64)


def _first_of(dataset: Any, *names: str) -> Any:
    """The first of these attributes that a data set of torchvision has."""
    return next((getattr(dataset, name) for name in names if hasattr(dataset, name)), None)


def grey_to_rgb(pixels: Any) -> Any:
    """[N, H, W] as [N, H, W, 3]; colour stays as it is."""
    return np.repeat(pixels[..., None], 3, axis=3) if pixels.ndim == 3 else pixels


def _classes(dataset: Any) -> tuple[str, ...]:
    if getattr(dataset, "classes", None):
        return tuple(str(name) for name in dataset.classes)
    labels = _labels(dataset)
    return tuple(str(label) for label in range(int(np.max(labels)) + 1))


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
