"""An exponential moving average of a module: its weights, and the statistics that belong to them."""

from __future__ import annotations

import copy

import torch
from torch import nn


class Average:
    """The average of a module as another module of the same kind."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self.module = copy.deepcopy(module).requires_grad_(False)

    @torch.no_grad()
    def update(self, module: nn.Module) -> None:
        """Take one step towards the module; counters become the newest."""
        ours, theirs = ([*each.parameters(), *each.buffers()] for each in (self.module, module))
        pairs = list(zip(ours, theirs, strict=True))
        smooth = [pair for pair in pairs if pair[0].is_floating_point()]
        torch._foreach_lerp_([mine for mine, _ in smooth], [newest for _, newest in smooth], 1 - self.decay)
        for mine, newest in pairs:
            if not mine.is_floating_point():
                mine.copy_(newest)
