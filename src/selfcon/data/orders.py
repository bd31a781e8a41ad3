"""In which order samples come in an epoch: each once, or every class equally often.

An order is a list of numbers. The number of a sample is its place in the data set; where it comes again in the same
epoch, N is added for each time, so that its draws differ. N samples, C classes.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from selfcon.data.random import Stream, draw_words, permute

_TOGETHER = 2  # samples of a class that follow each other: in an even batch nobody is without a positive


def draw_order(labels: Tensor, *, seed: int, epoch: int, balanced: bool = False, device: torch.device | str) -> Tensor:
    """The numbers of an epoch, as many as there are samples."""
    if not balanced:
        return permute(len(labels), seed=seed, epoch=epoch, device=device)
    return _balance(labels.cpu(), seed=seed, epoch=epoch).to(device)


def _balance(labels: Tensor, *, seed: int, epoch: int) -> Tensor:
    """Classes in turn, two samples of each; a class that is used up begins anew, in its own order of this epoch."""
    count = len(labels)
    classes, rows = np.unique(labels.numpy(), return_inverse=True)
    order = permute(count, seed=seed, epoch=epoch).numpy()
    by_class = order[np.argsort(rows[order], kind="stable")]  # samples class by class, each class in a drawn order
    sizes = np.bincount(rows)
    starts = np.cumsum(sizes) - sizes
    rounds = -(-count // (_TOGETHER * len(classes)))
    words = draw_words(torch.arange(rounds * len(classes)), seed=seed, epoch=epoch, stream=Stream.CLASSES, words=1)
    turns = torch.argsort(words.view(rounds, len(classes)), dim=1, stable=True).numpy()
    sequence = np.repeat(turns.ravel(), _TOGETHER)[:count]
    # How often the class of each place came before it.
    so_far = np.empty(count, np.int64)
    places = np.argsort(sequence, kind="stable")
    firsts = np.r_[0, np.flatnonzero(np.diff(sequence[places])) + 1]
    so_far[places] = np.arange(count) - np.repeat(firsts, np.diff(np.r_[firsts, count]))
    samples = by_class[starts[sequence] + so_far % sizes[sequence]]
    return torch.from_numpy(samples + count * (so_far // sizes[sequence]))
