"""What a machine has, and what given data and settings will cost and bring on it."""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import time
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from selfcon.config import make_settings
from selfcon.data.scan import in_threads
from selfcon.data.source import Images
from selfcon.data.split import Batch
from selfcon.data.streamed import Streamed
from selfcon.memory import count_cores
from selfcon.progress import as_time
from selfcon.training.folder import describe_environment
from selfcon.training.loop import peak_memory
from selfcon.training.trainer import Stage, Trainer
from selfcon.workflows.advice import advise_training
from selfcon.workflows.costs import explaining_shortage
from selfcon.workflows.pipeline import make_pretraining, make_probing
from selfcon.workflows.settings import collect_settings
from selfcon.workflows.task import Task, choose_device, find_size, prepare, read_source

_FEW_POSITIVES = 1.0
_READ_AHEAD = 4  # batches
_ENOUGH = 10.0  # seconds of updates, where they are slow
_MEASURED = 64  # images whose sizes are looked at
_SIZES = (32, 64, 128, 224)
_LARGEST_ON_CPU = 64
_UNEVEN = 4


@dataclass
class Findings:
    """The machine, the data if there were any, and advice."""

    machine: dict[str, Any]
    task: dict[str, Any] = field(default_factory=dict)
    advice: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {"machine": self.machine, "task": self.task, "advice": self.advice}

    def lines(self) -> list[str]:
        out = ["This machine"] + [f"  {key:24s}{value}" for key, value in self.machine.items()]
        if self.task:
            out += ["This task"] + [f"  {key:24s}{value}" for key, value in self.task.items()]
        return out + [f"  advice: {sentence}" for sentence in self.advice]


def examine(*, recipe: str | None = None, device: str = "auto", **given: Any) -> Findings:
    """Look at the machine; with data or a recipe, try a few steps and tell what the whole would take."""
    chosen = choose_device(device)
    findings = Findings(_describe_machine(chosen))
    if recipe is None and not given:
        return findings
    settings = collect_settings(recipe, given)
    source = read_source(settings)
    sides = _measure_sides(source.train)
    advice = []
    if settings.image_size is None and find_size(source) is None:
        settings = make_settings(settings.model_dump(mode="json"), {"image_size": suggest_size(sides, chosen)})
        advice.append(
            f"Images are brought to one size, most are of {_middle(sides)} pixels: --image-size {settings.image_size}."
        )
    with explaining_shortage(settings, chosen):
        task = prepare(settings, chosen)
        findings.task, more = _examine_task(task)
    findings.advice = [*advice, *more, *_advise(task, sides)]
    return findings


def _measure_sides(images: Images) -> list[int]:
    """The shorter sides of some images."""
    if images.shape is not None:
        return [min(images.shape)]
    some = np.linspace(0, len(images) - 1, min(_MEASURED, len(images))).astype(int)
    return [min(image.shape[:2]) for image in in_threads(images.__getitem__, some.tolist(), describe=images.describe)]


