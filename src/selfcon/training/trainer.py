"""One update of a stage: forward, backward, precision, clipping, optimiser, averages.

What comes before and after it (batches, metrics, checkpoints, signals) is the loop's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from selfcon.config import Optim, Schedule
from selfcon.errors import NonFiniteError
from selfcon.training.ema import Average
from selfcon.training.optimizers import create_optimizer
from selfcon.training.schedule import plan

_MOST_SKIPPED = 20  # steps in a row that float16's scaler may skip to find its scale


class Stage(ABC):
    """Something that is trained over epochs of batches."""

    name: str
    module: nn.Module  # its parameters are trained, all its state is kept
    epochs: int
    batch_size: int
    samples: int
    lr: float
    optim: Optim
    schedule: Schedule
    precision: str = "fp32"
    ema: float | None = None
    seed: int = 0

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.samples // self.batch_size)

    @abstractmethod
    def batches(self, epoch: int, first: int) -> Iterator[Any]:
        """The batches of an epoch (from 0) in order, from number `first` on."""

    @abstractmethod
    def loss(self, batch: Any) -> Tensor:
        """The loss of one batch, a scalar."""

    def measure(self, epoch: int, module: nn.Module) -> dict[str, float]:
        """What else to note after an epoch (from 0)."""
        return {}

    def keep(self, epoch: int, module: nn.Module) -> None:  # noqa: B027 - most stages store nothing
        """Called after every epoch (from 0), for stages that store something of some."""


class Trainer:
    """What an update changes: the module, the optimiser, the scaler, the average."""

    def __init__(self, stage: Stage, device: torch.device) -> None:
        self.stage, self.device = stage, device
        self.optimizer: Optimizer = create_optimizer(stage.module.parameters(), stage.optim, stage.lr)
        self.rate = plan(
            stage.lr,
            stage.schedule,
            epochs=stage.epochs,
            steps_per_epoch=stage.steps_per_epoch,
            batch_size=stage.batch_size,
        )
        self.average = None if stage.ema is None else Average(stage.module, stage.ema)
        self.scaler = torch.amp.GradScaler(device.type, enabled=stage.precision == "fp16")
        self.skipped = 0

    @property
    def result(self) -> nn.Module:
        return self.stage.module if self.average is None else self.average.module

    def update(self, batch: Any, step: int) -> Tensor:
        """Update number `step` (from 0); returns its loss.

        Where that or the gradient is not finite, the weights stay as they are and NonFiniteError is raised.
        """
        lr = self.rate.at(step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        loss = self._forward(batch, step)
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        trained = [p for group in self.optimizer.param_groups for p in group["params"]]
        length = nn.utils.clip_grad_norm_(trained, self.stage.optim.clip_norm or float("inf"))
        overflow_is_usual = self.scaler.is_enabled()
        if not loss.isfinite() or not (overflow_is_usual or length.isfinite()):
            raise self._not_finite(f"The {'gradient' if loss.isfinite() else 'loss'} is not finite", step)
        self.skipped = 0 if length.isfinite() else self.skipped + 1
        if self.skipped > _MOST_SKIPPED:
            raise self._not_finite(f"The gradient was not finite in {self.skipped} steps in a row", step)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.average is not None and not self.skipped:
            self.average.update(self.stage.module)
        return loss.detach()

    def _forward(self, batch: Any, step: int) -> Tensor:
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.stage.precision)
        try:
            with torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None):
                return self.stage.loss(batch)
        except NonFiniteError as error:
            raise self._not_finite(str(error).rstrip("."), step) from error

    def _not_finite(self, what: str, step: int) -> NonFiniteError:
        hint = "--precision bf16" if self.scaler.is_enabled() else "a lower --lr or --optim.clip_norm"
        return NonFiniteError(
            f"{what} at step {step + 1} of {self.stage.name} (epoch {step // self.stage.steps_per_epoch + 1}), "
            f"and the weights were left as they were: try {hint}."
        )
