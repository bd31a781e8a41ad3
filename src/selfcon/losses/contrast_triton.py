"""Pairs in tiles, as GPU kernels: a program goes through all columns for its rows, so nothing is added in a race.

Products are in TF32 of features that were rounded to it before, so that all passes see the same features; sums and
everything else are in float32. Exits matter only as F (the backbone) or G (a sub-network), and a term is six bits: for
each of F and G whether a feature there can be a positive, and whether a negative.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfcon.losses import pairwise
from selfcon.losses.pairwise import Pairs
from selfcon.losses.sets import Contrast, Exits, Term

LARGEST_DIMENSION = 512
MOST_TERMS = 2
_BITS: dict[Exits, int] = {"F": 1, "G": 2, "F+G": 3}


def term_sums(contrast: Contrast, terms: Sequence[Term], temperature: float | Tensor) -> tuple[Tensor, Tensor]:
    """As `dense.term_sums`."""
    return pairwise.term_sums(contrast, terms, temperature, Kernels())


class Kernels:
    """The engine."""

    def statistics(self, pairs: Pairs) -> tuple[Tensor, Tensor, Tensor]:
        rounded = _rounded(pairs.z)
        sets = _encode(pairs.terms)
        found: tuple[Tensor, Tensor, Tensor] = _statistics_op(
            rounded, pairs.groups, pairs.exits, pairs.tau, sets, pairs.own.start, pairs.own.stop, pairs.stable
        )
        return found

    def gradient(self, pairs: Pairs, log_denominator: Tensor, pull: Tensor, push: Tensor) -> Tensor:
        # Rows of other processes are anchors there, and have no share here.
        before, after = pairs.own.start, len(pairs.z) - pairs.own.stop
        if pairs.stable:
            pull = pull * torch.exp(1 / pairs.tau - log_denominator)
        pull, push = (torch.nn.functional.pad(each, (before, after)) for each in (pull, push))
        log_denominator = torch.nn.functional.pad(log_denominator, (before, after), value=torch.inf)
        sets = _encode(pairs.terms)
        gradient: Tensor = _gradient_op(
            _rounded(pairs.z), pairs.groups, pairs.exits, pairs.tau, sets, log_denominator, pull, push, pairs.stable
        )
        return gradient


def _encode(terms: Sequence[Term]) -> list[int]:
    return [bits for term in terms for bits in (_BITS[term.positives], _BITS[term.negatives])]


def _rounded(z: Tensor) -> Tensor:
    """To the 10 bits that TF32 keeps, to nearest; the kernels would cut them off."""
    if z.device.type != "cuda":
        return z.contiguous()
    rounded = ((z.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
    return torch.where(z.isfinite(), rounded, z)  # NaN must stay visible


_TILES = (
    (128, 64, 8, 3),
    (128, 64, 8, 2),
    (64, 64, 8, 2),
    (64, 32, 4, 2),
    (64, 32, 4, 1),
    (32, 32, 4, 1),
    (16, 16, 4, 1),
)
"""Rows, columns, warps, tiles loaded ahead: from the fastest to the smallest."""


def fits(dimension: int, device: torch.device) -> bool:
    """Whether any tiles do."""
    return _shape(dimension, device) is not None


def _shape(dimension: int, device: torch.device) -> dict[str, int] | None:
    """The first tiles that the shared memory of a GPU holds: those of the gradient, which needs more."""
    limit = 227 * 1024  # of the interpreter, which has no limits
    if device.type == "cuda":
        limit = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    wide = 4 * max(16, triton.next_power_of_2(dimension))
    for rows, columns, warps, stages in _TILES:
        # features of the rows, of the columns ahead and once more turned around, the weights, and some more
        if wide * (rows + columns * max(2, stages)) + 4 * rows * columns + 4096 <= limit:
            return {"ROWS": rows, "COLUMNS": columns, "num_warps": warps, "num_stages": stages}
    return None


def _tiles(z: Tensor) -> dict[str, int]:
    shape = _shape(z.shape[1], z.device)
    assert shape is not None  # `fits` was asked before
    return shape


@torch.library.custom_op("selfcon::contrast_statistics", mutates_args=())
def _statistics_op(
    z: Tensor, groups: Tensor, exits: Tensor, tau: Tensor, sets: Sequence[int], first: int, stop: int, stable: bool
) -> tuple[Tensor, Tensor, Tensor]:
    rows, terms = stop - first, len(sets) // 2
    log_denominator = torch.empty(terms, rows, device=z.device)
    attraction = torch.empty(terms, rows, device=z.device)
    positives = torch.empty(terms, rows, dtype=torch.int64, device=z.device)
    shape = _tiles(z)
    _statistics[triton.cdiv(rows, shape["ROWS"]),](
        z,
        groups,
        exits,
        tau,
        log_denominator,
        attraction,
        positives,
        first,
        rows,
        len(z),
        DIMENSION=z.shape[1],
        WIDE=max(16, triton.next_power_of_2(z.shape[1])),
        POSITIVES_0=sets[0],
        NEGATIVES_0=sets[1],
        POSITIVES_1=sets[2] if terms == 2 else 0,
        NEGATIVES_1=sets[3] if terms == 2 else 0,
        TERMS=terms,
        STABLE=stable,
        **shape,
    )
    return log_denominator, attraction, positives


@_statistics_op.register_fake
def _(
    z: Tensor, groups: Tensor, exits: Tensor, tau: Tensor, sets: Sequence[int], first: int, stop: int, stable: bool
) -> tuple[Tensor, Tensor, Tensor]:
    shape = (len(sets) // 2, stop - first)
    return z.new_empty(shape), z.new_empty(shape), z.new_empty(shape, dtype=torch.int64)


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
    stable: bool,
) -> Tensor:
    gradient = torch.empty_like(z)
    shape = _tiles(z)
    terms = len(sets) // 2
    _gradient[triton.cdiv(len(z), shape["ROWS"]),](
        z,
        groups,
        exits,
        tau,
        log_denominator.contiguous(),
        pull.contiguous(),
        push.contiguous(),
        gradient,
        len(z),
        DIMENSION=z.shape[1],
        WIDE=max(16, triton.next_power_of_2(z.shape[1])),
        POSITIVES_0=sets[0],
        NEGATIVES_0=sets[1],
        POSITIVES_1=sets[2] if terms == 2 else 0,
        NEGATIVES_1=sets[3] if terms == 2 else 0,
        TERMS=terms,
        STABLE=stable,
        **shape,
    )
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
    stable: bool,
) -> Tensor:
    return torch.empty_like(z)


@triton.jit
def _member(kind, BITS: tl.constexpr):
    """Whether a feature of this kind (0 F, 1 G) is in a set."""
    return ((BITS >> kind) & 1) == 1


@triton.jit
def _add(total, largest, similarities, within, STABLE: tl.constexpr):
    """A tile's share of the denominators: as sums of exponentials, beside a running maximum where that is needed."""
    if STABLE:
        total += tl.sum(tl.where(within, tl.exp(similarities), 0.0), axis=1)
    else:
        masked = tl.where(within, similarities, float("-inf"))
        new = tl.maximum(largest, tl.max(masked, axis=1))
        anchor = tl.where(new == float("-inf"), 0.0, new)  # nothing yet
        total = total * tl.exp(largest - anchor) + tl.sum(tl.exp(masked - anchor[:, None]), axis=1)
        largest = new
    return total, largest


