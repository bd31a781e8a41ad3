"""Losses that train a classifier with the encoder: cross-entropy at the exits, distillation, SelfCon beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from selfcon.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class OneStage:
    """CE(F) + sum over sub-networks G of [cross_entropy · CE(G) + distillation · KL(F -> G)] + contrast · L_self."""

    cross_entropy: float = 0.0
    distillation: float = 0.0
    contrast: float = 0.0
    softening: float = 3.0


def logits_loss(logits: Mapping[str, Tensor], labels: Tensor, weights: OneStage) -> Tensor:
    """The part of a one-stage loss that needs logits [B, C] by exit, the backbone's first."""
    from torch.nn.functional import cross_entropy

    names = list(logits)
    backbone = _raised(logits[names[0]])
    _check_classes(labels, classes=backbone.shape[1])
    loss = cross_entropy(backbone, labels)
    for name in names[1:]:
        exit_logits = _raised(logits[name])
        if weights.cross_entropy:
            loss = loss + weights.cross_entropy * cross_entropy(exit_logits, labels)
        if weights.distillation:
            loss = loss + weights.distillation * soft_divergence(backbone, exit_logits, weights.softening)
    return loss


def soft_divergence(teacher: Tensor, student: Tensor, softening: float) -> Tensor:
    """KL from the teacher's softened distribution to the student's, times softening²; the teacher gets no gradient."""
    from torch.nn.functional import kl_div, log_softmax

    target = log_softmax(teacher.detach() / softening, dim=1)
    guess = log_softmax(student / softening, dim=1)
    return kl_div(guess, target, reduction="batchmean", log_target=True) * softening**2


def _raised(logits: Tensor) -> Tensor:
    return logits if logits.element_size() == 8 else logits.float()


def _check_classes(labels: Tensor, classes: int) -> None:
    # On a GPU the comparison would make the host wait; there PyTorch's own kernel stops on such a label.
    if labels.device.type == "cpu" and len(labels):
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= classes:
            wrong = low if low < 0 else high
            raise UsageError(f"labels must be 0 to {classes - 1} for {classes} classes, and one is {wrong}.")
