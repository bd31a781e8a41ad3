"""Losses that train a classifier with the encoder: cross-entropy at the exits, distillation, SelfCon beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from selfcon.errors import NonFiniteError, UsageError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class OneStage:
    """CE(F) + sum over sub-networks G of [cross_entropy · CE(G) + distillation · KL(F -> G)] + contrast · L_self."""

    cross_entropy: float = 0.0
    distillation: float = 0.0
    contrast: float = 0.0
    softening: float = 3.0


def logits_loss(logits: Mapping[str, Tensor], labels: Tensor, weights: OneStage, *, finite: bool = True) -> Tensor:
    """The part of a one-stage loss that needs logits [B, C] by exit, the backbone's first.

    `finite` is whether infinite ones are refused; of several processes, none may be alone in raising.
    """
    from torch.nn.functional import cross_entropy

    from selfcon.losses.objective import check_labels, raised

    names = list(logits)
    backbone = raised(logits[names[0]])
    check_labels(labels, len(backbone), backbone.device)
    _check_on_the_cpu(logits, labels, finite=finite)
    labels = labels.long()
    loss = cross_entropy(backbone, labels)
    for name in names[1:]:
        exit_logits = raised(logits[name])
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


def _check_on_the_cpu(logits: Mapping[str, Tensor], labels: Tensor, *, finite: bool) -> None:
    import torch

    # On a GPU the answers would make the host wait; there a wrong label stops PyTorch's own kernel, and NaN stays NaN.
    if labels.device.type != "cpu" or torch.compiler.is_compiling():
        return
    for name, values in logits.items():
        if finite and not values.detach().isfinite().all():
            raise NonFiniteError(f"logits of {name} hold NaN or infinity.")
        classes = values.shape[1]
        wrong = labels[(labels < 0) | (labels >= classes)]
        if len(wrong):
            raise UsageError(f"labels must be 0 to {classes - 1} for {classes} classes, and one is {int(wrong[0])}.")
