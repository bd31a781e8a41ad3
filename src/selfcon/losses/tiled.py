"""Pairs in square tiles, in plain PyTorch on any device: memory for the features and one tile, for any method."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from selfcon.losses import pairwise
from selfcon.losses.pairwise import Pairs
from selfcon.losses.sets import Contrast, Term, belongs

SIDE = 2048


def term_sums(contrast: Contrast, terms: Sequence[Term], temperature: float | Tensor) -> tuple[Tensor, Tensor]:
    """As `dense.term_sums`."""
    return pairwise.term_sums(contrast, terms, temperature, Tiles())


class Tiles:
    """The engine: a loop over tiles of anchors and columns."""

    def __init__(self, side: int = SIDE) -> None:
        self.side = side

    def statistics(self, pairs: Pairs) -> tuple[Tensor, Tensor, Tensor]:
        anchors, terms = len(pairs.z[pairs.own]), len(pairs.terms)
        log_denominator = pairs.z.new_full((terms, anchors), -torch.inf)
        attraction = pairs.z.new_zeros(terms, anchors)
        positives = torch.zeros(terms, anchors, dtype=torch.int64, device=pairs.z.device)
        for rows, columns in self._tiles(pairs):
            here = slice(rows.start - pairs.own.start, rows.stop - pairs.own.start)
            cosines = pairs.z[rows] @ pairs.z[columns].T
            similarities = cosines / pairs.tau
            for number, (positive, within) in enumerate(_sets(pairs, rows, columns)):
                new = similarities.masked_fill(~within, -torch.inf).logsumexp(1)
                log_denominator[number, here] = torch.logaddexp(log_denominator[number, here], new)
                attraction[number, here] += torch.where(positive, cosines, 0).sum(1)
                positives[number, here] += positive.sum(1)
        return log_denominator, attraction, positives

    def gradient(self, pairs: Pairs, log_denominator: Tensor, pull: Tensor, push: Tensor) -> Tensor:
        gradient = torch.zeros_like(pairs.z)
        for rows, columns in self._tiles(pairs):
            here = slice(rows.start - pairs.own.start, rows.stop - pairs.own.start)
            similarities = pairs.z[rows] @ pairs.z[columns].T / pairs.tau
            weights = torch.zeros_like(similarities)
            for number, (positive, within) in enumerate(_sets(pairs, rows, columns)):
                shares = (similarities - log_denominator[number, here, None]).masked_fill(~within, -torch.inf).exp()
                weights += pull[number, here, None] * shares
                weights -= push[number, here, None] * positive
            gradient[rows] += weights @ pairs.z[columns]
            gradient[columns] += weights.T @ pairs.z[rows]
        return gradient / pairs.tau

    def _tiles(self, pairs: Pairs) -> Iterator[tuple[slice, slice]]:
        for row in range(pairs.own.start, pairs.own.stop, self.side):
            for column in range(0, len(pairs.z), self.side):
                yield slice(row, min(row + self.side, pairs.own.stop)), slice(column, column + self.side)


def _sets(pairs: Pairs, rows: slice, columns: slice) -> Iterator[tuple[Tensor, Tensor]]:
    """For each term, where in a tile a column is a positive of the row, and where it is in its denominator."""
    same = pairs.groups[rows, None] == pairs.groups[columns]
    numbers = torch.arange(len(pairs.z), device=pairs.z.device)
    itself = numbers[rows, None] == numbers[columns]
    exits = pairs.exits[columns]
    for term in pairs.terms:
        positive = same & belongs(exits, term.positives) & ~itself
        yield positive, positive | (~same & belongs(exits, term.negatives))
