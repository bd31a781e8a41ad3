"""The one loop that trains everything: pretraining, one-stage training, the linear probe.

A stage says what a batch is and what its loss; the loop does the rest: learning rate, precision, optimiser, averages,
metrics, checkpoints, signals. It goes on exactly where a checkpoint was written, in mid-epoch too.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from selfcon.config import Optim, Schedule
from selfcon.errors import NonFiniteError
from selfcon.training import checkpoint as checkpoints
from selfcon.training.checkpoint import Checkpoint
from selfcon.training.ema import Average
from selfcon.training.folder import RunFolder
from selfcon.training.optimizers import create_optimizer
from selfcon.training.progress import Reporter
from selfcon.training.schedule import plan
from selfcon.training.signals import Stop

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


def train(
    stage: Stage,
    run: RunFolder,
    *,
    device: torch.device,
    stop: Stop,
    log: Callable[[dict[str, Any]], None] | None = None,
    minutes_between_saves: float = 5.0,
) -> nn.Module:
    """Train a stage to its end, from its newest checkpoint if there is one; returns the (averaged) module.

    `stop` is looked at after every step: when it is set, a checkpoint is written and StoppedError raised. `log` is told
    what is noted of every epoch.
    """
    worker = _Worker(stage, run, device)
    worker.restore()
    if worker.epoch >= stage.epochs:
        return worker.result
    with Reporter(stage.name, stage.epochs, stage.samples) as reporter:
        last_save = time.monotonic()
        while worker.epoch < stage.epochs:
            for batch in stage.batches(worker.epoch, worker.batch):
                worker.step(batch)
                reporter.show(worker.epoch, len_of(batch), worker.mean_loss)
                if stop.by is not None:
                    worker.save()
                    stop.check()
                if time.monotonic() - last_save > 60 * minutes_between_saves:
                    worker.save()
                    last_save = time.monotonic()
            line = worker.end_epoch()
            reporter.end_epoch(line)
            if log is not None:
                log(line)
        worker.save()
        stop.check()
    return worker.result


def memory_format(device: torch.device) -> torch.memory_format:
    """How images and weights are laid out: channels last on a GPU, where it is faster.

    Not on a CPU: there PyTorch 2.15 damages its own memory in the backward of convolutions with 8 channels and an odd
    batch (a batch of 29 through ResNet-18 at width 0.125 is enough).
    """
    return torch.channels_last if device.type == "cuda" else torch.contiguous_format


def len_of(batch: Any) -> int:
    """Samples in a batch."""
    return len(batch.labels)


class _Worker:
    """The state of a stage in training."""

    def __init__(self, stage: Stage, run: RunFolder, device: torch.device) -> None:
        self.stage, self.run, self.device = stage, run, device
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
        self.epoch = self.batch = self.skipped = 0
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self.metrics = [line for line in run.read_metrics() if line["stage"] != stage.name]
        self.started = time.monotonic()
        self.seconds_before = 0.0

    @property
    def result(self) -> nn.Module:
        return self.stage.module if self.average is None else self.average.module

    @property
    def step_number(self) -> int:
        return self.epoch * self.stage.steps_per_epoch + self.batch

    def mean_loss(self) -> float:
        return float(self.loss_sum) / max(self.batch, 1)

    def step(self, batch: Any) -> None:
        """One update, unless its loss or gradient is not finite: then the stage ends with the weights as they were."""
        lr = self.rate.at(self.step_number)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.stage.precision)
        with torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None):
            loss = self.stage.loss(batch)
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        trained = [p for group in self.optimizer.param_groups for p in group["params"]]
        length = nn.utils.clip_grad_norm_(trained, self.stage.optim.clip_norm or float("inf"))
        overflow_is_usual = self.scaler.is_enabled()
        if not loss.isfinite() or not (overflow_is_usual or length.isfinite()):
            raise NonFiniteError(
                f"The {'gradient' if loss.isfinite() else 'loss'} is not finite at step {self.step_number + 1} of "
                f"{self.stage.name} (epoch {self.epoch + 1}), and the weights were left as they were: try a lower --lr "
                f"or --optim.clip_norm. The last checkpoint is in {self.run.checkpoints}."
            )
        self.skipped = 0 if length.isfinite() else self.skipped + 1
        if self.skipped > _MOST_SKIPPED:
            raise NonFiniteError(
                f"The gradient was not finite in {self.skipped} steps in a row, up to step {self.step_number + 1} of "
                f"{self.stage.name}: try --precision bf16. The last checkpoint is in {self.run.checkpoints}."
            )
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.average is not None and not self.skipped:
            self.average.update(self.stage.module)
        self.loss_sum += loss.detach()
        self.batch += 1

    def end_epoch(self) -> dict[str, Any]:
        """Note the epoch and go on to the next."""
        line: dict[str, Any] = {
            "stage": self.stage.name,
            "epoch": self.epoch + 1,
            "loss": self.mean_loss(),
            "lr": self.rate.at(self.step_number - 1),
        }
        line |= self.stage.measure(self.epoch, self.result)
        self.stage.keep(self.epoch, self.result)
        line["seconds"] = self.seconds_before + time.monotonic() - self.started
        self.metrics.append(line)
        self.run.write_metrics(self.metrics)
        self.epoch, self.batch = self.epoch + 1, 0
        self.loss_sum.zero_()
        return line

    def save(self) -> None:
        tensors = {f"module.{name}": value for name, value in self.stage.module.state_dict().items()}
        if self.average is not None:
            tensors |= {f"average.{name}": value for name, value in self.average.module.state_dict().items()}
        state = self.optimizer.state_dict()
        tensors |= {
            f"optimizer.{index}.{key}": value
            for index, values in state["state"].items()
            for key, value in values.items()
            if isinstance(value, Tensor)
        }
        tensors["random.cpu"] = torch.get_rng_state()
        if self.device.type == "cuda":
            tensors["random.cuda"] = torch.cuda.get_rng_state(self.device)
        tensors["loss_sum"] = self.loss_sum
        facts = {
            "stage": self.stage.name,
            "epoch": self.epoch,
            "batch": self.batch,
            "skipped": self.skipped,
            "scaler": self.scaler.state_dict(),
            "metrics": [line for line in self.metrics if line["stage"] == self.stage.name],
            "seconds": self.seconds_before + time.monotonic() - self.started,
        }
        name = f"step-{self.step_number:09d}"
        checkpoints.save(self.run.checkpoints / self.stage.name, name, Checkpoint(tensors, facts))

    def restore(self) -> None:
        found = checkpoints.load_newest(self.run.checkpoints / self.stage.name)
        if found is None:
            return
        tensors, facts = found.tensors, found.facts
        self.stage.module.load_state_dict(_below(tensors, "module."))
        if self.average is not None:
            self.average.module.load_state_dict(_below(tensors, "average."))
        self._restore_optimizer(_below(tensors, "optimizer."))
        self.scaler.load_state_dict(facts["scaler"])
        torch.set_rng_state(tensors["random.cpu"])
        if self.device.type == "cuda" and "random.cuda" in tensors:
            torch.cuda.set_rng_state(tensors["random.cuda"], self.device)
        self.loss_sum.copy_(tensors["loss_sum"])
        self.epoch, self.batch, self.skipped = facts["epoch"], facts["batch"], facts["skipped"]
        self.metrics += facts["metrics"]
        self.seconds_before = facts["seconds"]

    def _restore_optimizer(self, tensors: dict[str, Tensor]) -> None:
        state = self.optimizer.state_dict()
        values: dict[int, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            index, _, key = name.partition(".")
            values.setdefault(int(index), {})[key] = value
        self.optimizer.load_state_dict({"state": values, "param_groups": state["param_groups"]})


def _below(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
