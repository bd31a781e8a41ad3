"""Pairs in square tiles, in plain PyTorch on any device: memory for the features and one tile, for any method.

Anchors are rows and what they are contrasted with columns; they may be the same features, or those of two processes.
n rows, N columns, D dimension, T terms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from selfcon.losses import pairwise
from selfcon.losses.pairwise import Pairs, Statistics
from selfcon.losses.sets import Contrast, Term, belongs

SIDE = 2048


def term_sums(contrast: Contrast, terms: Sequence[Term], temperature: float | Tensor) -> tuple[Tensor, Tensor]:
    """As `dense.term_sums`."""
    return pairwise.term_sums(contrast, terms, temperature, Tiles())


@dataclass(frozen=True)
class Side:
    """Features, what makes them belong together, and where they left the network."""

    z: Tensor  # [n, D]
    groups: Tensor  # [n]
    exits: Tensor  # [n]

    def part(self, rows: slice) -> Side:
        return Side(self.z[rows], self.groups[rows], self.exits[rows])


@dataclass(frozen=True)
class Rectangle:
    """Rows against columns; `offset` is the column that row 0 is itself, None where rows are not among the columns."""

    rows: Side
    columns: Side
    offset: int | None
    terms: Sequence[Term]
    tau: Tensor
    side: int = SIDE

    def statistics(self) -> Statistics:
        """As `pairwise.Engine.statistics`, over these columns."""
        n, terms, z = len(self.rows.z), len(self.terms), self.rows.z
        log_denominator = z.new_full((terms, n), -torch.inf)
        attraction = z.new_zeros(terms, n)
        positives = torch.zeros(terms, n, dtype=torch.int64, device=z.device)
        for here, there in self._tiles():
            cosines = z[here] @ self.columns.z[there].T
            similarities = cosines / self.tau
            for number, (positive, within) in enumerate(self._sets(here, there)):
                new = similarities.masked_fill(~within, -torch.inf).logsumexp(1)
                log_denominator[number, here] = torch.logaddexp(log_denominator[number, here], new)
                attraction[number, here] += torch.where(positive, cosines, 0).sum(1)
                positives[number, here] += positive.sum(1)
        return Statistics(log_denominator, attraction, positives)

    def gradient(self, log_denominator: Tensor, pull: Tensor, push: Tensor) -> tuple[Tensor, Tensor]:
        """G Z / tau for the rows, G' Z / tau for the columns; see `pairwise.Engine.gradient`."""
        of_rows, of_columns = torch.zeros_like(self.rows.z), torch.zeros_like(self.columns.z)
        for here, there in self._tiles():
            similarities = self.rows.z[here] @ self.columns.z[there].T / self.tau
            weights = torch.zeros_like(similarities)
            for number, (positive, within) in enumerate(self._sets(here, there)):
                shares = (similarities - log_denominator[number, here, None]).masked_fill(~within, -torch.inf).exp()
                weights += pull[number, here, None] * shares
                weights -= push[number, here, None] * positive
            of_rows[here] += weights @ self.columns.z[there]
            of_columns[there] += weights.T @ self.rows.z[here]
        return of_rows / self.tau, of_columns / self.tau

    def _tiles(self) -> Iterator[tuple[slice, slice]]:
        for row in range(0, len(self.rows.z), self.side):
            for column in range(0, len(self.columns.z), self.side):
                yield slice(row, row + self.side), slice(column, column + self.side)

    def _sets(self, here: slice, there: slice) -> Iterator[tuple[Tensor, Tensor]]:
        """For each term, where in a tile a column is a positive of the row, and where it is in its denominator."""
        rows, columns = self.rows.part(here), self.columns.part(there)
        same = rows.groups[:, None] == columns.groups
        apart = torch.ones_like(same)
        if self.offset is not None:
            places = torch.arange(len(rows.z), device=same.device) + (self.offset + here.start - there.start)
            apart = places[:, None] != torch.arange(len(columns.z), device=same.device)
        for term in self.terms:
            positive = same & belongs(columns.exits, term.positives) & apart
            yield positive, positive | (~same & belongs(columns.exits, term.negatives))


class Tiles:
    """The engine for features that are all here."""

    def __init__(self, side: int = SIDE) -> None:
        self.side = side

    def statistics(self, pairs: Pairs) -> Statistics:
        return self._rectangle(pairs).statistics()

    def gradient(self, pairs: Pairs, log_denominator: Tensor, pull: Tensor, push: Tensor) -> Tensor:
        of_rows, gradient = self._rectangle(pairs).gradient(log_denominator, pull, push)
        gradient[pairs.own] += of_rows
        return gradient

    def _rectangle(self, pairs: Pairs) -> Rectangle:
        everything = Side(pairs.z, pairs.groups, pairs.exits)
        return Rectangle(
            everything.part(pairs.own), everything, pairs.own.start, pairs.terms, pairs.tau, side=self.side
        )
