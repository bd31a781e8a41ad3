"""Answering at the first exit that is sure enough: how sure an answer is, and what waiting for more buys.

An answer at an exit is the ensemble of all exits up to it, the mean of their logits; the last one is the whole
ensemble. N samples, C classes, A answers in the order that they come.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from selfcon.errors import UsageError, unknown_name
from selfcon.evaluation.answers import ENSEMBLE

_COMBINATIONS = 3000
_CLEARLY_CHEAPER, _ABOUT_EQUAL = 0.9, 0.5  # of its cost, since asking after each exit costs time; percentage points
NEVER = 2.0  # as sure as nobody can be; JSON knows no infinity


def running_answers(logits: Sequence[Tensor]) -> list[Tensor]:
    """The answers [N, C] after each exit."""
    totals = torch.stack(list(logits)).cumsum(0)
    return [total / number for number, total in enumerate(totals, start=1)]


def name_answers(exits: Sequence[str]) -> list[str]:
    """What the answers after each of these exits are called: `exit1`, `exit1+exit2`, ..., and `ensemble` at last."""
    names = ["+".join(exits[:number]) for number in range(1, len(exits) + 1)]
    return [*names[:-1], ENSEMBLE] if len(names) > 1 else names


def _confidence(answers: Sequence[Tensor]) -> Tensor:
    return answers[-1].amax(1)


def _margin(answers: Sequence[Tensor]) -> Tensor:
    best: Tensor = answers[-1].topk(2, dim=1).values
    return best[:, 0] - best[:, 1]


def _entropy(answers: Sequence[Tensor]) -> Tensor:
    """1 for a certain answer, 0 for a uniform one."""
    entropy: Tensor = torch.special.entr(answers[-1]).sum(1)
    return (1 - entropy / torch.log(torch.tensor(float(answers[-1].shape[1])))).clamp(0, 1)  # but for rounding


def _agreement(answers: Sequence[Tensor]) -> Tensor:
    """How likely even the least convinced of all answers so far holds the last one; a first answer has no second."""
    if len(answers) < 2:
        return torch.zeros_like(answers[0][:, 0])
    guess = answers[-1].argmax(1, keepdim=True)
    return torch.stack([answer.gather(1, guess)[:, 0] for answer in answers]).min(0).values


CRITERIA: dict[str, Callable[[Sequence[Tensor]], Tensor]] = {
    "confidence": _confidence,
    "margin": _margin,
    "entropy": _entropy,
    "agreement": _agreement,
}


def sureness(probabilities: Sequence[Tensor], criterion: str) -> Tensor:
    """How sure [N] the last of the probabilities [N, C] so far is, between 0 and 1."""
    if criterion not in CRITERIA:
        raise unknown_name("criterion", criterion, CRITERIA)
    return CRITERIA[criterion](probabilities)


@dataclass(frozen=True)
class Rule:
    """When to leave: as soon as an answer is at least so sure. Above 1 nobody leaves before the end.

    One threshold is for all answers; several are for one after the other, the last answer needing none.
    """

    criterion: str = "confidence"
    thresholds: float | tuple[float, ...] = NEVER

    def __post_init__(self) -> None:
        if self.criterion not in CRITERIA:
            raise unknown_name("criterion", self.criterion, CRITERIA)
        for each in self.thresholds if isinstance(self.thresholds, tuple) else (self.thresholds,):
            if not each >= 0:
                raise UsageError(f"A threshold is at least 0, not {each}.")

    def leaves(self, probabilities: Sequence[Tensor]) -> Tensor:
        """Who is content [N] with the last of the answers so far."""
        given = self.thresholds
        least = given[len(probabilities) - 1] if isinstance(given, tuple) else given
        return sureness(probabilities, self.criterion).double() >= least  # thresholds are, and many scores lie near 1


@dataclass(frozen=True)
class Point:
    """What thresholds do to a set of samples: percent right, and the mean cost as a part of the whole one."""

    thresholds: float | tuple[float, ...]
    accuracy: float
    cost: float
    shares: tuple[float, ...]  # who is answered where; sums to 1


def follow(probabilities: Sequence[Tensor], labels: Tensor, costs: Sequence[float], rule: Rule) -> Point:
    """What a rule does; `costs` [A] are those of getting as far as each answer, the last one 1."""
    early = range(1, len(probabilities))
    content = [rule.leaves(probabilities[:number]) for number in early]
    right = [answer.argmax(1) == labels for answer in probabilities]
    return _count(content, right, costs, rule.thresholds)


def _count(
    content: Sequence[Tensor], right: Sequence[Tensor], costs: Sequence[float], thresholds: float | tuple[float, ...]
) -> Point:
    """Of who would be content [N] with each answer but the last, and which answers are right [N]."""
    stays = torch.ones_like(right[0])
    shares, spent, correct = [], 0.0, 0
    for number, (answer, cost) in enumerate(zip(right, costs, strict=True)):
        leaves = stays if number == len(content) else stays & content[number]
        correct += int((leaves & answer).sum())
        shares.append(float(leaves.double().mean()))
        spent += shares[-1] * cost
        stays = stays & ~leaves
    return Point(thresholds, 100 * correct / max(1, len(stays)), spent, tuple(shares))


def trace(
    probabilities: Sequence[Tensor], labels: Tensor, costs: Sequence[float], criterion: str, *, steps: int = 50
) -> list[Point]:
    """From everybody leaving at the first exit to nobody before the end, cheapest first: what is best for its cost.

    Every answer has a threshold of its own, and of all combinations only those are kept that no cheaper one equals.
    """
    early = range(1, len(probabilities))
    scores = [sureness(probabilities[:number], criterion).double() for number in early]
    right = [answer.argmax(1) == labels for answer in probabilities]

    def count(thresholds: tuple[float, ...]) -> Point:
        content = [score >= least for score, least in zip(scores, thresholds, strict=True)]
        return _count(content, right, costs, thresholds)

    whole = count((NEVER,) * len(scores))
    front: list[Point] = []
    for point in sorted(map(count, _combine(scores, steps)), key=lambda each: (each.cost, -each.accuracy)):
        if point.cost < whole.cost and (not front or point.accuracy > front[-1].accuracy):
            front.append(point)
    if len(front) > steps:
        front = [front[round(number * (len(front) - 1) / (steps - 1))] for number in range(steps)]
    return [*front, whole]  # at the end nobody leaves early, whoever comes


def _combine(scores: Sequence[Tensor], steps: int) -> Iterator[tuple[float, ...]]:
    """A threshold for each answer's scores [N], in all combinations; where those are too many, one for all answers."""
    levels = min(steps, int(_COMBINATIONS ** (1 / max(1, len(scores)))) - 2)
    if levels < 2:
        return ((each,) * len(scores) for each in _levels(torch.cat(list(scores)), steps))
    return itertools.product(*(_levels(each, levels) for each in scores))


