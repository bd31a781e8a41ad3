"""The learning rate at every step.

The paper's cosine changes once an epoch, with epochs counted from 1, so that the whole last one is at the floor; the
smooth one moves at every step, from the full rate at the first, and so suits short trainings, too. The warm-up is
linear in steps, from a fixed value, or a fiftieth where the rate is lower than that, to what there would be at its end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from selfcon.config import Schedule

_WARM_BATCH, _WARM_EPOCHS = 1024, 10
_MANY_UPDATES = 2000
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
        warm = self.warmup_epochs * self.steps_per_epoch
        if step >= warm:
            return self._after_warm_up(step)
        end = self._after_warm_up(warm if self.settings.kind == "smooth-cosine" else warm - 1)
        start = self.settings.warmup_from if self.settings.warmup_from < end else _WARM_PART * end
        return start + step / warm * (end - start)

    def _after_warm_up(self, step: int) -> float:
        before = step // self.steps_per_epoch  # whole epochs
        if self.settings.kind == "constant":
            return self.base
        if self.settings.kind == "step":
            passed = sum(before >= round(m * self.epochs, 3) for m in self.settings.milestones)
            return self.base * self.settings.gamma**passed
        done = (before + 1) / self.epochs
        if self.settings.kind == "smooth-cosine":
            done = step / (self.epochs * self.steps_per_epoch)
        floor = self.base * self.settings.floor
        return floor + (self.base - floor) * (1 + math.cos(math.pi * done)) / 2


def plan(
    base: float,
    settings: Schedule,
    *,
    epochs: int,
    steps_per_epoch: int,
    batch_size: int,
    slow_start: bool = False,
) -> LearningRate:
    """The schedule of a stage; without a number of warm-up epochs, 10 (at most a fifth) for batches of 1024 or more.

    With `slow_start` the smooth cosine warms up for smaller batches, too, where there are updates enough to make up
    for it.
    """
    warmup = settings.warmup_epochs
    if warmup is None:
        pays = slow_start and settings.kind == "smooth-cosine" and epochs * steps_per_epoch >= _MANY_UPDATES
        warmup = min(_WARM_EPOCHS, epochs // 5) if pays or batch_size >= _WARM_BATCH else 0
    return LearningRate(base, epochs, steps_per_epoch, min(warmup, epochs), settings)
