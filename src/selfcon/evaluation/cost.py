"""What a forward costs."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from selfcon.evaluation.accuracy import evaluating


def count_multiply_adds(module: nn.Module, x: Tensor) -> int:
    """Of one forward of a module."""
    with evaluating(module), FlopCounterMode(display=False) as counter:
        module(x)
    return int(counter.get_total_flops()) // 2


def zero_image(module: nn.Module, size: int) -> Tensor:
    """A black image [1, 3, S, S] where a module is, in its precision."""
    like = next(module.parameters())
    return torch.zeros(1, 3, size, size, device=like.device, dtype=like.dtype)
