"""Accuracy of every exit and of their ensemble, the equal-weight mean of all exits' logits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from selfcon.data.parts import current_part, sum_of_all
from selfcon.data.split import Split
from selfcon.evaluation.answers import ENSEMBLE
from selfcon.losses.gather import join_rows
from selfcon.networks.multi_exit import MultiExitNetwork


@dataclass(frozen=True)
class Predictions:
    """Logits [N, C] by exit (the ensemble's among them) and labels [N], on the CPU."""

    logits: dict[str, Tensor]
    labels: Tensor

    def top(self, k: int) -> dict[str, float]:
        """Percent of samples whose label is among the k likeliest, by exit; for k of more than the classes, nothing.

        Of equal logits the first counts as the likelier one, as for argmax.
        """
        classes = next(iter(self.logits.values())).shape[1]
        if k > classes:
            return {}
        return {
            name: 100 * float((_places(logits, self.labels) < k).double().mean())
            for name, logits in self.logits.items()
        }


def _places(logits: Tensor, labels: Tensor) -> Tensor:
    """How many classes [N] are taken to be likelier than the label; whatever is no number is."""
    own = logits.gather(1, labels[:, None])
    earlier = torch.arange(logits.shape[1], device=logits.device) < labels[:, None]
    return (~(logits <= own) | ((logits == own) & earlier)).sum(1)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """The module in evaluation mode, without gradients; afterwards as it was."""
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        module.train(was_training)


def predict(net: MultiExitNetwork, data: Split, *, batch_size: int = 512, size: int | None = None) -> Predictions:
    """What every exit's classifier says of every sample, in the stored order."""
    logits = _collect(net, data, "logits", batch_size=batch_size, size=size)
    return Predictions(with_ensemble(logits), data.labels.cpu())


def with_ensemble(logits: dict[str, Tensor]) -> dict[str, Tensor]:
    """The logits by exit and their mean."""
    return {**logits, ENSEMBLE: torch.stack(list(logits.values())).mean(0)}


def embed(net: MultiExitNetwork, data: Split, *, batch_size: int = 512, size: int | None = None) -> dict[str, Tensor]:
    """Features [N, D] of every sample by exit, in the stored order, on the CPU."""
    return _collect(net, data, "features", batch_size=batch_size, size=size)


def _collect(net: MultiExitNetwork, data: Split, what: str, *, batch_size: int, size: int | None) -> dict[str, Tensor]:
    """A part of the network's output for all samples; several processes share the work, and each gets all of it."""
    parts: dict[str, list[Tensor]] = {name: [] for name in net.names}
    with evaluating(net):
        for batch in data.plain_batches(batch_size=batch_size, size=size, part=current_part()):
            for name, values in getattr(net(batch.images.to(net.dtype)), what).items():
                parts[name].append(values.float())
    return {name: join_rows(torch.cat(values)).cpu() for name, values in parts.items()}


def mean_per_class(guesses: Tensor, labels: Tensor) -> float:
    """Percent right, as the mean over the classes that there are: small classes count as much as large ones."""
    right = (guesses == labels).double()
    classes, rows = labels.unique(return_inverse=True)
    sums = torch.zeros(len(classes), dtype=torch.double, device=labels.device).index_add_(0, rows, right)
    return 100 * float((sums / torch.bincount(rows)).mean())


def is_uneven(labels: Tensor) -> bool:
    """Whether one class has half as many samples again as another; those that have none do not count."""
    counts = labels.unique(return_counts=True)[1]
    return bool(len(counts) and counts.max() > 1.5 * counts.min())


def find_never_guessed(test: Predictions) -> list[int]:
    """The classes that samples are of, and that the ensemble never takes one for."""
    guessed = test.logits[ENSEMBLE].argmax(1).unique().tolist()
    return [label for label in test.labels.unique().tolist() if label not in guessed]


def top1_of(net: MultiExitNetwork, data: Split, *, batch_size: int = 512, size: int | None = None) -> dict[str, float]:
    """Percent right by exit and for the ensemble, as `predict(...).top(1)`, but only counted: nothing is kept."""
    names = [*net.names, ENSEMBLE]
    right = torch.zeros(len(names), dtype=torch.float64, device=data.device)
    part = current_part()
    with evaluating(net):
        for batch in data.plain_batches(batch_size=batch_size, size=size, part=part):
            logits = {name: each.float() for name, each in net(batch.images.to(net.dtype)).logits.items()}
            right += torch.stack([(each.argmax(1) == batch.labels).sum() for each in with_ensemble(logits).values()])
    if part.size > 1:
        right = sum_of_all(right, data.device)
    return dict(zip(names, (100 * right / len(data)).tolist(), strict=True))


def summarise(test: Predictions, train_top1: Mapping[str, float] | None = None) -> dict[str, dict[str, float]]:
    """By exit: top1 and top5 (where there are 6 classes or more) of the test set, top1 of the training set.

    Where the classes are uneven, the mean of what is right of each, too.
    """
    uneven = is_uneven(test.labels)
    top1, top5 = test.top(1), test.top(5) if next(iter(test.logits.values())).shape[1] > 5 else {}
    train_top1 = train_top1 or {}
    table: dict[str, dict[str, float]] = {}
    for name in top1:
        table[name] = {"top1": top1[name]}
        if name in top5:
            table[name]["top5"] = top5[name]
        if uneven:
            table[name]["mean_per_class"] = mean_per_class(test.logits[name].argmax(1), test.labels)
        if name in train_top1:
            table[name]["train_top1"] = train_top1[name]
    return table
