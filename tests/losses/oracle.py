"""The losses of the paper as it writes them: sets built feature by feature, and a loop over the anchors.

It shares nothing with the package: neither tables nor masks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Feature(NamedTuple):
    sample: int
    view: int
    exit: int
    label: int


Rule = Callable[[Feature, Feature], bool]


class Sets(NamedTuple):
    """Who is an anchor; who is a positive (i, j) -> bool; who is a negative (i, j) -> bool."""

    anchor: Callable[[Feature], bool]
    positive: Rule
    negative: Rule


def backbone(f: Feature) -> bool:
    return f.exit == 0


def subnetwork(f: Feature) -> bool:
    return f.exit > 0


def anyone(f: Feature) -> bool:
    return True


SIMCLR = Sets(
    backbone,
    lambda i, j: backbone(j) and j.sample == i.sample and j.view != i.view,
    lambda i, j: backbone(j) and j.sample != i.sample,
)
SUPCON = Sets(
    backbone,
    lambda i, j: backbone(j) and j.label == i.label and (j.sample, j.view) != (i.sample, i.view),
    lambda i, j: backbone(j) and j.label != i.label,
)
SELFCON = Sets(anyone, lambda i, j: j.label == i.label and j != i, lambda i, j: j.label != i.label)
UNSUPERVISED = Sets(anyone, lambda i, j: j.sample == i.sample and j != i, lambda i, j: j.sample != i.sample)
MU_RELEASED = Sets(
    anyone,
    lambda i, j: (j.sample, j.view) == (i.sample, i.view) and j != i,
    lambda i, j: (j.sample, j.view) != (i.sample, i.view),
)
SU_STAR = Sets(subnetwork, lambda i, j: backbone(j) and j.sample == i.sample, lambda i, j: j.sample != i.sample)
S_STAR = Sets(subnetwork, lambda i, j: backbone(j) and j.label == i.label, lambda i, j: j.label != i.label)
MU_STAR = Sets(subnetwork, UNSUPERVISED.positive, UNSUPERVISED.negative)
M_STAR = Sets(subnetwork, SELFCON.positive, SELFCON.negative)


def terms(method: str, alpha: float) -> list[tuple[float, Sets]]:
    rest, share = 1 / (1 + alpha), alpha / (1 + alpha)
    return {
        "simclr": [(1.0, SIMCLR)],
        "supcon": [(1.0, SUPCON)],
        "supcon-s": [(1.0, SUPCON)],
        "selfcon": [(1.0, SELFCON)],
        "selfcon-m": [(1.0, SELFCON)],
        "selfcon-su": [(1.0, UNSUPERVISED)],
        "selfcon-mu": [(1.0, UNSUPERVISED)],
        "selfcon-mu-released": [(1.0, MU_RELEASED)],
        "selfcon-su-star": [(1.0, SU_STAR)],
        "selfcon-star": [(rest, SUPCON), (share, S_STAR)],
        "selfcon-mu-star": [(rest, SIMCLR), (share, MU_STAR)],
        "selfcon-m-star": [(rest, SUPCON), (share, M_STAR)],
    }[method]


def loss(
    method: str,
    features: Tensor,
    labels: Tensor,
    *,
    temperature: float | Tensor,
    alpha: float,
    memory: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The loss of features [B, V, E, D]; float64, differentiable. Of memory [M, E, D] nobody is an anchor."""
    samples, views, exits, dim = features.shape
    everyone = [
        Feature(sample, view, number, int(labels[sample]))
        for sample in range(samples)
        for view in range(views)
        for number in range(exits)
    ]
    anchors, z = len(everyone), features.reshape(-1, dim)
    if memory is not None:
        remembered, theirs = memory
        everyone += [
            Feature(-1 - row, 0, number, int(theirs[row]))  # nobody's sample
            for row in range(len(remembered))
            for number in range(remembered.shape[1])
        ]
        z = torch.cat([z, remembered.reshape(-1, dim).detach()])
    z = z / (z * z).sum(1, keepdim=True).sqrt()
    s = z @ z.T / temperature

    total = features.sum() * 0
    for weight, sets in terms(method, alpha):
        losses = []
        for i, anchor in enumerate(everyone[:anchors]):
            if not sets.anchor(anchor):
                continue
            positives = [j for j, other in enumerate(everyone) if sets.positive(anchor, other)]
            negatives = [j for j, other in enumerate(everyone) if sets.negative(anchor, other)]
            if not positives:
                continue
            attraction = s[i, positives].sum() / len(positives)
            losses.append(-attraction + torch.log(s[i, positives + negatives].exp().sum()))
        if losses:
            total = total + weight * torch.stack(losses).sum() / len(losses)
    return total
