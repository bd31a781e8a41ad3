"""One update of a stage: forward, backward, precision, clipping, optimiser, averages.

What comes before and after it (batches, metrics, checkpoints, signals) is the loop's.
"""

from __future__ import annotations

import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from selfcon.config import Optim, Schedule
from selfcon.data.split import Batch
from selfcon.errors import NonFiniteError, SelfconWarning
from selfcon.progress import say
from selfcon.training.distributed import ALONE, World
from selfcon.training.ema import Average
from selfcon.training.optimizers import create_optimizer
from selfcon.training.replay import Replayed
from selfcon.training.schedule import plan

# The loss is in float32 on purpose, and torch.compile advises against it.
warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores", category=UserWarning)

_MOST_SKIPPED = 20  # steps in a row that float16's scaler may skip to find its scale
_STEPS_BETWEEN_CHECKS = 50
_WORTH_COMPILING = 2000  # steps; compiling takes as long as a few thousand steps of a small network gain by it


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
    slow_start: bool = False  # whether a rate that is high at once keeps it from learning
    precision: str = "fp32"
    ema: float | None = None
    seed: int = 0
    recordable: bool = True  # whether a step can be compiled and recorded on a GPU
    world: World = ALONE
    counts: Mapping[str, Tensor] = {}  # whole numbers that its loss adds up over an epoch, on the device
    step: Tensor  # number of the update under way, on the device, for losses that draw; its trainer sets it

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.samples // self.batch_size)

    @abstractmethod
    def batches(self, epoch: int, first: int) -> Iterator[Batch]:
        """The batches of an epoch (from 0) in order, from number `first` on."""

    @abstractmethod
    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """The loss of one batch, a scalar."""

    def unwrap(self, module: nn.Module) -> nn.Module:
        """What the stage is for, out of what is trained."""
        return module

    def measure(self, epoch: int, module: nn.Module) -> dict[str, float]:
        """What else to note after an epoch (from 0)."""
        return {}

    def describe(self, noted: Mapping[str, Any]) -> str:
        """What progress says of the numbers that were noted after an epoch."""
        return ""

    def keep(self, epoch: int, module: nn.Module) -> None:  # noqa: B027 - most stages store nothing
        """Called after every epoch (from 0), for stages that store something of some."""


