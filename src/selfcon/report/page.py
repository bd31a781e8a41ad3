"""report.html: one page about one run, self-contained, with no request to anywhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jinja2 import Environment, PackageLoader, select_autoescape
from torch import Tensor

from selfcon.evaluation.accuracy import ENSEMBLE, Predictions
from selfcon.report.plots import draw_curves, draw_map, spread, thumbnail

_MOST_MAPPED, _MOST_CONFUSED, _MOST_WRONG = 1000, 10, 24


@dataclass(frozen=True)
class Evidence:
    """What a page shows of the test set, besides numbers."""

    predictions: Predictions
    features: Tensor  # [N, D] of the backbone
    pictures: Callable[[Tensor], Tensor]  # of these images [B]: uint8 [B, 3, H, W]


def render_report(
    *,
    name: str,
    settings: dict[str, Any],
    classes: tuple[str, ...],
    result: dict[str, Any],
    metrics: list[dict[str, Any]],
    evidence: Evidence,
    seed: int,
) -> str:
    """The page of a run as HTML; `name` is that of its data."""
    logits, labels = evidence.predictions.logits[ENSEMBLE], evidence.predictions.labels
    some = spread(len(labels), _MOST_MAPPED)
    environment = Environment(loader=PackageLoader("selfcon.report"), autoescape=select_autoescape(default=True))
    return environment.get_template("run.html").render(
        name=name,
        result=result,
        settings=settings,
        curves=draw_curves(metrics),
        map=draw_map(evidence.features[some], labels[some], classes, seed) if len(some) > 10 else None,
        mapped=len(some),
        confusions=find_confusions(logits, labels, classes),
        wrong=_find_wrong(logits, labels, evidence.pictures, classes),
        tested=len(labels),
    )


def find_confusions(logits: Tensor, labels: Tensor, classes: tuple[str, ...]) -> list[dict[str, Any]]:
    """The pairs of classes that are mixed up most often, with how many and the share of the true class."""
    guesses = logits.argmax(1)
    wrong = guesses != labels
    pairs, counts = torch.unique(torch.stack([labels[wrong], guesses[wrong]], dim=1), dim=0, return_counts=True)
    sizes = torch.bincount(labels, minlength=len(classes))
    worst = counts.argsort(descending=True, stable=True)[:_MOST_CONFUSED]
    return [
        {
            "true": classes[int(pairs[row, 0])],
            "taken_for": classes[int(pairs[row, 1])],
            "count": int(counts[row]),
            "share": 100 * float(counts[row] / sizes[pairs[row, 0]]),
        }
        for row in worst.tolist()
    ]


def _find_wrong(
    logits: Tensor, labels: Tensor, pictures: Callable[[Tensor], Tensor], classes: tuple[str, ...]
) -> list[dict[str, Any]]:
    """The images that the ensemble gets wrong and is surest about."""
    sure, guesses = logits.softmax(1).max(1)
    wrong = (guesses != labels).nonzero()[:, 0]
    worst = wrong[sure[wrong].argsort(descending=True, stable=True)][:_MOST_WRONG]
    return [
        {
            "image": thumbnail(picture),
            "true": classes[int(labels[row])],
            "taken_for": classes[int(guesses[row])],
            "sure": 100 * float(sure[row]),
        }
        for row, picture in zip(worst.tolist(), pictures(worst), strict=True)
    ]
