"""The one loop that trains everything: pretraining, one-stage training, the linear probe.

A stage says what a batch is and what its loss; the trainer makes an update of it; the loop does the rest: metrics,
checkpoints, signals. It goes on exactly where a checkpoint was written, in mid-epoch too.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from selfcon.data.split import Batch
from selfcon.errors import NonFiniteError
from selfcon.progress import say
from selfcon.training import checkpoint as checkpoints
from selfcon.training.checkpoint import Checkpoint
from selfcon.training.folder import RunFolder
from selfcon.training.progress import Forecast, Reporter
from selfcon.training.signals import Stop
from selfcon.training.trainer import Stage, Trainer

_STEPS_BETWEEN_QUESTIONS = 20
_MOST_TIME_SAVING = 0.02  # of the time of training


@dataclass(frozen=True)
class Trained:
    """A (averaged) module at the end of its stage, and what that took in all, interruptions left out."""

    stage: str
    module: nn.Module
    seconds: float
    peak_memory_bytes: int


def train(
    stage: Stage,
    run: RunFolder,
    *,
    device: torch.device,
    stop: Stop,
    log: Callable[[dict[str, Any]], None] | None = None,
    compiled: bool | None = None,
    minutes_between_saves: float = 5.0,
    forecast: Forecast | None = None,
) -> Trained:
    """Train a stage to its end, from its newest checkpoint if there is one.

    `stop` is looked at after every step: when it is set, a checkpoint is written and StoppedError raised. `log` is told
    what is noted of every epoch. `compiled` is whether the step is compiled on a GPU; by default if the stage is long.
    `forecast` is what an estimated time is printed for, after a few steps.
    """
    worker = _Worker(stage, run, device, compiled=compiled)
    worker.restore()
    if worker.epoch >= stage.epochs:
        say(f"{stage.name}: was done before, and is kept")
        return worker.result()
    warmup = worker.trainer.rate.warmup_epochs
    if 2 * warmup > stage.epochs:
        say(
            f"note: {warmup} of {stage.epochs} epochs of {stage.name} are warm-up, so that the learning rate hardly "
            f"rises: set schedule.warmup_epochs"
        )
    if worker.samples_seen:
        say(f"{stage.name}: goes on in epoch {worker.epoch + 1} of {stage.epochs}")
    with (
        Reporter(stage.name, stage.epochs, stage.samples, seen=worker.samples_seen, forecast=forecast) as reporter,
        torch.backends.cudnn.flags(
            enabled=True,
            benchmark=not torch.backends.cudnn.deterministic,  # shapes stay, so it pays to try all algorithms
            deterministic=torch.backends.cudnn.deterministic,
            allow_tf32=torch.backends.cudnn.allow_tf32,
        ),
    ):
        saves = _Saves(minutes_between_saves)
        while worker.epoch < stage.epochs:
            for batch in stage.batches(worker.epoch, worker.batch):
                worker.step(batch)
                reporter.show(worker.epoch, worker.samples_seen, worker.mean_loss)
                stopped, due = worker.ask(stop, due=saves.due)
                if stopped or due:
                    with saves.measured():
                        worker.save()
                if stopped:
                    stop.check()
            line = worker.end_epoch()
            reporter.measured = stage.describe(line) or reporter.measured
            if log is not None:
                log(line)
        worker.save()
        if worker.ask(stop, always=True)[0]:
            stop.check()
    return worker.result()


class _Saves:
    """When the next checkpoint is due: the first one soon, then so that little time goes into them."""

    def __init__(self, minutes: float) -> None:
        self._between = 60 * minutes
        self._next = time.monotonic() + min(60.0, self._between)

    @property
    def due(self) -> bool:
        return time.monotonic() > self._next

    @contextmanager
    def measured(self) -> Iterator[None]:
        begun = time.monotonic()
        yield
        now = time.monotonic()
        self._next = now + max(self._between, (now - begun) / _MOST_TIME_SAVING)


def memory_format(device: torch.device) -> torch.memory_format:
    """How images and weights are laid out: channels last on a GPU, where it is faster.

    Not on a CPU: there PyTorch 2.15 damages its own memory in the backward of convolutions with 8 channels and an odd
    batch (a batch of 29 through ResNet-18 at width 0.125 is enough).
    """
    return torch.channels_last if device.type == "cuda" else torch.contiguous_format


def peak_memory(device: torch.device) -> int:
    """Bytes that this process had in use at most: on the GPU, or else in main memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    lines = status.read_text(encoding="utf-8").splitlines() if status.exists() else []
    if found := [line.split()[1] for line in lines if line.startswith("VmHWM")]:
        return 1024 * int(found[0])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def forget_peak_memory(device: torch.device) -> None:
    """Start to measure anew, so that a run is not charged for what an earlier one of this process took."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


class _Worker:
    """A stage in training: where it is, what was noted, how to keep and find that."""

    def __init__(self, stage: Stage, run: RunFolder, device: torch.device, *, compiled: bool | None) -> None:
        self.stage, self.run, self.device = stage, run, device
        self.trainer = Trainer(stage, device, compiled=compiled)
        self.epoch = self.batch = 0
        self.metrics = [line for line in run.read_metrics() if line["stage"] != stage.name]
        self.started = time.monotonic()
        self.seconds_before, self.peak_before = 0.0, 0

    def result(self) -> Trained:
        self._level()
        self.trainer.close()
        return Trained(self.stage.name, self.trainer.result, self.seconds, self.peak_memory)

    def _level(self) -> None:
        """What is measured and stored must be one network, whichever process looks at its part of the images."""
        self.stage.world.level(self.stage.module)
        if self.trainer.average is not None:
            self.stage.world.level(self.trainer.average.module)

    @property
    def step_number(self) -> int:
        return self.epoch * self.stage.steps_per_epoch + self.batch

    @property
    def samples_seen(self) -> int:
        return self.epoch * self.stage.samples + self.samples_of_epoch

    @property
    def samples_of_epoch(self) -> int:
        return min(self.batch * self.stage.batch_size, self.stage.samples)

    @property
    def seconds(self) -> float:
        return self.seconds_before + time.monotonic() - self.started

    @property
    def peak_memory(self) -> int:
        return max(self.peak_before, peak_memory(self.device))

    def mean_loss(self) -> float:
        """Of this process, for somebody who watches."""
        return float(self.trainer.loss_sum) / max(self.samples_of_epoch, 1)

    def ask(self, stop: Stop, *, due: bool = False, always: bool = False) -> tuple[bool, bool]:
        """Whether any process was told to stop, and whether the main one says that a checkpoint is due.

        All must do both after the same step. Asking makes a GPU wait, so several do not in every step.
        """
        world = self.stage.world
        if world.size > 1 and self.device.type == "cuda" and self.step_number % _STEPS_BETWEEN_QUESTIONS and not always:
            return False, False
        stopped, due = world.anywhere(stop.by is not None, due and world.is_main, device=self.device)
        if stopped:
            stop.by = stop.by or "a signal to another process"
        return stopped, due

    def step(self, batch: Batch) -> None:
        with self._naming_the_checkpoint():
            self.trainer.update(batch.images, batch.labels, self.step_number)
        self.batch += 1

    @contextmanager
    def _naming_the_checkpoint(self) -> Iterator[None]:
        try:
            yield
        except NonFiniteError as error:
            newest = checkpoints.newest(self.run.checkpoints / self.stage.name)
            kept = "There is no checkpoint yet" if newest is None else f"The last checkpoint is {newest}"
            raise NonFiniteError(f"{error} {kept}.") from error

    def end_epoch(self) -> dict[str, Any]:
        """Note the epoch and go on to the next."""
        with self._naming_the_checkpoint():
            self.trainer.check()
        line: dict[str, Any] = {
            "stage": self.stage.name,
            "epoch": self.epoch + 1,
            "loss": float(self.stage.world.mean(self.trainer.loss_sum)) / max(self.samples_of_epoch, 1),
            "lr": self.trainer.rate.at(self.step_number - 1),
        }
        totals = {name: int(self.stage.world.total(count)) for name, count in self.stage.counts.items()}
        line |= {name: total for name, total in totals.items() if total}
        self._level()
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=torch.backends.cudnn.allow_tf32):  # no search for it
            line |= self.stage.measure(self.epoch, self.trainer.result)
        self.stage.keep(self.epoch, self.trainer.result)
        line["seconds"] = self.seconds
        self.metrics.append(line)
        self.run.write_metrics(self.metrics)
        self.epoch, self.batch = self.epoch + 1, 0
        for count in (self.trainer.loss_sum, *self.stage.counts.values()):
            count.zero_()
        return line

    def save(self) -> None:
        trainer = self.trainer
        with self._naming_the_checkpoint():
            trainer.check()
        loss_sum = self.stage.world.mean(trainer.loss_sum)
        counts = {f"counts.{name}": self.stage.world.total(count) for name, count in self.stage.counts.items()}
        random = self._random_states()
        if not self.stage.world.is_main:
            return
        tensors = {f"module.{name}": value for name, value in self.stage.module.state_dict().items()}
        if trainer.average is not None:
            tensors |= {f"average.{name}": value for name, value in trainer.average.module.state_dict().items()}
        tensors |= {
            f"optimizer.{index}.{key}": value
            for index, values in trainer.optimizer.state_dict()["state"].items()
            for key, value in values.items()
            if isinstance(value, Tensor)
        }
        tensors |= random | counts
        tensors["loss_of_images"] = loss_sum
        facts = {
            "stage": self.stage.name,
            "epoch": self.epoch,
            "batch": self.batch,
            "skipped": trainer.skipped,
            "scaler": trainer.scaler.state_dict(),
            "metrics": [line for line in self.metrics if line["stage"] == self.stage.name],
            "seconds": self.seconds,
            "peak_memory_bytes": self.peak_memory,
        }
        name = f"step-{self.step_number:09d}"
        checkpoints.save(self.run.checkpoints / self.stage.name, name, Checkpoint(tensors, facts))
        self.run.begin()

    def restore(self) -> None:
        found = self._find_checkpoint()
        rank = self.stage.world.rank
        if rank:  # what is dropped out of one process's samples is not what is dropped out of another's
            torch.manual_seed(torch.initial_seed() + rank)
        if found is None:
            return
        tensors, facts, trainer = found.tensors, found.facts, self.trainer
        self.stage.module.load_state_dict(_below(tensors, "module."))
        if trainer.average is not None:
            trainer.average.module.load_state_dict(_below(tensors, "average."))
        self._restore_optimizer(_below(tensors, "optimizer."))
        trainer.scaler.load_state_dict(facts["scaler"])
        self._restore_random(tensors)
        if "loss_of_images" in tensors:
            trainer.loss_sum.copy_(tensors["loss_of_images"])
        else:  # earlier versions kept a sum over batches, which are full before the last of an epoch
            trainer.loss_sum.copy_(tensors["loss_sum"] * self.stage.batch_size)
        for name, total in _below(tensors, "counts.").items():
            self.stage.counts[name].copy_(total if self.stage.world.is_main else torch.zeros_like(total))
        self.epoch, self.batch, trainer.skipped = facts["epoch"], facts["batch"], facts["skipped"]
        self.metrics += facts["metrics"]
        self.seconds_before, self.peak_before = facts["seconds"], facts["peak_memory_bytes"]

    def _random_states(self) -> dict[str, Tensor]:
        """Those of all processes: of the first as `random.cpu`, of the others with their number behind it."""
        states = {"random.cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            states["random.cuda"] = torch.cuda.get_rng_state(self.device)
        return {
            name if rank == 0 else f"{name}.{rank}": state
            for name, own in states.items()
            for rank, state in enumerate(self.stage.world.collect(own, self.device))
        }

    def _restore_random(self, tensors: dict[str, Tensor]) -> None:
        """This process's states; where there were fewer processes, those that it began with stay."""
        rank = self.stage.world.rank
        behind = f".{rank}" if rank else ""
        if (state := tensors.get(f"random.cpu{behind}")) is not None:
            torch.set_rng_state(state)
        if self.device.type == "cuda" and (state := tensors.get(f"random.cuda{behind}")) is not None:
            torch.cuda.set_rng_state(state, self.device)

    def _find_checkpoint(self) -> Checkpoint | None:
        """The newest one, which the main process reads for all."""
        folder, world = self.run.checkpoints / self.stage.name, self.stage.world
        if world.size == 1:
            return checkpoints.load_newest(folder)
        found: list[Checkpoint] = []

        def look() -> dict[str, Any] | None:
            newest = checkpoints.load_newest(folder)
            if newest is None:
                return None
            found.append(newest)
            return newest.facts

        facts = world.tell(look)
        if facts is None:
            return None
        return Checkpoint(world.broadcast(found[0].tensors if found else None, self.device), facts)

    def _restore_optimizer(self, tensors: dict[str, Tensor]) -> None:
        state = self.trainer.optimizer.state_dict()
        parameters = [p for group in self.trainer.optimizer.param_groups for p in group["params"]]
        values: dict[int, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            index, _, key = name.partition(".")
            values.setdefault(int(index), {})[key] = _laid_out_like(parameters[int(index)], value)
        self.trainer.optimizer.load_state_dict({"state": values, "param_groups": state["param_groups"]})


def _laid_out_like(parameter: Tensor, value: Tensor) -> Tensor:
    """Fused optimisers want their state laid out in memory as the weights are."""
    if value.shape != parameter.shape:
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


def _below(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