def _levels(scores: Tensor, count: int) -> list[float]:
    """From everybody to nobody."""
    places = torch.linspace(0, 1, count, dtype=torch.double)
    return [0.0, *torch.quantile(scores.cpu(), places).unique().tolist(), NEVER]


def find_gains(points: Sequence[Point], *, accuracy: float, cost: float) -> list[Point]:
    """Return the points that beat a single exit of this accuracy and cost.

    A gain is clearly cheaper (by at least 10 %) at about its accuracy (at most 0.5 points below), or clearly more
    accurate (by at least 0.5 points) at no more than its cost.
    """
    return [
        point
        for point in points
        if (point.cost <= _CLEARLY_CHEAPER * cost and point.accuracy >= accuracy - _ABOUT_EQUAL)
        or (point.cost <= cost and point.accuracy >= accuracy + _ABOUT_EQUAL)
    ]


def choose(points: Sequence[Point], *, accuracy: float | None = None, cost: float | None = None) -> Point:
    """The cheapest point of at least an accuracy (of all, the best), or the best one of at most a mean cost."""
    if (accuracy is None) == (cost is None):
        raise UsageError("A rule is chosen for an accuracy or for a cost: name one of them.")
    if accuracy is not None:
        enough = [point for point in points if point.accuracy >= min(accuracy, max(each.accuracy for each in points))]
        return min(enough, key=lambda point: point.cost)
    affordable = [point for point in points if point.cost <= float(cost or 0) + 1e-9]
    if not affordable:
        raise UsageError(
            f"No answer costs less than {points[0].cost:.2f} of the whole network, and {cost:g} was given."
        )
    return max(affordable, key=lambda point: (point.accuracy, -point.cost))
