"""Leaving out images that cannot be read, where the user asks for it; never another sample in their place."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import numpy as np

from selfcon.data.packed import PackedImages
from selfcon.data.scan import in_threads
from selfcon.data.source import ArrayImages, Images, Source, check_source
from selfcon.errors import BadImageError, DataError, SelfconWarning, name_some
from selfcon.progress import track

MOST = 0.001


def drop_unreadable(source: Source) -> Source:
    """The source without the files that cannot be read; refused where they are more than one in a thousand."""
    splits = source.splits()
    bad = {split: _find_unreadable(images, split) for split, images in splits.items()}
    names = [splits[split].describe(index) for split, indices in bad.items() for index in indices]
    if not names:
        return source
    total = sum(len(images) for images in splits.values())
    if len(names) > MOST * total:
        raise DataError(
            f"{len(names)} of {total} images of {source.name} cannot be read, more than one in a thousand: "
            f"{name_some(names)}. Mend or remove them."
        )
    warnings.warn(
        f"{len(names)} of {total} images cannot be read and are left out: {name_some(names, most=len(names))}.",
        SelfconWarning,
        stacklevel=3,
    )
    kept: dict[str, Any] = {
        split: images.take(np.setdiff1d(np.arange(len(images)), bad[split])) if bad[split] else images
        for split, images in splits.items()
    }
    return check_source(replace(source, **kept))


def _find_unreadable(images: Images, split: str) -> list[int]:
    if isinstance(images, ArrayImages | PackedImages):
        return []

    def is_bad(index: int) -> bool:
        try:
            images[index]
        except BadImageError:
            return True
        return False

    found = track(in_threads(is_bad, range(len(images)), describe=images.describe), f"Reading {split}", len(images))
    return [index for index, bad in enumerate(found) if bad]
