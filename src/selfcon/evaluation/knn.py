"""Accuracy of the nearest neighbours: what features are worth without any classifier."""

from __future__ import annotations

import torch
from torch import Tensor

from selfcon.errors import UsageError

_ROWS = 1024


def classify(
    features: Tensor, known: Tensor, known_labels: Tensor, *, classes: int, k: int = 20, temperature: float = 0.07
) -> Tensor:
    """Class scores [N, C] of features [N, D]: votes of the k nearest, weighted by exp(cosine/temperature)."""
    if k < 1:
        raise UsageError(f"Neighbours must be at least 1, not {k}.")
    if not temperature > 0:
        raise UsageError(f"The temperature must be greater than 0, not {temperature}.")
    known = torch.nn.functional.normalize(known.float(), dim=1)
    scores = []
    for rows in features.float().split(_ROWS):
        cosine, nearest = (torch.nn.functional.normalize(rows, dim=1) @ known.T).topk(min(k, len(known)), dim=1)
        votes = torch.zeros(len(rows), classes, device=rows.device)
        weights = ((cosine - cosine[:, :1]) / temperature).exp()  # the nearest weighs 1, whatever the temperature
        scores.append(votes.scatter_add_(1, known_labels[nearest], weights))
    return torch.cat(scores)


def accuracy(
    features: Tensor, labels: Tensor, known: Tensor, known_labels: Tensor, *, k: int = 20, temperature: float = 0.07
) -> float:
    """Return the percentage of features whose k nearest neighbors vote for their label.

    Args:
        features: Features [N, D] to classify.
        labels: Their labels [N].
        known: Features [M, D] of the neighbors, usually of the training images.
        known_labels: The labels [M] of the neighbors.
        k: Number of neighbors that vote.
        temperature: Neighbors vote with the weight exp(cosine similarity / temperature).
    """
    classes = int(torch.cat([labels, known_labels]).max()) + 1
    scores = classify(features, known, known_labels, classes=classes, k=k, temperature=temperature)
    return 100 * float((scores.argmax(1) == labels).double().mean())
