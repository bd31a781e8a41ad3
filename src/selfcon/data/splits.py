"""Dividing samples by class: a test set of a single folder, a held-out part of the training set."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from selfcon.data.random import permute
from selfcon.errors import UsageError

Labels = npt.NDArray[np.int64]


def hold_out(labels: Labels, count: int, seed: int) -> tuple[Labels, Labels]:
    """Indices kept and indices held out, both ascending: `count` of them, each class in proportion.

    Shares are rounded by largest remainder, so that the count is exact; every class keeps at least one.
    """
    if not 0 <= count < len(labels):
        raise UsageError(f"{count} of {len(labels)} samples cannot be held out.")
    classes, sizes = np.unique(labels, return_counts=True)
    exact = sizes * (count / len(labels))
    shares = np.minimum(np.floor(exact).astype(np.int64), sizes - 1)
    # Largest remainders first; equal ones in the order of the classes.
    by_remainder = np.argsort(-(exact - np.floor(exact)), kind="stable")
    while shares.sum() < count:
        open_classes = [c for c in by_remainder if shares[c] < sizes[c] - 1]
        if not open_classes:
            raise UsageError(f"{count} of {len(labels)} samples cannot be held out: each class must keep one.")
        for c in open_classes[: count - int(shares.sum())]:
            shares[c] += 1
    order = permute(len(labels), seed=seed, epoch=0).numpy()
    held = np.zeros(len(labels), dtype=bool)
    for label, share in zip(classes, shares, strict=True):
        held[order[labels[order] == label][:share]] = True
    return np.flatnonzero(~held), np.flatnonzero(held)
