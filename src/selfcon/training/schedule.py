"""The learning rate at every step, as the paper's code moves it.

The cosine changes once an epoch, with epochs counted from 1, and ends at a floor. The warm-up is linear in steps, from
a fixed value, or a fiftieth where the rate is lower than that, to what the cosine gives at its last epoch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from selfcon.config import Schedule

_WARM_BATCH, _WARM_EPOCHS = 1024, 10
_WARM_PART = 0.02  # as 0.01 is of the paper's 0.5


@dataclass(frozen=True)
class LearningRate:
    """The schedule of one stage."""

    base: float
    epochs: int
    steps_per_epoch: int
    warmup_epochs: int
    settings: Schedule

    def at(self, step: int) -> float:
        """The rate for a step, counted from 0."""
        epoch = step // self.steps_per_epoch + 1
        if epoch > self.warmup_epochs:
            return self._of_epoch(epoch)
        done = step / (self.warmup_epochs * self.steps_per_epoch)
        end = self._of_epoch(self.warmup_epochs)
        start = self.settings.warmup_from if self.settings.warmup_from < end else _WARM_PART * end
        return start + done * (end - start)

    def _of_epoch(self, epoch: int) -> float:
        if self.settings.kind == "constant":
            return self.base
        if self.settings.kind == "step":
            return self.base * self.settings.gamma ** sum(
                epoch > round(m * self.epochs, 6) for m in self.settings.milestones
            )
        floor = self.base * self.settings.floor
        return floor + (self.base - floor) * (1 + math.cos(math.pi * epoch / self.epochs)) / 2


def plan(base: float, settings: Schedule, *, epochs: int, steps_per_epoch: int, batch_size: int) -> LearningRate:
    """The schedule of a stage; without a number of warm-up epochs, 10 (at most a fifth) for batches of 1024 or more."""
    warmup = settings.warmup_epochs
    if warmup is None:
        warmup = min(_WARM_EPOCHS, epochs // 5) if batch_size >= _WARM_BATCH else 0
    return LearningRate(base, epochs, steps_per_epoch, min(warmup, epochs), settings)
