"""An exponential moving average of a module's weights; its buffers are the newest."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


class Average:
    """The average of a module as another module of the same kind."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self.module = copy.deepcopy(module).requires_grad_(False)

    @torch.no_grad()
    def update(self, module: nn.Module) -> None:
        """Take one step towards the module."""
        ours: list[Tensor] = list(self.module.parameters())
        theirs: list[Tensor] = list(module.parameters())
        torch._foreach_lerp_(ours, theirs, 1 - self.decay)
        for mine, newest in zip(self.module.buffers(), module.buffers(), strict=True):
            mine.copy_(newest)
