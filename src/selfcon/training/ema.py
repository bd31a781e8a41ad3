"""An exponential moving average of a module: its weights, and the statistics that belong to them."""

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
    def update(self, module: nn.Module, step: Tensor) -> None:
        """Take one step towards the module, whose update number `step` (from 0) was made; counters become the newest.

        Early steps are longer, so that little is left of the weights that training began with: at the n-th update, at
        most (1 + n) / (10 + n) of the average stays.
        """
        ours, theirs = ([*each.parameters(), *each.buffers()] for each in (self.module, module))
        pairs = list(zip(ours, theirs, strict=True))
        smooth = [pair for pair in pairs if pair[0].is_floating_point()]
        stays = ((2 + step) / (11 + step)).clamp(max=self.decay)  # a tensor, since the step is recorded and replayed
        averages = [mine for mine, _ in smooth]
        steps = torch._foreach_sub([newest for _, newest in smooth], averages)
        torch._foreach_mul_(steps, 1 - stays)
        torch._foreach_add_(averages, steps)
        for mine, newest in pairs:
            if not mine.is_floating_point():
                mine.copy_(newest)
