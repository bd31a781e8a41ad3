"""Functions that know their first derivative only, and say so when asked for a second."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from selfcon.errors import UsageError

Backward = Callable[..., tuple[Tensor | None, ...]]


def first_derivative_only(refusal: str) -> Callable[[Backward], Backward]:
    """For the `backward` of a `torch.autograd.Function` that saves its inputs; `refusal` answers a second one.

    torch's `once_differentiable` complains only where the gradient from above has a gradient itself, which that of a
    loss has not: what was returned would then count as a constant, and second derivatives be wrong without a word.
    """

    def decorate(backward: Backward) -> Backward:
        @wraps(backward)
        def guarded(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
            with torch.no_grad():
                found = backward(ctx, *above)
            if not torch.is_grad_enabled():
                return found
            asked = [each for each in (*ctx.saved_tensors, *above) if each is not None and each.requires_grad]
            return tuple(None if each is None else _Refuse.apply(refusal, each, *asked) for each in found)

        return guarded

    return decorate


class _Refuse(torch.autograd.Function):
    """A gradient that depends on tensors in a way that is not known."""

    @staticmethod
    def forward(ctx: Any, refusal: str, gradient: Tensor, *_: Tensor) -> Tensor:
        ctx.refusal = refusal
        return gradient.clone()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[None, ...]:
        raise UsageError(ctx.refusal)
