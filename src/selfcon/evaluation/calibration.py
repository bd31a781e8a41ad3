"""How far probabilities can be believed: temperatures, errors of calibration, and when better to say nothing.

N samples, C classes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from selfcon.errors import DataError, UsageError

BINS = 15
_FOLDS = 5
_LEAST, _MOST = 0.02, 1000.0  # temperatures; where every answer is right, none is too low


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """What to divide logits [N, C] by so that the likelihood of the labels [N] is greatest.

    The negative log-likelihood is convex in 1/T, so that halving an interval of it finds the one minimum.
    """
    if not len(labels):
        raise DataError("There is no held-out image to choose a temperature by.")
    logits = logits.double()
    low, high = 1 / _MOST, 1 / _LEAST
    for _ in range(60):
        middle = torch.tensor(math.sqrt(low * high), dtype=torch.double, device=logits.device, requires_grad=True)
        (slope,) = torch.autograd.grad(cross_entropy(logits * middle, labels), middle)
        here = float(middle.detach())
        low, high = (here, high) if float(slope) < 0 else (low, here)
    return 1 / math.sqrt(low * high)


def choose_temperature(logits: Tensor, labels: Tensor) -> float:
    """The temperature that fits, or 1 where such a one would not help: few images choose by chance.

    Where all answers are right, or all wrong, none fits: every lower or higher one is better. Whether it
    helps is seen on a fifth of them at a time, with the temperature that fits the others.
    """
    if not len(labels):
        raise DataError("There is no held-out image to choose a temperature by.")
    gain, logits = 0.0, logits.double()
    for fold in range(_FOLDS):
        out = torch.arange(len(labels), device=labels.device) % _FOLDS == fold
        if not bool(out.any()) or bool(out.all()):
            continue
        heat = fit_temperature(logits[~out], labels[~out])
        before, after = (cross_entropy(logits[out] / each, labels[out], reduction="sum") for each in (1.0, heat))
        gain += float(before - after)
    fitting = fit_temperature(logits, labels)
    return fitting if gain > 0 and 1.5 * _LEAST < fitting < 0.8 * _MOST else 1.0


@dataclass(frozen=True)
class Bin:
    """Samples whose confidence lies between two bounds."""

    low: float
    high: float
    count: int
    confidence: float  # their mean
    accuracy: float  # how many of them are right; both as parts of 1


def sort_into_bins(probabilities: Tensor, labels: Tensor, bins: int = BINS) -> list[Bin]:
    """Samples by the probability [N, C] of their likeliest class, in equally wide bins; empty ones are left out."""
    confidence, guesses = probabilities.double().max(1)
    right = (guesses == labels).double()
    # A bound belongs to the bin below it, as usual, and 0 to the first.
    places = (confidence * bins).ceil().long().clamp(1, bins) - 1
    found = []
    for place in places.unique().tolist():
        inside = places == place
        found.append(
            Bin(
                place / bins,
                (place + 1) / bins,
                int(inside.sum()),
                float(confidence[inside].mean()),
                float(right[inside].mean()),
            )
        )
    return found


def calibration_error(bins: list[Bin]) -> float:
    """The expected calibration error in percent: how far confidence and accuracy of bins lie apart."""
    total = sum(each.count for each in bins)
    return 100 * sum(each.count * abs(each.confidence - each.accuracy) for each in bins) / max(total, 1)


@dataclass(frozen=True)
class RiskCoverage:
    """Answers from the surest on: what part of all is given, and how many of those are wrong; parts of 1."""

    coverage: Tensor  # [N], rising
    risk: Tensor  # [N]
    scores: Tensor  # [N], falling: the score of the last answer that is given

    @property
    def area(self) -> float:
        """The mean risk over all coverages, in percent; less is better."""
        return 100 * float(self.risk.mean())


def trace_risk(scores: Tensor, right: Tensor) -> RiskCoverage:
    """What keeping silent below a score would do; `right` says which answers are.

    Of answers with equal scores, whose order says nothing, each counts as wrong as they are on average.
    """
    order = scores.argsort(descending=True, stable=True)
    wrong = (~right[order].bool()).double()
    _, group, sizes = scores[order].unique_consecutive(return_inverse=True, return_counts=True)
    shares = torch.zeros(len(sizes), dtype=torch.double, device=scores.device).index_add_(0, group, wrong) / sizes
    given = torch.arange(1, len(order) + 1, dtype=torch.double, device=scores.device)
    last = torch.cat([group[1:] != group[:-1], torch.ones(min(1, len(group)), dtype=torch.bool, device=group.device)])
    counted = torch.where(last, wrong.cumsum(0), shares[group].cumsum(0))  # where all of a score are in, exactly
    return RiskCoverage(given / len(order), counted / given, scores[order])


def choose_silence(traced: RiskCoverage, most_wrong: float) -> float:
    """The score below which to keep silent, so that at most so many percent of the answers given are wrong.

    One wrong answer more than was seen is counted, which is careful where few were seen. The largest such coverage
    counts, so among scores that say little about who is right it may still be a lucky one. Infinite where not even the
    surest answers are right often enough.
    """
    if not 0 <= most_wrong < 100:
        raise UsageError(f"The part of wrong answers must be between 0 and 100 percent, not {most_wrong:g}.")
    # Answers of equal scores are given together or not at all.
    if not len(traced.scores):
        return math.inf
    last_of_score = torch.cat([traced.scores[1:] != traced.scores[:-1], torch.ones(1, dtype=torch.bool)])
    given = torch.arange(1, len(traced.risk) + 1, device=traced.risk.device)
    careful = (traced.risk * given + 1) / (given + 1)
    good = ((careful <= most_wrong / 100) & last_of_score.to(traced.risk.device)).nonzero()[:, 0]
    return float(traced.scores[good[-1]]) if len(good) else math.inf
