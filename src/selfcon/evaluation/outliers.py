"""How strange an image is to those that a network was trained on, from its features.

N known samples, M asked ones, D dimensions, C classes. Scores are larger for what is stranger.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import normalize

from selfcon.errors import DataError

_CHUNK = 1024
_SHRINKAGE = 0.05  # of the covariance towards its diagonal


class Strangeness(Protocol):
    """A score [M] of features [M, D]."""

    def score(self, features: Tensor) -> Tensor: ...

    def state(self) -> dict[str, Tensor]:
        """What it takes to score, as tensors by name."""
        ...


@dataclass(frozen=True)
class Neighbours:
    """How far the k-th nearest of the known samples is, as an angle's cosine from 1."""

    known: Tensor  # [N, D], unit length
    k: int = 10

    @classmethod
    def fit(cls, features: Tensor, labels: Tensor, *, most: int = 5000) -> Neighbours:
        """Of as many samples, evenly taken, as are worth keeping."""
        if len(features) < 2:
            raise DataError("It takes at least two known images to tell strange ones by.")
        rows = torch.linspace(0, len(features) - 1, min(most, len(features)), dtype=torch.double).round().long()
        return cls(normalize(features[rows].float()), min(10, len(rows)))

    def score(self, features: Tensor) -> Tensor:
        nearest = [
            (normalize(part.float()) @ self.known.to(part.device).T).topk(self.k, dim=1).values[:, -1]
            for part in features.split(_CHUNK)
        ]
        return 1 - torch.cat(nearest) if nearest else features.new_zeros(0)

    def state(self) -> dict[str, Tensor]:
        return {"known": self.known.half()}


@dataclass(frozen=True)
class Mahalanobis:
    """How far the nearest class is, in deviations of the samples about their class."""

    means: Tensor  # [C, D]
    whitening: Tensor  # [D, D]: the distance is plain after it

    @classmethod
    def fit(cls, features: Tensor, labels: Tensor) -> Mahalanobis:
        if len(features) < 2:
            raise DataError("It takes at least two known images to tell strange ones by.")
        features, labels = features.double(), labels.to(features.device)
        classes, rows = labels.unique(return_inverse=True)
        sums = features.new_zeros(len(classes), features.shape[1]).index_add_(0, rows, features)
        means = sums / torch.bincount(rows)[:, None]
        apart = features - means[rows]
        covariance = apart.T @ apart / len(features)
        diagonal = covariance.diag()
        covariance = (1 - _SHRINKAGE) * covariance + torch.diag(_SHRINKAGE * diagonal + 1e-6 * diagonal.mean() + 1e-12)
        inverse_root = torch.linalg.inv(torch.linalg.cholesky(covariance)).T
        return cls(means.float(), inverse_root.float())

    def score(self, features: Tensor) -> Tensor:
        means = (self.means @ self.whitening).to(features.device)
        whitening = self.whitening.to(features.device)
        nearest = [torch.cdist(part.float() @ whitening, means).min(1).values for part in features.split(_CHUNK)]
        return torch.cat(nearest) if nearest else features.new_zeros(0)

    def state(self) -> dict[str, Tensor]:
        return {"means": self.means, "whitening": self.whitening}


KINDS: dict[str, type[Neighbours] | type[Mahalanobis]] = {"neighbours": Neighbours, "mahalanobis": Mahalanobis}


def auroc(inside: Tensor, outside: Tensor) -> float:
    """Percent of pairs of a known and a strange image whose scores are in that order; ties count half."""
    if not len(inside) or not len(outside):
        raise DataError("It takes known and strange images to tell how well they are told apart.")
    order = inside.double().sort().values
    below = torch.searchsorted(order, outside.double())
    up_to = torch.searchsorted(order, outside.double(), right=True)
    return 100 * float(((below + up_to).double() / 2).mean()) / len(inside)
