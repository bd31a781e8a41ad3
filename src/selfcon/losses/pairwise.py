"""The objective without its N x N matrix kept: row statistics forward, pairs computed once more backward.

For a term with valid anchors i, p_ij the softmax of i's similarities over its denominator and P_i its positives,

    sum_i L_i = sum_i [ lse_i - sum_{j in P_i} s_ij / |P_i| ],      s_ij = z_i.z_j / tau
    d/dz = (G + G') Z / tau,      G_ij = c_i (p_ij - [j in P_i] / |P_i|)

with c_i the gradient that comes from above. Since z.(d/dz) summed over all features is 2/tau times the sum of
G_ij z_i.z_j, the gradient of the temperature follows without another pass.

An engine computes the statistics and the gradient: `tiled` in plain PyTorch, `contrast_triton` as GPU kernels.
n anchors of this process, N features of all, D their dimension, T terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from selfcon.losses.sets import Contrast, Term, belongs


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


class Engine(Protocol):
    """How the pairs are gone through."""

    def statistics(self, pairs: Pairs) -> tuple[Tensor, Tensor, Tensor]:
        """For each term and anchor: log of the denominator, sum of z_i.z_j over positives, their number; all [T, n]."""
        ...

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
    pairs = Pairs(z, contrast.groups, contrast.exits, contrast.own, tuple(terms), tau, stable)
    sums: Tensor
    counts: Tensor
    sums, counts = _Objective.apply(z, tau, pairs, engine)
    return sums, counts


def add_up(  # noqa: PLR0917 - all of a forward pass
    ctx: Any,
    z: Tensor,
    tau: Tensor,
    statistics: tuple[Tensor, Tensor, Tensor],
    exits: Tensor,
    terms: Sequence[Term],
) -> tuple[Tensor, Tensor]:
    """The end of a forward pass: sums of losses and numbers of valid anchors by term, and what backward needs."""
    log_denominator, attraction, positives = statistics
    valid = torch.stack([belongs(exits, term.anchors) for term in terms]) & (positives > 0)
    losses = log_denominator - attraction / (positives.clamp(min=1) * tau)
    # An anchor that does not count gets a denominator without bounds, and so no share of anything.
    ctx.save_for_backward(z, tau, torch.where(valid, log_denominator, torch.inf), positives, valid)
    counts = valid.sum(1)
    ctx.mark_non_differentiable(counts)
    return torch.where(valid, losses, 0).sum(1), counts


class _Objective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, tau: Tensor, pairs: Pairs, engine: Engine) -> tuple[Tensor, Tensor]:
        log_denominator, attraction, positives = engine.statistics(pairs)
        ctx.pairs, ctx.engine = pairs, engine
        found = (log_denominator, attraction, positives)
        return add_up(ctx, z, tau, found, pairs.exits[pairs.own], pairs.terms)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Tensor, _: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        z, tau, log_denominator, positives, valid = ctx.saved_tensors
        pull = above[:, None] * valid
        gradient = ctx.engine.gradient(ctx.pairs, log_denominator, pull, pull / positives.clamp(min=1))
        of_tau = -(z * gradient).sum() / (2 * tau) if ctx.needs_input_grad[1] else None
        return gradient, of_tau, None, None
