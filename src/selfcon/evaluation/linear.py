"""Linear classifiers on frozen features, fitted to the end: a convex problem with one solution."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from selfcon.errors import DataError, UsageError


def fit_linear(
    features: Tensor, labels: Tensor, *, decay: float = 1e-3, rounds: int = 1000, start: nn.Linear | None = None
) -> nn.Linear:
    """The classifier of least cross-entropy, with `decay` times half its squared weights, on features [N, D].

    From `start`, say the classifier of another decay, it is found sooner.
    """
    if decay <= 0:
        raise UsageError(f"The decay must be greater than 0, or there is no one solution, not {decay}.")
    classes = int(labels.max()) + 1
    if len(labels.unique()) < 2:
        raise DataError("All these images are of one class, so there is nothing to classify.")
    linear = nn.Linear(features.shape[1], classes).to(features.device, torch.float32)
    if start is None:
        nn.init.zeros_(linear.weight)
        nn.init.zeros_(linear.bias)
    else:
        linear.load_state_dict(start.state_dict())
    solver = torch.optim.LBFGS(
        linear.parameters(),
        max_iter=rounds,
        max_eval=2 * rounds,
        tolerance_grad=1e-7,
        tolerance_change=1e-12,
        history_size=20,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        solver.zero_grad()
        loss = nn.functional.cross_entropy(linear(features), labels) + 0.5 * decay * linear.weight.square().sum()
        loss.backward()
        return loss

    with torch.enable_grad():
        solver.step(closure)
    return linear.requires_grad_(False)


def standardise(train: Tensor, *others: Tensor) -> list[Tensor]:
    """Features [N, D] with the mean and deviation of the first of them taken out."""
    mean, std = train.float().mean(0), train.float().std(0).clamp_min(1e-6)
    return [(rows.float() - mean) / std for rows in (train, *others)]