class Trainer:
    """What an update changes: the module, the optimiser, the scaler, the average; and how updates are made fast.

    On a GPU nothing in an update makes the host wait: whether losses were finite is noted there and looked at now and
    then, and no update is applied from the first on that was not. Full batches go through a compiled loss where the
    stage is long enough, and every update is recorded and replayed.
    """

    def __init__(self, stage: Stage, device: torch.device, *, compiled: bool | None = None) -> None:
        self.stage, self.device = stage, device
        self.on_gpu = device.type == "cuda"
        self.optimizer: Optimizer = create_optimizer(stage.module.parameters(), stage.optim, stage.lr, device)
        self.rate = plan(
            stage.lr,
            stage.schedule,
            epochs=stage.epochs,
            steps_per_epoch=stage.steps_per_epoch,
            batch_size=stage.batch_size,
            slow_start=stage.slow_start,
        )
        self.average = None if stage.ema is None else Average(stage.module, stage.ema)
        self.scaler = torch.amp.GradScaler(device.type, enabled=stage.precision == "fp16")
        self.skipped = 0
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self._step = stage.step = torch.zeros((), dtype=torch.int64, device=device)
        self._samples = torch.zeros((), dtype=torch.float64, device=device)  # of this update, in all processes
        self._broken = torch.full((), -1, dtype=torch.int64, device=device)  # the first step that was not finite
        self._trained = [p for group in self.optimizer.param_groups for p in group["params"]]
        self._waits = not self.on_gpu or self.scaler.is_enabled()  # for what came out of each update
        self._loss: Callable[[Tensor, Tensor], Tensor] = stage.loss
        self._by_hand = False  # whether gradients are averaged here, not by DistributedDataParallel
        if stage.world.size > 1 and stage.recordable:
            self._loss = DistributedDataParallel(_AsModule(stage), device_ids=[device] if self.on_gpu else None)
        elif stage.world.size > 1:
            self._by_hand = True
        self._fast_loss = self._loss
        if (
            self.on_gpu
            and stage.recordable
            and (stage.epochs * stage.steps_per_epoch >= _WORTH_COMPILING if compiled is None else compiled)
        ):
            self._fast_loss = Compiled(self._loss, stage.name)
        self._run: Callable[[Tensor, Tensor], None] = self._advance
        if stage.recordable and stage.world.size == 1 and not self._waits:
            self._run = Replayed(self._advance, device)

    @property
    def result(self) -> nn.Module:
        return self.stage.unwrap(self.stage.module if self.average is None else self.average.module)

    def update(self, images: Tensor, labels: Tensor, step: int) -> None:
        """Update number `step` (from 0), whose loss goes into `loss_sum`, once for every sample.

        Where that or the gradient is not finite, the weights stay as they are and NonFiniteError is raised: at once, or
        on a GPU within so many steps, and always by `check`.
        """
        lr = self.rate.at(step)
        self._step.fill_(step)
        self._samples.fill_(self._count_samples(step))
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        self._run(images, labels)
        if not self._waits and (step + 1) % _STEPS_BETWEEN_CHECKS == 0:
            self.check()

    def close(self) -> None:
        """Let go of recordings, which hold memory, and of the trainer."""
        del self._run, self._loss, self._fast_loss

    def check(self) -> None:
        """Raise NonFiniteError if an update so far was not finite."""
        if (step := int(self._broken)) >= 0:
            raise self._not_finite("The loss or its gradient is not finite", step)

    def _advance(self, images: Tensor, labels: Tensor) -> None:
        """The update itself. It is recorded on a GPU, so all that differs between steps must be in tensors."""
        self.optimizer.zero_grad(set_to_none=True)  # what a recording that failed may have left
        loss = self._forward(images, labels)
        self.scaler.scale(loss).backward()
        if self._by_hand:
            for parameter in self._trained:
                if parameter.grad is not None:
                    parameter.grad = self.stage.world.mean(parameter.grad)
        self.scaler.unscale_(self.optimizer)
        length = nn.utils.get_total_norm([p.grad for p in self._trained if p.grad is not None])
        if self.stage.optim.clip_norm is not None:
            nn.utils.clip_grads_with_norm_(self._trained, self.stage.optim.clip_norm, length)
        finite = loss.isfinite() if self.scaler.is_enabled() else loss.isfinite() & length.isfinite()
        finite = self.stage.world.everywhere(finite)
        self._broken.copy_(torch.where(finite | (self._broken >= 0), self._broken, self._step))
        if self._waits:
            self.check()
            self._count_skipped(length)
        else:
            # torch's own way to leave out an update without asking the host; LARS knows it, too
            self.optimizer.found_inf = (self._broken >= 0).float()  # type: ignore[attr-defined]
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self.average is not None and not self.skipped:
            self.average.update(self.stage.module, self._step)
        self.loss_sum += self._samples * loss.detach()

    def _forward(self, images: Tensor, labels: Tensor) -> Tensor:
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.stage.precision)
        # The last, smaller batch of an epoch is not worth compiling for.
        full = len(labels) * self.stage.world.size == self.stage.batch_size
        loss = self._fast_loss if full else self._loss
        try:
            with torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None):
                return loss(images, labels)
        except NonFiniteError as error:
            raise self._not_finite(str(error).rstrip("."), int(self._step)) from error

    def _count_samples(self, step: int) -> int:
        """How many an update has; the last of an epoch may have fewer."""
        before = self.stage.batch_size * (step % self.stage.steps_per_epoch)
        return min(self.stage.batch_size, self.stage.samples - before)

    def _count_skipped(self, length: Tensor) -> None:
        """float16's scaler skips a few updates until its scale is found; many in a row are no search any more."""
        self.skipped = 0 if length.isfinite() else self.skipped + 1
        if self.skipped > _MOST_SKIPPED:
            raise self._not_finite(f"The gradient was not finite in {self.skipped} steps in a row", int(self._step))

    def _not_finite(self, what: str, step: int) -> NonFiniteError:
        hint = "--precision bf16" if self.scaler.is_enabled() else "a lower --lr or --optim.clip_norm"
        return NonFiniteError(
            f"{what} at step {step + 1} of {self.stage.name} (epoch {step // self.stage.steps_per_epoch + 1}), "
            f"and the weights were left as they were: try {hint}."
        )


class _AsModule(nn.Module):
    """A stage whose forward is its loss, for those who wrap modules."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.module = stage.module
        self._stage = stage

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return self._stage.loss(images, labels)


class Compiled:
    """A stage's loss through torch.compile, which takes its time at the first call and says so.

    Where the compiler gives up, the loss is used as it is.
    """

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor], name: str) -> None:
        self._plain, self._name = loss, name
        self._compiled = torch.compile(loss, dynamic=False)
        self._ready = False

    def __call__(self, images: Tensor, labels: Tensor) -> Tensor:
        if self._ready:
            return self._compiled(images, labels)
        say(f"{self._name}: compiling the step; --no-compile leaves that out")
        start = time.monotonic()
        self._ready = True
        try:
            loss = self._compiled(images, labels)
        except TorchDynamoException as error:
            reason = str(error).strip().splitlines()[0]
            warnings.warn(f"The step cannot be compiled and runs as it is ({reason}).", SelfconWarning, stacklevel=2)
            self._compiled = self._plain
            return self._plain(images, labels)
        say(f"{self._name}: compiled in {time.monotonic() - start:.0f} s")
        return loss