def _middle(sides: Sequence[int]) -> int:
    return sorted(sides)[len(sides) // 2]


def suggest_size(sides: Sequence[int], device: torch.device) -> int:
    """A side that networks are used to, not larger than most images are, nor than a CPU has time for."""
    most = min(_middle(sides), _LARGEST_ON_CPU if device.type == "cpu" else max(_SIZES))
    return max((size for size in _SIZES if size <= most), default=_SIZES[0])


def _advise(task: Task, sides: Sequence[int]) -> list[str]:
    """What is likely to make the result better."""
    settings, advice = task.settings, []
    counts = np.bincount(task.train.labels.cpu().numpy())
    uneven = counts.max() / max(1, counts[counts > 0].min())
    if uneven > _UNEVEN and settings.sampler == "plain":
        advice.append(f"The largest class is {uneven:.0f} times the smallest: --sampler balanced.")
    larger = [size for size in _SIZES if task.size < size <= min(_middle(sides), suggest_size(sides, task.device))]
    if larger:
        cost = (larger[0] / task.size) ** 2
        advice.append(
            f"Images are larger than what is seen: --image-size {larger[0]}, for about {cost:.1f} times the time."
        )
    advice += advise_training(task)
    if settings.val_fraction == 0 and task.source.val is None:
        advice.append("Nothing is held out: --val-fraction 0.1 leaves something to calibrate on, and to choose by.")
    return advice


def _describe_machine(device: torch.device) -> dict[str, Any]:
    environment = describe_environment("doctor")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    found = {
        "python": environment["python"],
        "torch": environment["packages"]["torch"],
        "cores": f"{count_cores()} ({platform.machine()})",
        "memory": f"{memory:.0f} GB",
        "device": device.type,
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(device if device.type == "cuda" else 0)
        found["GPU"] = f"{properties.name}, {properties.total_memory / 1e9:.0f} GB"
    return found


def expected_positives(
    labels: np.ndarray[Any, Any], batch_size: int, features_a_sample: int, *, balanced: bool = False
) -> float:
    """Positives that an anchor can expect in a batch: features of its class, and further ones of its own sample."""
    counts = np.bincount(labels)
    samples = min(batch_size, len(labels))
    if balanced:  # classes in turn, two samples of each
        pairs, more = divmod(
            max(1, samples // 2), np.count_nonzero(counts)
        )  # of every class, and how many have one more
        each = np.array([2 * pairs + 2] * more + [2 * pairs] * (np.count_nonzero(counts) - more))
        return float((each * (each - 1)).sum() / each.sum()) * features_a_sample + features_a_sample - 1
    shares = counts / len(labels)
    # A sample of class c is drawn with its share, and so is each of the others.
    return float((shares**2).sum() * (samples - 1) * features_a_sample + features_a_sample - 1)


def _examine_task(task: Task) -> tuple[dict[str, Any], list[str]]:
    settings, method = task.settings, task.method
    exits = len(task.build_network(classifiers=False).names)
    advice = []
    found: dict[str, Any] = {
        "data": f"{task.source.name}: {len(task.train):,} to train with, {len(task.test):,} to test on, "
        f"{len(task.classes)} classes",
        "image size": task.size,
    }
    if method.stages == 2:
        each = method.views * (exits if method.uses_exits else 1)
        positives = (
            expected_positives(
                task.train.labels.cpu().numpy(), settings.batch_size, each, balanced=settings.sampler == "balanced"
            )
            if method.uses_labels
            else float(each - 1)
        )
        of_others = positives - (each - 1)
        found["positives of an anchor"] = f"{positives:.1f}, {of_others:.1f} of them from other images"
        if method.uses_labels and of_others < _FEW_POSITIVES:
            advice.append(
                f"In a batch of {settings.batch_size} most images are alone in their class: a larger batch helps, "
                f"and until then two views (such as selfcon-m) may be better than one."
            )
        elif method.views == 2:
            advice.append("One view is enough here: selfcon costs about half as much.")
    found |= _expect(task)
    return found, advice


def _expect(task: Task) -> dict[str, Any]:
    """Time and memory of all stages, from a few updates of each, and what holds them up."""
    pretraining = make_pretraining(task, lambda epoch, module: None)
    pace = _measure_pace(pretraining, task)
    in_a_step = min(pretraining.batch_size, pretraining.samples)
    found = {
        "an update": f"{1000 * pace.later:.0f} ms, {in_a_step / pace.later:,.0f} images/s",
        "of it, the network": f"{1000 * pace.network:.0f} ms, {in_a_step / pace.network:,.0f} images/s",
        "pretraining" if task.method.stages == 2 else "training": _foresee(pretraining, pace),
        "limited by": pace.limit(task.device),
    }
    if task.method.stages == 2:
        probing = make_probing(task, pretraining.net)
        found["probe"] = _foresee(probing, _measure_pace(probing, task))
    return found | {"memory to expect": f"{peak_memory(task.device) / 1e9:.1f} GB"}


@dataclass(frozen=True)
class Pace:
    """Seconds of an update with its batch in the first epoch and in later ones, and without making the batch."""

    first: float
    later: float
    network: float

    def limit(self, device: torch.device) -> str:
        """What an update waits for."""
        computes = "the GPU" if device.type == "cuda" else "the CPU, which computes"
        if self.later <= 1.15 * self.network:
            at_first = "" if self.first <= 1.15 * self.network else ", and in the first epoch by reading images"
            return computes + at_first
        return "making batches: reading, decoding and augmenting images"


def _foresee(stage: Stage, pace: Pace) -> str:
    steps = stage.epochs * stage.steps_per_epoch
    seconds = stage.steps_per_epoch * pace.first + (steps - stage.steps_per_epoch) * pace.later
    return f"{stage.epochs:,} epochs, {steps:,} updates, about {as_time(seconds)}"


def _measure_pace(stage: Stage, task: Task) -> Pace:
    """Updates as the loop makes them, once they are set up.

    With batches as they come, with such that were seen before (which is what later epochs are, if all images find
    room), and with the same batch again and again.
    """
    with contextlib.closing(Trainer(stage, task.device)) as trainer:
        return _time(trainer, stage, task)


def _time(trainer: Trainer, stage: Stage, task: Task) -> Pace:
    on_gpu = task.device.type == "cuda"
    measured = 30 if on_gpu else 3
    batches = _endlessly(stage)
    batch = next(batches)

    def seconds(work: Iterable[Batch]) -> float:
        done = 0
        start = time.perf_counter()
        for each in work:
            trainer.update(each.images, each.labels, 0)
            done += 1
            if time.perf_counter() - start > _ENOUGH:
                break
        if on_gpu:
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / max(done, 1)

    warm = seconds(itertools.repeat(batch, 1))
    if on_gpu:  # where the first update compiles, and some later one is recorded
        warm = seconds(itertools.repeat(batch, 12))
    if warm > _ENOUGH:  # so slow that one more tells enough
        one = seconds(itertools.islice(batches, 1))
        batches.close()
        return Pace(one, one, min(one, warm))
    alone = seconds(itertools.repeat(batch, measured))
    seconds(itertools.islice(batches, _READ_AHEAD))  # what was made while nobody asked
    first = later = seconds(itertools.islice(batches, measured))
    network = min(alone, first)  # a part is not more than the whole, whatever else the machine did
    batches.close()
    if isinstance(task.train, Streamed) and task.train.finds_room():
        again = _endlessly(stage)
        seconds(itertools.islice(again, 1))
        later = max(network, min(first, seconds(itertools.islice(again, measured))))
        again.close()
    return Pace(first, later, network)


def _endlessly(stage: Stage) -> Generator[Batch]:
    for epoch in itertools.count():
        yield from stage.batches(epoch, 0)
