"""The tiles of `contrast_triton`: a program goes through all columns for its rows, so nothing is added in a race.

Products are of float16 with sums in float32, at the full rate of the matrix units; `contrast_places` says what keeps
them exact enough.

Exponents are to the base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from selfcon.losses.contrast_places import largest_weight, split

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _count_tiles(begin, end, features, COLUMNS: tl.constexpr):
    """Tiles of columns: where those begin and end that may hold the rows' groups, full ones, plain ones, others."""
    first = begin // COLUMNS
    behind = tl.cdiv(end, COLUMNS)
    full = features // COLUMNS
    plain = first + tl.maximum(full - behind, 0)
    return first, behind, full, plain, tl.cdiv(features, COLUMNS) - plain


@triton.jit
def _plain_tile(number, first, behind):
    """Where the tile stands that is this one among those with negatives only."""
    return tl.where(number < first, number, number - first + behind)


@triton.jit
def _mixed_tile(number, first, behind, full):
    """Where the tile stands that is this one among the others: the rows' groups, then a last one that is not full."""
    return tl.where(number < behind - first, number + first, full)


@triton.jit
def _cosines(h_row, rest_row, h_column, rest_column):
    """Of the features as they were before rounding."""
    finer = tl.dot(h_row, tl.trans(rest_column), tl.dot(rest_row, tl.trans(h_column)))
    return tl.dot(h_row, tl.trans(h_column)) + finer * (1 / 2048)


@triton.jit
def _member(kind, BITS: tl.constexpr):
    """Whether a feature of this kind is in a set."""
    return ((BITS >> kind) & 1) == 1


@triton.jit
def _add(total, largest, distance, cosines, exponents, STABLE: tl.constexpr, DISTANCES: tl.constexpr):
    """A tile's share of the denominators: as sums of powers, beside a running maximum where that is needed.

    With `DISTANCES`, also of the same sums with each power times 1 - cosine: exact where features are nearly equal.
    """
    if STABLE:
        powers = tl.exp2(exponents)
    else:
        new = tl.maximum(largest, tl.max(exponents, axis=1))
        anchor = tl.where(new == float("-inf"), 0.0, new)  # nothing yet
        before = tl.exp2(largest - anchor)
        total = total * before
        distance = distance * before
        powers = tl.exp2(exponents - anchor[:, None])
        largest = new
    total += tl.sum(powers, axis=1)
    if DISTANCES:
        distance += tl.sum(powers * (1.0 - cosines), axis=1)
    return total, largest, distance


@triton.jit
def _add_mixed(
    total, largest, distance, pulled, count, cosines, exponents, same, other, kind,
    POSITIVES: tl.constexpr, NEGATIVES: tl.constexpr, STABLE: tl.constexpr, DISTANCES: tl.constexpr,
):  # fmt: skip
    positive = same & _member(kind, POSITIVES)[None, :]
    within = positive | (other & _member(kind, NEGATIVES)[None, :])
    exponents = tl.where(within, exponents, float("-inf"))
    total, largest, distance = _add(total, largest, distance, cosines, exponents, STABLE, DISTANCES)
    pulled += tl.sum(tl.where(positive, cosines, 0.0), axis=1)
    count += tl.sum(positive.to(tl.int32), axis=1)
    return total, largest, distance, pulled, count


@triton.jit
def _add_plain(total, largest, distance, cosines, exponents, columns, kinds,
               NEGATIVES: tl.constexpr, STABLE: tl.constexpr, DISTANCES: tl.constexpr):  # fmt: skip
    if NEGATIVES != 3:
        member = _member(tl.load(kinds + columns), NEGATIVES)
        exponents = tl.where(member[None, :], exponents, float("-inf"))
    return _add(total, largest, distance, cosines, exponents, STABLE, DISTANCES)


