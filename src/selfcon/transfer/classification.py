"""Other classes on frozen features: linear classifiers whose decay is chosen on a held-out part.

Features come by exit; the ensemble is the mean of the exits' logits. N samples, D dimensions, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from selfcon.data.splits import hold_out
from selfcon.errors import DataError
from selfcon.evaluation.accuracy import mean_per_class, with_ensemble
from selfcon.evaluation.linear import fit_linear, standardise

DECAYS = tuple(10.0**power for power in range(-6, 2))
_HELD_OUT = 0.2


@dataclass(frozen=True)
class Evaluation:
    """Accuracy by exit and of the ensemble, percent, and the decay that was chosen for each exit."""

    accuracy: dict[str, dict[str, float]]
    decay: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        return {"accuracy": self.accuracy, "decay": self.decay}


def evaluate_linear(
    train: Mapping[str, Tensor],
    train_labels: Tensor,
    test: Mapping[str, Tensor],
    test_labels: Tensor,
    *,
    validation: int = 0,
    decays: Sequence[float] = DECAYS,
    seed: int = 0,
) -> Evaluation:
    """Fit a classifier on every exit's training features and measure it on the test features.

    Decays are chosen on the last `validation` training samples, where the data set has such, or on a drawn fifth.
    """
    if validation:
        rows = torch.arange(len(train_labels), device=train_labels.device)
        kept, held = rows[:-validation], rows[-validation:]
    else:
        kept, held = _draw_held_out(train_labels, seed)
    logits, chosen = {}, {}
    for name, features in train.items():
        chosen[name] = _choose(features, train_labels, kept, held, decays)
        known, asked = standardise(features, test[name])
        logits[name] = fit_linear(known, train_labels, decay=chosen[name])(asked)
    return Evaluation(measure(logits, test_labels), chosen)


def _draw_held_out(train_labels: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    labels = train_labels.cpu().numpy()
    if int(np.bincount(labels).max()) < 2:
        raise DataError("Every class has one training image only, so nothing can be held out to choose a decay.")
    count = max(1, round(_HELD_OUT * len(labels)))
    kept, held = (torch.from_numpy(rows).to(train_labels.device) for rows in hold_out(labels, count, seed))
    return kept, held


def measure(logits: Mapping[str, Tensor], labels: Tensor) -> dict[str, dict[str, float]]:
    """Both kinds of accuracy by exit and of the ensemble."""
    return {
        name: {
            "top1": 100 * float((each.argmax(1) == labels).double().mean()),
            "mean_per_class": mean_per_class(each.argmax(1), labels),
        }
        for name, each in with_ensemble(dict(logits)).items()
    }


def _choose(features: Tensor, labels: Tensor, kept: Tensor, held: Tensor, decays: Sequence[float]) -> float:
    """The decay with the best accuracy on held-out samples; of equal ones the larger, which asks for less."""
    known, asked = standardise(features[kept], features[held])
    scores, linear = [], None
    for decay in sorted(decays, reverse=True):
        linear = fit_linear(known, labels[kept], decay=decay, start=linear)
        scores.append((float((linear(asked).argmax(1) == labels[held]).double().mean()), decay))
    return max(scores)[1]
