"""Answering at the first exit that is sure enough: how sure an answer is, and what waiting for more buys.

An answer at an exit is the ensemble of all exits up to it, the mean of their logits; the last one is the whole
ensemble. N samples, C classes, A answers in the order that they come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from selfcon.errors import UsageError, unknown_name


def running_answers(logits: Sequence[Tensor]) -> list[Tensor]:
    """The answers [N, C] after each exit."""
    totals = torch.stack(list(logits)).cumsum(0)
    return [total / number for number, total in enumerate(totals, start=1)]


def name_answers(exits: Sequence[str]) -> list[str]:
    """What the answers after each of these exits are called: `exit1`, `exit1+exit2`, ..., and `ensemble` at last."""
    names = ["+".join(exits[:number]) for number in range(1, len(exits) + 1)]
    return [*names[:-1], "ensemble"] if len(names) > 1 else names


def _confidence(answers: Sequence[Tensor]) -> Tensor:
    return answers[-1].amax(1)


def _margin(answers: Sequence[Tensor]) -> Tensor:
    best: Tensor = answers[-1].topk(2, dim=1).values
    return best[:, 0] - best[:, 1]


def _entropy(answers: Sequence[Tensor]) -> Tensor:
    """1 for a certain answer, 0 for a uniform one."""
    entropy: Tensor = torch.special.entr(answers[-1]).sum(1)
    return 1 - entropy / torch.log(torch.tensor(float(answers[-1].shape[1])))


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
    """When to leave: as soon as an answer is at least so sure. Above 1 nobody leaves before the end."""

    criterion: str = "confidence"
    threshold: float = 2.0

    def __post_init__(self) -> None:
        if self.criterion not in CRITERIA:
            raise unknown_name("criterion", self.criterion, CRITERIA)
        if not self.threshold >= 0:
            raise UsageError(f"A threshold is at least 0, not {self.threshold}.")

    def leaves(self, probabilities: Sequence[Tensor]) -> Tensor:
        """Who is content [N] with the last of the answers so far."""
        return sureness(probabilities, self.criterion) >= self.threshold


@dataclass(frozen=True)
class Point:
    """What a threshold does to a set of samples: percent right, and the mean cost as a part of the whole one."""

    threshold: float
    accuracy: float
    cost: float
    shares: tuple[float, ...]  # who is answered where; sums to 1


def follow(probabilities: Sequence[Tensor], labels: Tensor, costs: Sequence[float], rule: Rule) -> Point:
    """What a rule does; `costs` [A] are those of getting as far as each answer, the last one 1."""
    stays = torch.ones(len(labels), dtype=torch.bool, device=labels.device)
    right = torch.zeros(len(labels), dtype=torch.bool, device=labels.device)
    shares, spent = [], 0.0
    for number, (answer, cost) in enumerate(zip(probabilities, costs, strict=True), start=1):
        last = number == len(probabilities)
        leaves = stays if last else stays & rule.leaves(probabilities[:number])
        right |= leaves & (answer.argmax(1) == labels)
        shares.append(float(leaves.double().mean()))
        spent += shares[-1] * cost
        stays &= ~leaves
    return Point(rule.threshold, 100 * float(right.double().mean()), spent, tuple(shares))


def trace(
    probabilities: Sequence[Tensor], labels: Tensor, costs: Sequence[float], criterion: str, *, steps: int = 50
) -> list[Point]:
    """From everybody leaving at the first exit to nobody before the end, cheapest first."""
    scores = torch.cat([sureness(probabilities[: number + 1], criterion) for number in range(len(probabilities) - 1)])
    places = torch.linspace(0, 1, steps, dtype=torch.double)
    thresholds = [0.0, *torch.quantile(scores.double().cpu(), places).unique().tolist()]
    points: dict[tuple[float, float], Point] = {}
    for threshold in thresholds:
        point = follow(probabilities, labels, costs, Rule(criterion, threshold))
        points.setdefault((point.cost, point.accuracy), point)  # of equal ones the lowest threshold ...
    last = follow(probabilities, labels, costs, Rule(criterion))
    points[last.cost, last.accuracy] = last  # ... but at the end nobody leaves early, whoever comes
    return sorted(points.values(), key=lambda point: point.cost)


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
