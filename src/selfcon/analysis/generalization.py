"""How much of what is learnt carries over: accuracy on training and test images, Figure 3 of the paper.

A linear classifier is fitted on frozen features to the end (a convex problem: it has one solution), so that encoders of
different epochs and methods are compared and not how well their probes were trained.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from selfcon.errors import DataError, UsageError


def fit_linear(features: Tensor, labels: Tensor, *, decay: float = 1e-3, rounds: int = 200) -> nn.Linear:
    """The classifier of least cross-entropy, with `decay` times half its squared weights, on features [N, D]."""
    if decay <= 0:
        raise UsageError(f"The decay must be greater than 0, or there is no one solution, not {decay}.")
    classes = int(labels.max()) + 1
    if classes < 2:
        raise DataError("All these images are of one class, so there is nothing to classify.")
    linear = nn.Linear(features.shape[1], classes).to(features.device, torch.float32)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    solver = torch.optim.LBFGS(
        linear.parameters(), max_iter=rounds, history_size=20, line_search_fn="strong_wolfe", tolerance_grad=1e-5
    )

    def closure() -> Tensor:
        solver.zero_grad()
        loss = nn.functional.cross_entropy(linear(features), labels) + 0.5 * decay * linear.weight.square().sum()
        loss.backward()
        return loss

    with torch.enable_grad():
        solver.step(closure)
    return linear.requires_grad_(False)


def linear_accuracy(
    train: Tensor, train_labels: Tensor, test: Tensor, test_labels: Tensor, *, decay: float = 1e-3
) -> dict[str, float]:
    """Percent right of the training and of the test images, by a classifier fitted on the training images."""
    mean, std = train.mean(0), train.std(0).clamp_min(1e-6)
    train, test = ((rows - mean) / std for rows in (train.float(), test.float()))
    linear = fit_linear(train, train_labels, decay=decay)
    return {
        name: 100 * float((linear(rows).argmax(1) == labels).double().mean())
        for name, rows, labels in (("train", train, train_labels), ("test", test, test_labels))
    }
