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
    the ones between in equal ratios, rounded down as in the long-tailed forms of CIFAR, and as large as they can be;
    with both, the first class has `per_class`.
    """
    if per_class is None and imbalance is None:
        return source
    labels = source.train.labels
    sizes = np.bincount(labels, minlength=len(source.classes))
    ratios = np.ones(len(sizes))
    if imbalance is not None:
        ratios = imbalance ** (-np.arange(len(sizes)) / max(1, len(sizes) - 1))
    most = float((sizes / ratios).min())  # that the first class can have
    first = most if per_class is None else per_class
    wanted = np.maximum(1, np.floor(first * ratios + 1e-9)).astype(np.int64)
    if (lacking := np.flatnonzero(sizes < wanted)).size:
        name, there, asked = (each[lacking[0]] for each in (source.classes, sizes, wanted))
        raise DataError(f"There are {there} training images of {name!r}, and {asked} were asked for.")
    return replace(source, train=source.train.take(_choose(labels, wanted, seed)))


def _choose(labels: Labels, wanted: Labels, seed: int) -> Labels:
    """So many indices of each class, drawn by the seed, ascending."""
    order = permute(len(labels), seed=seed, epoch=1, stream=Stream.SPLIT).numpy()
    return np.sort(np.concatenate([order[labels[order] == label][:count] for label, count in enumerate(wanted)]))
