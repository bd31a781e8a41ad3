"""Dividing samples by class: a test set of a single folder, a held-out part of the training set."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from selfcon.data.random import Stream, permute
from selfcon.errors import UsageError

Labels = npt.NDArray[np.int64]


def hold_out(labels: Labels, count: int, seed: int, *, of_every_class: bool = False) -> tuple[Labels, Labels]:
    """Indices kept and indices held out, both ascending: `count` of them, each class in proportion.

    Shares are rounded by largest remainder, so that the count is exact. Every class keeps at least one sample; with
    `of_every_class` one of each is held out too, and the count may grow for it.
    """
    if not 0 <= count < len(labels):
        raise UsageError(f"{count} of {len(labels)} samples cannot be held out.")
    _, sizes = np.unique(labels, return_counts=True)
    exact = sizes * (count / len(labels))
    least = 1 if of_every_class else 0
    shares = np.clip(np.floor(exact).astype(np.int64), least, sizes - 1)
    # Largest remainders first; equal ones in the order of the classes.
    by_remainder = np.argsort(-(exact - np.floor(exact)), kind="stable")
    while shares.sum() < count:
        open_classes = [c for c in by_remainder if shares[c] < sizes[c] - 1]
        if not open_classes:
            raise UsageError(f"{count} of {len(labels)} samples cannot be held out: each class must keep one.")
        for c in open_classes[: count - int(shares.sum())]:
            shares[c] += 1
    order = permute(len(labels), seed=seed, epoch=0, stream=Stream.SPLIT).numpy()
    by_class = order[np.argsort(labels[order], kind="stable")]
    starts = np.cumsum(sizes) - sizes
    held = np.zeros(len(labels), dtype=bool)
    for start, share in zip(starts, shares, strict=True):
        held[by_class[start : start + share]] = True
    return np.flatnonzero(~held), np.flatnonzero(held)