@triton.jit(do_not_specialize=["first", "rows", "features"])
def statistics(
    z, row_features, row_scales, row_groups, row_order,
    features_of, scales, groups, kinds, order,
    begins, ends, tau, log_denominator, attraction, positives, distances, first, rows, features,
    DIMENSION: tl.constexpr, WIDE: tl.constexpr,
    POSITIVES_0: tl.constexpr, NEGATIVES_0: tl.constexpr, POSITIVES_1: tl.constexpr, NEGATIVES_1: tl.constexpr,
    TERMS: tl.constexpr, STABLE: tl.constexpr, DISTANCES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    row = block * ROWS + tl.arange(0, ROWS)
    there = row < rows
    d = tl.arange(0, WIDE)
    h_row = tl.load(row_features + row.to(tl.int64)[:, None] * WIDE + d[None, :], mask=there[:, None], other=0.0)
    place = tl.load(row_order + row, mask=there, other=0)
    over_tau = _LOG2E / tl.load(tau)
    shift = 0.0
    if STABLE:
        shift = over_tau
    scale_row = tl.load(row_scales + row, mask=there, other=0.0)
    factor = scale_row * over_tau
    last = tl.minimum(block * ROWS + ROWS, rows) - 1
    begin, behind, full, plain, mixed = _count_tiles(
        tl.load(begins + block * ROWS), tl.load(ends + last), features, COLUMNS
    )

    total_0 = tl.zeros((ROWS,), tl.float32)
    largest_0 = tl.full((ROWS,), float("-inf"), tl.float32)
    distance_0 = tl.zeros((ROWS,), tl.float32)
    pulled_0 = tl.zeros((ROWS,), tl.float32)
    count_0 = tl.zeros((ROWS,), tl.int32)
    total_1 = tl.zeros((ROWS,), tl.float32)
    largest_1 = tl.full((ROWS,), float("-inf"), tl.float32)
    distance_1 = tl.zeros((ROWS,), tl.float32)
    pulled_1 = tl.zeros((ROWS,), tl.float32)
    count_1 = tl.zeros((ROWS,), tl.int32)

    for number in range(plain):
        column = _plain_tile(number, begin, behind) * COLUMNS + tl.arange(0, COLUMNS)
        h_column = tl.load(features_of + column.to(tl.int64)[None, :] * WIDE + d[:, None])
        products = tl.dot(h_row, h_column) * tl.load(scales + column)[None, :]
        exponents = products * factor[:, None] - shift
        cosines = products * scale_row[:, None]
        total_0, largest_0, distance_0 = _add_plain(
            total_0, largest_0, distance_0, cosines, exponents, column, kinds, NEGATIVES_0, STABLE, DISTANCES
        )
        if TERMS == 2:
            total_1, largest_1, distance_1 = _add_plain(
                total_1, largest_1, distance_1, cosines, exponents, column, kinds, NEGATIVES_1, STABLE, DISTANCES
            )

    # Errors of many negatives level out; those of the few positives would be seen in the loss.
    group_row = tl.load(row_groups + row, mask=there, other=0)
    h_row, rest_row = split(z, place, there, d, DIMENSION)
    for number in tl.range(0, mixed, num_stages=1):
        column = _mixed_tile(number, begin, behind, full) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < features
        place_column = tl.load(order + column, mask=inside, other=0)
        h_column, rest_column = split(z, place_column, inside, d, DIMENSION)
        cosines = _cosines(h_row, rest_row, h_column, rest_column)
        exponents = cosines * over_tau - shift
        group = tl.load(groups + column, mask=inside, other=0)
        kind = tl.load(kinds + column, mask=inside, other=0)
        apart = place[:, None] != place_column[None, :]
        same = (group_row[:, None] == group[None, :]) & inside[None, :] & apart
        other = (group_row[:, None] != group[None, :]) & inside[None, :]
        total_0, largest_0, distance_0, pulled_0, count_0 = _add_mixed(
            total_0, largest_0, distance_0, pulled_0, count_0, cosines, exponents, same, other, kind,
            POSITIVES_0, NEGATIVES_0, STABLE, DISTANCES,
        )  # fmt: skip
        if TERMS == 2:
            total_1, largest_1, distance_1, pulled_1, count_1 = _add_mixed(
                total_1, largest_1, distance_1, pulled_1, count_1, cosines, exponents, same, other, kind,
                POSITIVES_1, NEGATIVES_1, STABLE, DISTANCES,
            )  # fmt: skip

    target = place - first
    if STABLE:
        largest_0 = tl.zeros((ROWS,), tl.float32) + over_tau
        largest_1 = largest_0
    tl.store(log_denominator + target, (largest_0 + tl.log2(total_0)) * _LN2, mask=there)
    tl.store(attraction + target, pulled_0, mask=there)
    tl.store(positives + target, count_0.to(tl.int64), mask=there)
    if DISTANCES:
        tl.store(distances + target, distance_0 / total_0, mask=there)
    if TERMS == 2:
        tl.store(log_denominator + rows + target, (largest_1 + tl.log2(total_1)) * _LN2, mask=there)
        tl.store(attraction + rows + target, pulled_1, mask=there)
        tl.store(positives + rows + target, count_1.to(tl.int64), mask=there)
        if DISTANCES:
            tl.store(distances + rows + target, distance_1 / total_1, mask=there)


@triton.jit
def _shares(exponents, pull_row, pull_column, log_row, log_column, within, within_back, STABLE: tl.constexpr):
    """What pairs get of the pulls of row and column. `exponents` are the powers where row and column share them."""
    if STABLE:
        both = tl.where(within, pull_row[:, None], 0.0) + tl.where(within_back, pull_column[None, :], 0.0)
        shares = exponents * both
    else:
        # Within a denominator no exponent is above 0; elsewhere it may be, and does not count.
        mine = tl.exp2(tl.minimum(exponents - log_row[:, None], 0.0))
        theirs = tl.exp2(tl.minimum(exponents - log_column[None, :], 0.0))
        shares = tl.where(within, mine * pull_row[:, None], 0.0)
        shares += tl.where(within_back, theirs * pull_column[None, :], 0.0)
    return shares


@triton.jit
def _weigh_plain(exponents, pull_row, log_row, pull, log_denominator, column, kind_row, kinds,
                 NEGATIVES: tl.constexpr, STABLE: tl.constexpr):  # fmt: skip
    """What one term adds to G + G' where all pairs are negatives."""
    pull_column = tl.load(pull + column)
    if NEGATIVES == 3:
        if STABLE:
            weights = exponents * (pull_row[:, None] + pull_column[None, :])
        else:
            log_column = tl.load(log_denominator + column) * _LOG2E
            weights = tl.exp2(exponents - log_row[:, None]) * pull_row[:, None]
            weights += tl.exp2(exponents - log_column[None, :]) * pull_column[None, :]
    else:
        log_column = tl.load(log_denominator + column) * _LOG2E
        within = _member(tl.load(kinds + column), NEGATIVES)[None, :]
        within_back = _member(kind_row, NEGATIVES)[:, None]
        weights = _shares(exponents, pull_row, pull_column, log_row, log_column, within, within_back, STABLE)
    return weights


@triton.jit
def _weigh_mixed(exponents, pull_row, push_row, log_row, pull, push, log_denominator, column, inside,
                 same, other, kind_row, kind,
                 POSITIVES: tl.constexpr, NEGATIVES: tl.constexpr, STABLE: tl.constexpr):  # fmt: skip
    """What one term adds to G + G'."""
    pull_column = tl.load(pull + column, mask=inside, other=0.0)
    push_column = tl.load(push + column, mask=inside, other=0.0)
    log_column = tl.load(log_denominator + column, mask=inside, other=float("inf")) * _LOG2E
    positive = same & _member(kind, POSITIVES)[None, :]
    within = positive | (other & _member(kind, NEGATIVES)[None, :])
    positive_back = same & _member(kind_row, POSITIVES)[:, None]
    within_back = positive_back | (other & _member(kind_row, NEGATIVES)[:, None])
    weights = _shares(exponents, pull_row, pull_column, log_row, log_column, within, within_back, STABLE)
    weights -= tl.where(positive, push_row[:, None], 0.0) + tl.where(positive_back, push_column[None, :], 0.0)
    return weights


@triton.jit(do_not_specialize=["rows", "features"])
def gradient(
    z, row_features, row_scales, row_groups, row_kinds, row_order, begins, ends, row_forces,
    features_of, scales, groups, kinds, order, forces,
    tau, largest, gradient, rows, features,
    DIMENSION: tl.constexpr, WIDE: tl.constexpr,
    POSITIVES_0: tl.constexpr, NEGATIVES_0: tl.constexpr, POSITIVES_1: tl.constexpr, NEGATIVES_1: tl.constexpr,
    TERMS: tl.constexpr, STABLE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    row = block * ROWS + tl.arange(0, ROWS)
    there = row < rows
    d = tl.arange(0, WIDE)
    h_row = tl.load(row_features + row.to(tl.int64)[:, None] * WIDE + d[None, :], mask=there[:, None], other=0.0)
    kind_row = tl.load(row_kinds + row, mask=there, other=0)
    over_tau = _LOG2E / tl.load(tau)
    shift = 0.0
    if STABLE:
        shift = over_tau
    factor = tl.load(row_scales + row, mask=there, other=0.0) * over_tau
    last = tl.minimum(block * ROWS + ROWS, rows) - 1
    begin, behind, full, plain, mixed = _count_tiles(
        tl.load(begins + block * ROWS), tl.load(ends + last), features, COLUMNS
    )
    pull = forces
    push = forces + TERMS * features
    log_denominator = push + TERMS * features
    pull_row_0 = tl.load(row_forces + row, mask=there, other=0.0)
    push_row_0 = tl.load(row_forces + TERMS * rows + row, mask=there, other=0.0)
    log_row_0 = tl.load(row_forces + 2 * TERMS * rows + row, mask=there, other=float("inf")) * _LOG2E
    pull_row_1 = pull_row_0
    push_row_1 = push_row_0
    log_row_1 = log_row_0
    if TERMS == 2:
        pull_row_1 = tl.load(row_forces + rows + row, mask=there, other=0.0)
        push_row_1 = tl.load(row_forces + 3 * rows + row, mask=there, other=0.0)
        log_row_1 = tl.load(row_forces + 5 * rows + row, mask=there, other=float("inf")) * _LOG2E
    sums = tl.zeros((ROWS, WIDE), tl.float32)

    for number in range(plain):
        column = _plain_tile(number, begin, behind) * COLUMNS + tl.arange(0, COLUMNS)
        h_column = tl.load(features_of + column.to(tl.int64)[:, None] * WIDE + d[None, :])
        products = tl.dot(h_row, tl.trans(h_column)) * tl.load(scales + column)[None, :]
        exponents = products * factor[:, None] - shift
        if STABLE:
            exponents = tl.exp2(exponents)
        weights = _weigh_plain(
            exponents, pull_row_0, log_row_0, pull, log_denominator, column, kind_row, kinds, NEGATIVES_0, STABLE
        )
        if TERMS == 2:
            weights += _weigh_plain(
                exponents, pull_row_1, log_row_1, pull + features, log_denominator + features, column, kind_row, kinds,
                NEGATIVES_1, STABLE,
            )  # fmt: skip
        sums = tl.dot(weights.to(tl.float16), h_column, sums)

    group_row = tl.load(row_groups + row, mask=there, other=0)
    place = tl.load(row_order + row, mask=there, other=0)
    h_row, rest_row = split(z, place, there, d, DIMENSION)
    for number in tl.range(0, mixed, num_stages=1):
        column = _mixed_tile(number, begin, behind, full) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < features
        place_column = tl.load(order + column, mask=inside, other=0)
        h_column, rest_column = split(z, place_column, inside, d, DIMENSION)
        exponents = _cosines(h_row, rest_row, h_column, rest_column) * over_tau - shift
        if STABLE:
            exponents = tl.exp2(exponents)
        group = tl.load(groups + column, mask=inside, other=0)
        kind = tl.load(kinds + column, mask=inside, other=0)
        both = there[:, None] & inside[None, :]
        other = (group_row[:, None] != group[None, :]) & both
        same = (group_row[:, None] == group[None, :]) & both & (place[:, None] != place_column[None, :])
        weights = _weigh_mixed(
            exponents, pull_row_0, push_row_0, log_row_0, pull, push, log_denominator, column, inside,
            same, other, kind_row, kind, POSITIVES_0, NEGATIVES_0, STABLE,
        )  # fmt: skip
        if TERMS == 2:
            weights += _weigh_mixed(
                exponents, pull_row_1, push_row_1, log_row_1, pull + features, push + features,
                log_denominator + features, column, inside,
                same, other, kind_row, kind, POSITIVES_1, NEGATIVES_1, STABLE,
            )  # fmt: skip
        sums = tl.dot(weights.to(tl.float16), h_column, sums)

    target = gradient + place[:, None] * DIMENSION + d[None, :]
    tl.store(target, sums * (over_tau * _LN2 / largest_weight(largest)), mask=there[:, None] & (d < DIMENSION)[None, :])
