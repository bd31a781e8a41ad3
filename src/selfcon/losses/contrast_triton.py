"""Pairs in tiles on a GPU: what is launched, on which tiles, for which rows.

The kernels are in `contrast_places` (what comes first) and `contrast_kernels` (the tiles).

Features are sorted by group. For the rows of a program the columns of their groups are then one stretch, and only there
(and in a last tile that is not full) must a pair be asked what it is; elsewhere all pairs are negatives.

Exits matter only as F (the backbone) or G (a sub-network); a set of them is two bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from selfcon.losses import contrast_kernels, contrast_places, pairwise
from selfcon.losses.pairwise import Pairs, Statistics
from selfcon.losses.sets import Contrast, Exits, Term

LARGEST_DIMENSION = 512
MOST_TERMS = 2
_BITS: dict[Exits, int] = {"F": 1, "G": 2, "F+G": 3}


def term_sums(contrast: Contrast, terms: Sequence[Term], temperature: float | Tensor) -> tuple[Tensor, Tensor]:
    """As `dense.term_sums`."""
    return pairwise.term_sums(contrast, terms, temperature, Kernels())


class Kernels:
    """The engine."""

    def statistics(self, pairs: Pairs) -> Statistics:
        log_denominator, attraction, positives, distance = _statistics_op(
            pairs.z, pairs.groups, pairs.exits, pairs.tau, _encode(pairs.terms),
            pairs.own.start, pairs.own.stop, pairs.stable, pairs.distances,
        )  # fmt: skip
        return Statistics(log_denominator, attraction, positives, distance if pairs.distances else None)

    def gradient(self, pairs: Pairs, log_denominator: Tensor, pull: Tensor, push: Tensor) -> Tensor:
        gradient: Tensor = _gradient_op(
            pairs.z, pairs.groups, pairs.exits, pairs.tau, _encode(pairs.terms), log_denominator, pull, push,
            pairs.own.start, pairs.own.stop, pairs.stable,
        )  # fmt: skip
        return gradient


def _encode(terms: Sequence[Term]) -> list[int]:
    """Sets of positives and of negatives of the first term, and of the second; without one, empty sets."""
    bits = [bits for term in terms for bits in (_BITS[term.positives], _BITS[term.negatives])]
    return [*bits, 0, 0][:4]


_TILES = (
    (32_768, (128, 64, 4, 3)),
    (4096, (64, 64, 4, 3)),
    (0, (32, 64, 4, 3)),
    (0, (64, 64, 8, 2)),
    (0, (64, 32, 8, 2)),
    (0, (32, 32, 4, 1)),
    (0, (16, 16, 4, 1)),
)
"""Above how many features, and the tiles: rows, columns, warps, tiles loaded ahead. The first that fit are taken."""
_COUNTED = 4096
"""Up to so many features each finds its place by counting those before it, in one kernel; above, sorting is faster."""


def fits(dimension: int, device: torch.device) -> bool:
    """Whether any tiles do."""
    return _shape(dimension, 0, device) is not None


def _shape(dimension: int, features: int, device: torch.device) -> dict[str, int] | None:
    """The first tiles that the shared memory and registers of a GPU hold: those of the gradient, which needs more."""
    limit = 227 * 1024  # of the interpreter, which has no limits
    if device.type == "cuda":
        limit = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    wide = _wide(dimension)
    for above, (rows, columns, warps, stages) in _TILES:
        sums = rows * (wide + columns) / (32 * warps)  # registers of a thread
        tiles = max(rows + columns * stages, 2 * (rows + columns))  # where all are negatives, and elsewhere
        fit = 2 * wide * tiles + 2 * rows * columns + 4096 <= limit
        if features >= above and fit and sums <= (192 if wide <= 128 else 144):
            return {"ROWS": rows, "COLUMNS": columns, "num_warps": warps, "num_stages": stages}
    return None


def _wide(dimension: int) -> int:
    return max(16, int(triton.next_power_of_2(dimension)))


@dataclass(frozen=True)
class _Sorted:
    """Features by group, as the kernels read them."""

    order: Tensor  # [n], where each one stood
    features: Tensor  # [n, WIDE], float16
    scales: Tensor  # [n], 1 over the lengths of the rounded features
    groups: Tensor  # [n]
    kinds: Tensor  # [n], 0 for F and 1 for G
    begins: Tensor  # [n], the first of all columns that share its group
    ends: Tensor  # [n], the first behind those


def _sort(
    z: Tensor, groups: Tensor, exits: Tensor, *, rows: slice | None = None, columns: _Sorted | None = None
) -> _Sorted:
    """Features, or some of them, by group; beside columns that are others than themselves if those are given."""
    counting = rows is None and columns is None and len(z) <= _COUNTED
    if counting:
        groups, found = groups.contiguous(), torch.empty_like(groups)
        order, begins, ends = torch.empty((3, len(z)), dtype=torch.int64, device=z.device)
    else:
        rows = rows or slice(0, len(z))
        found, order = groups[rows].sort(stable=True)
        order = order + rows.start
        beside = found if columns is None else columns.groups
        begins, ends = (torch.searchsorted(beside, found, right=right) for right in (False, True))
    count, wide = len(order), _wide(z.shape[1])
    features = torch.empty(count, wide, dtype=torch.float16, device=z.device)
    scales = torch.empty(count, device=z.device)
    kinds = torch.empty(count, dtype=torch.int32, device=z.device)
    block = 16 if counting else max(1, 4096 // wide)
    contrast_places.pack[triton.cdiv(count, block),](
        z, groups, exits, order, found, begins, ends, features, scales, kinds, count,
        DIMENSION=z.shape[1], WIDE=wide, COUNTING=counting, ROWS=block, OTHERS=256,
    )  # fmt: skip
    return _Sorted(order, features, scales, found, kinds, begins, ends)


@torch.library.custom_op("selfcon::contrast_statistics", mutates_args=())
def _statistics_op(
    z: Tensor,
    groups: Tensor,
    exits: Tensor,
    tau: Tensor,
    sets: Sequence[int],
    first: int,
    stop: int,
    stable: bool,
    distances: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    z = z.contiguous()
    columns = _sort(z, groups, exits)
    rows = columns
    if stop - first < len(z):
        rows = _sort(z, groups, exits, rows=slice(first, stop), columns=columns)
    count, terms = stop - first, 2 if sets[2] else 1
    log_denominator = torch.empty(terms, count, device=z.device)
    attraction = torch.empty(terms, count, device=z.device)
    positives = torch.empty(terms, count, dtype=torch.int64, device=z.device)
    found = torch.empty(terms if distances else 0, count, device=z.device)
    shape = _shape(z.shape[1], len(z), z.device)
    assert shape is not None  # `fits` was asked before
    contrast_kernels.statistics[triton.cdiv(count, shape["ROWS"]),](
        z, rows.features, rows.scales, rows.groups, rows.order,
        columns.features, columns.scales, columns.groups, columns.kinds, columns.order,
        rows.begins, rows.ends, tau, log_denominator, attraction, positives, found, first, count, len(z),
        DIMENSION=z.shape[1], WIDE=_wide(z.shape[1]),
        POSITIVES_0=sets[0], NEGATIVES_0=sets[1], POSITIVES_1=sets[2], NEGATIVES_1=sets[3],
        TERMS=terms, STABLE=stable, DISTANCES=distances,
        **shape,
    )  # fmt: skip
    return log_denominator, attraction, positives, found


@_statistics_op.register_fake
def _(
    z: Tensor,
    groups: Tensor,
    exits: Tensor,
    tau: Tensor,
    sets: Sequence[int],
    first: int,
    stop: int,
    stable: bool,
    distances: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    terms, count = 2 if sets[2] else 1, stop - first
    numbers, distance = z.new_empty(terms, count), z.new_empty(terms if distances else 0, count)
    return numbers, torch.empty_like(numbers), torch.empty_like(numbers, dtype=torch.int64), distance


@torch.library.custom_op("selfcon::contrast_gradient", mutates_args=())
def _gradient_op(
    z: Tensor,
    groups: Tensor,
    exits: Tensor,
    tau: Tensor,
    sets: Sequence[int],
    log_denominator: Tensor,
    pull: Tensor,
    push: Tensor,
    first: int,
    stop: int,
    stable: bool,
) -> Tensor:
    z = z.contiguous()
    terms = 2 if sets[2] else 1
    largest = torch.linalg.vector_norm(pull, ord=torch.inf)
    gradient = torch.empty_like(z)
    shape = _shape(z.shape[1], len(z), z.device)
    assert shape is not None

    def arrange(features: _Sorted) -> Tensor:
        count = len(features.order)
        forces = torch.empty(3, terms, count, device=z.device)
        contrast_places.arrange[triton.cdiv(count, 1024), terms](
            features.order, log_denominator.contiguous(), pull.contiguous(), push.contiguous(), largest, tau, forces,
            first, stop, count, terms, STABLE=stable, ROWS=1024,
        )  # fmt: skip
        return forces

    def run(rows: _Sorted, columns: _Sorted) -> None:
        of_columns = arrange(columns)
        of_rows = of_columns if rows is columns else arrange(rows)
        count = len(rows.order)
        contrast_kernels.gradient[triton.cdiv(count, shape["ROWS"]),](
            z, rows.features, rows.scales, rows.groups, rows.kinds, rows.order, rows.begins, rows.ends, of_rows,
            columns.features, columns.scales, columns.groups, columns.kinds, columns.order, of_columns,
            tau, largest, gradient, count, len(columns.order),
            DIMENSION=z.shape[1], WIDE=_wide(z.shape[1]),
            POSITIVES_0=sets[0], NEGATIVES_0=sets[1], POSITIVES_1=sets[2], NEGATIVES_1=sets[3],
            TERMS=terms, STABLE=stable,
            **shape,
        )  # fmt: skip

    every = _sort(z, groups, exits)
    if stop - first == len(z):
        run(every, every)
        return gradient
    # Other processes' features are no anchors here: they meet only those that are.
    run(_sort(z, groups, exits, rows=slice(first, stop), columns=every), every)
    own = _sort(z, groups, exits, rows=slice(first, stop))
    for others in (slice(0, first), slice(stop, len(z))):
        if others.stop > others.start:
            run(_sort(z, groups, exits, rows=others, columns=own), own)
    return gradient


@_gradient_op.register_fake
def _(
    z: Tensor,
    groups: Tensor,
    exits: Tensor,
    tau: Tensor,
    sets: Sequence[int],
    log_denominator: Tensor,
    pull: Tensor,
    push: Tensor,
    first: int,
    stop: int,
    stable: bool,
) -> Tensor:
    return torch.empty_like(z, memory_format=torch.contiguous_format)
