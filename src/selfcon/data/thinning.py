"""Fewer training images on purpose: some of each class, or classes of very different sizes, to see what that costs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from selfcon.data.random import Stream, permute
from selfcon.data.source import Source
from selfcon.data.splits import Labels
from selfcon.errors import DataError


def thin(source: Source, *, per_class: int | None, imbalance: float | None, seed: int) -> Source:
    """The source with a part of its training images.

    `per_class` keeps so many of every class. `imbalance` makes the first class that many times as large as the last,
    the ones between in equal ratios, rounded down as in the long-tailed forms of CIFAR.
    """
    if per_class is None and imbalance is None:
        return source
    labels = source.train.labels
    sizes = np.bincount(labels, minlength=len(source.classes))
    wanted = sizes.copy()
    if imbalance is not None:
        ratios = imbalance ** (-np.arange(len(sizes)) / max(1, len(sizes) - 1))
        wanted = np.minimum(wanted, np.maximum(1, np.floor(sizes.max() * ratios + 1e-9)).astype(np.int64))
    if per_class is not None:
        wanted = np.minimum(wanted, per_class)
        if int(sizes.min()) < per_class:
            name = source.classes[int(sizes.argmin())]
            raise DataError(
                f"There are {int(sizes.min())} training images of {name!r}, and {per_class} were asked for."
            )
    return replace(source, train=source.train.take(_choose(labels, wanted, seed)))


def _choose(labels: Labels, wanted: Labels, seed: int) -> Labels:
    """So many indices of each class, drawn by the seed, ascending."""
    order = permute(len(labels), seed=seed, epoch=1, stream=Stream.SPLIT).numpy()
    return np.sort(np.concatenate([order[labels[order] == label][:count] for label, count in enumerate(wanted)]))