@triton.jit(do_not_specialize=["first", "rows", "features"])
def _statistics(
    z,
    groups,
    exits,
    tau,
    log_denominator,
    attraction,
    positives,
    first,
    rows,
    features,
    DIMENSION: tl.constexpr,
    WIDE: tl.constexpr,
    POSITIVES_0: tl.constexpr,
    NEGATIVES_0: tl.constexpr,
    POSITIVES_1: tl.constexpr,
    NEGATIVES_1: tl.constexpr,
    TERMS: tl.constexpr,
    STABLE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < rows
    row_at = (row + first).to(tl.int64)
    d = tl.arange(0, WIDE)
    z_row = tl.load(
        z + row_at[:, None] * DIMENSION + d[None, :], mask=there[:, None] & (d < DIMENSION)[None, :], other=0.0
    )
    group_row = tl.load(groups + row_at, mask=there, other=-1)
    over_tau = 1.0 / tl.load(tau)

    total_0 = tl.zeros((ROWS,), tl.float32)
    largest_0 = tl.full((ROWS,), float("-inf"), tl.float32)
    pulled_0 = tl.zeros((ROWS,), tl.float32)
    count_0 = tl.zeros((ROWS,), tl.int32)
    total_1 = tl.zeros((ROWS,), tl.float32)
    largest_1 = tl.full((ROWS,), float("-inf"), tl.float32)
    pulled_1 = tl.zeros((ROWS,), tl.float32)
    count_1 = tl.zeros((ROWS,), tl.int32)
    for start in range(0, features, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < features
        z_column = tl.load(
            z + column.to(tl.int64)[None, :] * DIMENSION + d[:, None],
            mask=inside[None, :] & (d < DIMENSION)[:, None],
            other=0.0,
        )
        group = tl.load(groups + column, mask=inside, other=-1)
        kind = (tl.load(exits + column, mask=inside, other=0) > 0).to(tl.int32)
        cosines = tl.dot(z_row, z_column, input_precision="tf32")
        similarities = cosines * over_tau
        if STABLE:
            similarities = similarities - over_tau
        same = (group_row[:, None] == group[None, :]) & inside[None, :]
        other = (group_row[:, None] != group[None, :]) & inside[None, :]
        same = same & (row_at[:, None] != column[None, :])
        positive = same & _member(kind, POSITIVES_0)[None, :]
        within = positive | (other & _member(kind, NEGATIVES_0)[None, :])
        total_0, largest_0 = _add(total_0, largest_0, similarities, within, STABLE)
        pulled_0 += tl.sum(tl.where(positive, cosines, 0.0), axis=1)
        count_0 += tl.sum(positive.to(tl.int32), axis=1)
        if TERMS == 2:
            positive = same & _member(kind, POSITIVES_1)[None, :]
            within = positive | (other & _member(kind, NEGATIVES_1)[None, :])
            total_1, largest_1 = _add(total_1, largest_1, similarities, within, STABLE)
            pulled_1 += tl.sum(tl.where(positive, cosines, 0.0), axis=1)
            count_1 += tl.sum(positive.to(tl.int32), axis=1)

    shift_0 = largest_0
    shift_1 = largest_1
    if STABLE:
        shift_0 = tl.zeros((ROWS,), tl.float32) + over_tau
        shift_1 = shift_0
    tl.store(log_denominator + row, shift_0 + tl.log(total_0), mask=there)
    tl.store(attraction + row, pulled_0, mask=there)
    tl.store(positives + row, count_0.to(tl.int64), mask=there)
    if TERMS == 2:
        tl.store(log_denominator + rows + row, shift_1 + tl.log(total_1), mask=there)
        tl.store(attraction + rows + row, pulled_1, mask=there)
        tl.store(positives + rows + row, count_1.to(tl.int64), mask=there)


@triton.jit
def _weights(
    similarities,
    row_at,
    column,
    same,
    other,
    kind_row,
    kind,
    log_denominator,
    pull,
    push,
    there,
    inside,
    POSITIVES: tl.constexpr,
    NEGATIVES: tl.constexpr,
    STABLE: tl.constexpr,
):
    """What one term adds to G + G'. `similarities` are their exponentials where those can be shared."""
    pull_row = tl.load(pull + row_at, mask=there, other=0.0)
    push_row = tl.load(push + row_at, mask=there, other=0.0)
    pull_column = tl.load(pull + column, mask=inside, other=0.0)
    push_column = tl.load(push + column, mask=inside, other=0.0)
    positive = same & _member(kind, POSITIVES)[None, :]
    within = positive | (other & _member(kind, NEGATIVES)[None, :])
    positive_back = same & _member(kind_row, POSITIVES)[:, None]
    within_back = positive_back | (other & _member(kind_row, NEGATIVES)[:, None])
    if STABLE:
        both = tl.where(within, pull_row[:, None], 0.0) + tl.where(within_back, pull_column[None, :], 0.0)
        weights = similarities * both
    else:
        log_row = tl.load(log_denominator + row_at, mask=there, other=float("inf"))
        log_column = tl.load(log_denominator + column, mask=inside, other=float("inf"))
        # Within a denominator no exponent is above 0; elsewhere it may be, and does not count.
        share = tl.exp(tl.minimum(similarities - log_row[:, None], 0.0))
        share_back = tl.exp(tl.minimum(similarities - log_column[None, :], 0.0))
        weights = tl.where(within, share * pull_row[:, None], 0.0)
        weights += tl.where(within_back, share_back * pull_column[None, :], 0.0)
    weights -= tl.where(positive, push_row[:, None], 0.0) + tl.where(positive_back, push_column[None, :], 0.0)
    return weights


@triton.jit(do_not_specialize=["features"])
def _gradient(
    z,
    groups,
    exits,
    tau,
    log_denominator,
    pull,
    push,
    gradient,
    features,
    DIMENSION: tl.constexpr,
    WIDE: tl.constexpr,
    POSITIVES_0: tl.constexpr,
    NEGATIVES_0: tl.constexpr,
    POSITIVES_1: tl.constexpr,
    NEGATIVES_1: tl.constexpr,
    TERMS: tl.constexpr,
    STABLE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < features
    row_at = row.to(tl.int64)
    d = tl.arange(0, WIDE)
    z_row = tl.load(
        z + row_at[:, None] * DIMENSION + d[None, :], mask=there[:, None] & (d < DIMENSION)[None, :], other=0.0
    )
    group_row = tl.load(groups + row_at, mask=there, other=-1)
    kind_row = (tl.load(exits + row_at, mask=there, other=0) > 0).to(tl.int32)
    over_tau = 1.0 / tl.load(tau)
    sums = tl.zeros((ROWS, WIDE), tl.float32)
    for start in range(0, features, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < features
        z_column = tl.load(
            z + column.to(tl.int64)[:, None] * DIMENSION + d[None, :],
            mask=inside[:, None] & (d < DIMENSION)[None, :],
            other=0.0,
        )
        group = tl.load(groups + column, mask=inside, other=-1)
        kind = (tl.load(exits + column, mask=inside, other=0) > 0).to(tl.int32)
        similarities = tl.dot(z_row, tl.trans(z_column), input_precision="tf32") * over_tau
        if STABLE:
            similarities = tl.exp(similarities - over_tau)
        both = there[:, None] & inside[None, :]
        other = (group_row[:, None] != group[None, :]) & both
        same = (group_row[:, None] == group[None, :]) & both & (row_at[:, None] != column[None, :])
        weights = _weights(
            similarities, row_at, column, same, other, kind_row, kind, log_denominator, pull, push, there,
            inside, POSITIVES_0, NEGATIVES_0, STABLE,
        )  # fmt: skip
        if TERMS == 2:
            weights += _weights(
                similarities, row_at, column, same, other, kind_row, kind, log_denominator + features,
                pull + features, push + features, there, inside, POSITIVES_1, NEGATIVES_1, STABLE,
            )  # fmt: skip
        sums = tl.dot(weights, z_column, sums, input_precision="tf32")
    target = gradient + row_at[:, None] * DIMENSION + d[None, :]
    tl.store(target, sums * over_tau, mask=there[:, None] & (d < DIMENSION)[None, :])
