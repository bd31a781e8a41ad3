"""The objective without its N x N matrix kept: row statistics forward, pairs computed once more backward.

For a term with valid anchors i, p_ij the softmax of i's similarities over its denominator and P_i its positives,

    sum_i L_i = sum_i [ lse_i - sum_{j in P_i} s_ij / |P_i| ],      s_ij = z_i.z_j / tau
    d/dz = (G + G') Z / tau,      G_ij = c_i (p_ij - [j in P_i] / |P_i|)

    d/dtau = sum_i c_i (mean over P_i of z_i.z_j - sum_j p_ij z_i.z_j) / tau^2

with c_i the gradient that comes from above. Since z.(d/dz) summed over all features is 2/tau times the sum of
G_ij z_i.z_j, the gradient of the temperature follows from d/dz without another pass. Where features are nearly equal it
is a small difference of large sums, so that an engine of little precision gives the mean of 1 - z_i.z_j over p_ij.

An engine computes the statistics and the gradient: `tiled` in plain PyTorch, `contrast_triton` as GPU kernels.
n anchors of this process, N features of all, D their dimension, T terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from selfcon.losses.first_derivative import first_derivative_only
from selfcon.losses.sets import Contrast, Term, belongs

NO_SECOND = "A loss of tiles has a first derivative only: take implementation='dense' for a second."


@dataclass(frozen=True)
class Pairs:
    """All features, and which of them are anchors here."""

    z: Tensor  # [N, D]
    groups: Tensor  # [N]
    exits: Tensor  # [N]
    own: slice
    terms: tuple[Term, ...]
    tau: Tensor  # []
    stable: bool  # whether similarities are far enough from overflow that a constant can stand for their maximum
    distances: bool = False  # whether the temperature needs a gradient


class Statistics(NamedTuple):
    """What is known of each term and anchor, [T, n]."""

    log_denominator: Tensor
    attraction: Tensor  # sum of z_i.z_j over positives
    positives: Tensor  # their number
    distance: Tensor | None = None  # mean of 1 - z_i.z_j over p_ij, of engines whose gradient is not exact enough


class Engine(Protocol):
    """How the pairs are gone through."""

    def statistics(self, pairs: Pairs) -> Statistics: ...

    def gradient(self, pairs: Pairs, log_denominator: Tensor, pull: Tensor, push: Tensor) -> Tensor:
        """[N, D]: (G + G') Z / tau with G_ij = pull_i p_ij - push_i [j in P_i]; the three arguments are [T, n]."""
        ...


def term_sums(
    contrast: Contrast, terms: Sequence[Term], temperature: float | Tensor, engine: Engine
) -> tuple[Tensor, Tensor]:
    """As `dense.term_sums`."""
    z = contrast.features
    if isinstance(temperature, Tensor):
        tau, stable = temperature.to(z), False
    else:
        # exp((s - 1) / tau) must not vanish for s = -1, nor its inverse times a weight overflow, in float32
        tau, stable = torch.full((), temperature, dtype=z.dtype, device=z.device), temperature >= 0.03
    pairs = Pairs(
        z, contrast.groups, contrast.exits, contrast.own, tuple(terms), tau, stable, distances=tau.requires_grad
    )
    sums: Tensor
    counts: Tensor
    sums, counts = _Objective.apply(z, tau, pairs, engine)
    return sums, counts


def add_up(  # noqa: PLR0917 - all of a forward pass
    ctx: Any,
    z: Tensor,
    tau: Tensor,
    found: Statistics,
    exits: Tensor,
    terms: Sequence[Term],
) -> tuple[Tensor, Tensor]:
    """The end of a forward pass: sums of losses and numbers of valid anchors by term, and what backward needs."""
    positives = found.positives
    valid = torch.stack([belongs(exits, term.anchors) for term in terms]) & (positives > 0)
    losses = found.log_denominator - found.attraction / (positives.clamp(min=1) * tau)
    # An anchor that does not count gets a denominator without bounds, and so no share of anything.
    kept = [z, tau, torch.where(valid, found.log_denominator, torch.inf), positives, valid]
    if found.distance is not None:  # how much farther its denominator is from an anchor than its positives
        kept.append(torch.where(valid, found.distance - 1 + found.attraction / positives.clamp(min=1), 0))
    ctx.save_for_backward(*kept)
    counts = valid.sum(1)
    ctx.mark_non_differentiable(counts)
    return torch.where(valid, losses, 0).sum(1), counts


class _Objective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, tau: Tensor, pairs: Pairs, engine: Engine) -> tuple[Tensor, Tensor]:
        ctx.pairs, ctx.engine = pairs, engine
        return add_up(ctx, z, tau, engine.statistics(pairs), pairs.exits[pairs.own], pairs.terms)

    @staticmethod
    @first_derivative_only(NO_SECOND)
    def backward(ctx: Any, above: Tensor, _: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        z, tau, log_denominator, positives, valid, *farther = ctx.saved_tensors
        pull = above[:, None] * valid
        gradient = ctx.engine.gradient(ctx.pairs, log_denominator, pull, pull / positives.clamp(min=1))
        if not ctx.needs_input_grad[1]:
            return gradient, None, None, None
        of_tau = (pull * farther[0]).sum() / tau**2 if farther else -(z * gradient).sum() / (2 * tau)
        return gradient, of_tau, None, None
