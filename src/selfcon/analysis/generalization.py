"""How much of what is learnt carries over: accuracy on training and test images, Figure 3 of the paper.

A linear classifier is fitted on frozen features to the end (a convex problem: it has one solution), so that encoders of
different epochs and methods are compared and not how well their probes were trained.
"""

from __future__ import annotations

from torch import Tensor

from selfcon.evaluation.linear import fit_linear, standardise


def linear_accuracy(
    train: Tensor, train_labels: Tensor, test: Tensor, test_labels: Tensor, *, decay: float = 1e-3
) -> dict[str, float]:
    """Percent right of the training and of the test images, by a classifier fitted on the training images."""
    train, test = standardise(train, test)
    linear = fit_linear(train, train_labels, decay=decay)
    return {
        name: 100 * float((linear(rows).argmax(1) == labels).double().mean())
        for name, rows, labels in (("train", train, train_labels), ("test", test, test_labels))
    }
