"""What `contrast_triton` does before it goes through tiles: features and forces, in float16, at their sorted places.

Features of unit length keep in float16 the digits they keep in TF32, and what rounding does to their length is divided
out again: the gradient lives on small differences between positives, and lengths that vary by 1e-4 would be most of its
error.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LARGEST_WEIGHT = tl.constexpr(8192.0)  # in float16: four of them fit, and what is 1e-8 of them still has digits


@triton.jit
def split(z, place, there, d, DIMENSION: tl.constexpr):
    """Features in float16, and what rounding took times 2048."""
    exact = tl.load(
        z + place[:, None] * DIMENSION + d[None, :], mask=there[:, None] & (d < DIMENSION)[None, :], other=0.0
    )
    rounded = exact.to(tl.float16)
    return rounded, ((exact - rounded.to(tl.float32)) * 2048).to(tl.float16)


@triton.jit(do_not_specialize=["count"])
def pack(
    z, groups, exits, order, found, begins, ends, features, scales, kinds, count,
    DIMENSION: tl.constexpr, WIDE: tl.constexpr, COUNTING: tl.constexpr, ROWS: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """Bring features to their places; when counting, find those first."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < count
    if COUNTING:
        place = row.to(tl.int64)
        mine = tl.load(groups + row, mask=there, other=0)
        below = tl.zeros((ROWS,), tl.int32)
        before = tl.zeros((ROWS,), tl.int32)
        alike = tl.zeros((ROWS,), tl.int32)
        for start in range(0, count, OTHERS):
            other = start + tl.arange(0, OTHERS)
            inside = (other < count)[None, :]
            theirs = tl.load(groups + other, mask=other < count, other=0)
            same = (theirs[None, :] == mine[:, None]) & inside
            below += tl.sum(((theirs[None, :] < mine[:, None]) & inside).to(tl.int32), axis=1)
            before += tl.sum((same & (other[None, :] < row[:, None])).to(tl.int32), axis=1)
            alike += tl.sum(same.to(tl.int32), axis=1)
        target = (below + before).to(tl.int64)
        tl.store(order + target, place, mask=there)
        tl.store(found + target, mine, mask=there)
        tl.store(begins + target, below.to(tl.int64), mask=there)
        tl.store(ends + target, (below + alike).to(tl.int64), mask=there)
    else:
        target = row.to(tl.int64)
        place = tl.load(order + row, mask=there, other=0)
    d = tl.arange(0, WIDE)
    values, _ = split(z, place, there, d, DIMENSION)
    tl.store(features + target[:, None] * WIDE + d[None, :], values, mask=there[:, None])
    squares = tl.sum(values.to(tl.float32) * values.to(tl.float32), axis=1)
    tl.store(scales + target, tl.where(squares == 0.0, 1.0, tl.rsqrt(squares)), mask=there)
    tl.store(kinds + target, (tl.load(exits + place, mask=there, other=0) > 0).to(tl.int32), mask=there)


@triton.jit
def largest_weight(largest):
    """The factor that brings weights to where float16 has its digits."""
    return _LARGEST_WEIGHT / tl.maximum(tl.load(largest), 1e-30, propagate_nan=tl.PropagateNan.ALL)


@triton.jit(do_not_specialize=["first", "stop", "count", "terms"])
def arrange(
    order, log_denominator, pull, push, largest, tau, forces, first, stop, count, terms,
    STABLE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Pull, push and log of the denominator by place; where that is stable, pull is already over the denominator."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    term = tl.program_id(1)
    there = row < count
    place = tl.load(order + row, mask=there, other=0)
    # Rows of other processes are anchors there, and have no share here.
    own = there & (place >= first) & (place < stop)
    source = term * (stop - first) + place - first
    logs = tl.load(log_denominator + source, mask=own, other=float("inf"))
    scale = largest_weight(largest)
    pulled = tl.load(pull + source, mask=own, other=0.0) * scale
    if STABLE:
        pulled = pulled * tl.exp(1.0 / tl.load(tau) - logs)
    target = forces + term * count + row
    tl.store(target, pulled, mask=there)
    tl.store(target + terms * count, tl.load(push + source, mask=own, other=0.0) * scale, mask=there)
    tl.store(target + 2 * terms * count, logs, mask=there)
