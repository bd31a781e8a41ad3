"""How fast this machine trains: augmentation, steps, whole epochs and the probe, beside ways of others, in one run.

Images are random: speed does not depend on what they show. B batch size, rates are images a second, not views.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from selfcon.config import Settings, make_settings
from selfcon.data.policies import POLICIES
from selfcon.data.resident import make_resident
from selfcon.data.source import ArrayImages, Source
from selfcon.data.views import IMPLEMENTATIONS, Look, make_views
from selfcon.losses.methods import get_method
from selfcon.losses.parts import with_own_parts
from selfcon.paper.recipes import load_recipe
from selfcon.progress import say
from selfcon.training.trainer import Stage, Trainer
from selfcon.workflows import peers
from selfcon.workflows.pipeline import make_pretraining, make_probing
from selfcon.workflows.task import Task, choose_device

Row = dict[str, Any]
_CLASSES = 100
_KERNELS = {
    "augmentation": ("_augment",),
    "loss_kernels": ("statistics", "gradient", "pack", "arrange"),
    "optimiser": ("multi_tensor", "FusedSgd", "fused_sgd", "FusedAdam"),
    "compiled_elementwise_and_batch_norm": ("triton_",),
    "batch_norm": ("batch_norm", "bn_fw", "bn_bw", "batchnorm"),
    "convolutions_and_matrix_products": ("conv", "gemm", "xmma", "cutlass", "cudnn", "nvjet", "wgrad", "dgrad", "sm90"),
    "copies": ("Memcpy", "Memset", "copy"),
}  # by what the names of kernels contain; of the loss, by what they are
_PLAIN_EPOCHS = 2  # until every shape of batch is recorded


@dataclass(frozen=True)
class Bench:
    """What is measured: a network and some methods on random images, with the paper's settings for CIFAR-100."""

    model: str = "resnet18"
    methods: Sequence[str] = ("selfcon", "supcon", "ce")
    width: float = 1.0
    batch_size: int = 1024
    images: int = 50_000
    image_size: int = 32
    epochs: int = 3
    device: str = "auto"
    compile: bool | None = None
    peers: bool = True
    workers: int = 16

    def rows(self) -> Iterator[Row]:
        """Measure one thing after another."""
        for method in self.methods:
            self._settings(method)  # refuse what has no recipe before anything is measured
        device = choose_device(self.device)
        machine = self._machine(device)
        yield machine
        yield from self._augmentation(device)
        for method in self.methods:
            baseline = None
            if self.peers and get_method(method).stages == 2:
                baseline = self._baseline(method, device)
                yield baseline
            for row in self._training(self._task(method, device), machine):
                if row["what"] == "epoch" and baseline is not None:
                    row["faster_by"] = row["images_per_second"] / baseline["images_per_second"]
                yield row

    def _machine(self, device: torch.device) -> Row:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        side = 8192 if device.type == "cuda" else 512
        a = torch.randn(side, side, device=device, dtype=torch.bfloat16)
        seconds = _seconds(lambda: a @ a, device, 10)
        return {
            "what": "machine",
            "device": name,
            "torch": torch.__version__,
            "matrix_tflops": 2e-12 * side**3 / seconds,
        }

    def _augmentation(self, device: torch.device) -> Iterator[Row]:
        count = min(1024, self.images)
        stored = torch.randint(0, 256, (count, 3, self.image_size, self.image_size), dtype=torch.uint8, device=device)
        rows = torch.arange(count, device=device)
        half = torch.full((3,), 0.5, device=device)
        look = Look(policy=POLICIES["standard"], mean=half, std=half, size=self.image_size, seed=0, epoch=0)
        ways: dict[str, Callable[[], Any]] = {}
        for name in IMPLEMENTATIONS if device.type == "cuda" else ("plain",):
            ways[f"selfcon {name}"] = lambda name=name: make_views(stored, rows, rows, look, name)  # type: ignore[misc]
        if self.peers:
            ways |= peers.augmentations(stored, self.image_size)
        for name, way in ways.items():
            calls = 50 if device.type == "cuda" else 3
            row = {"what": "augmentation", "by": name, "images": count, "ms": 1000 * _seconds(way, device, calls)}
            if device.type == "cuda":
                row["gpu_ms"] = 1000 * _gpu_seconds(way)
            yield row

    def _training(self, task: Task, machine: Row) -> Iterator[Row]:
        name, device = task.method.name, task.device
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        stage = make_pretraining(task, lambda epoch, module: None)
        flops = _flops_an_image(task)
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=torch.backends.cudnn.allow_tf32):
            trainer = Trainer(stage, device, compiled=self.compile)
            first, epoch = self._time_epochs(stage, trainer)
            batch = next(stage.batches(0, 0))
            step = _seconds(lambda: trainer.update(batch.images, batch.labels, 0), device, 20)
            rate = len(batch.labels) / step
            memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
            yield {
                "what": "step",
                "method": name,
                "model": self.model,
                "images_per_second": rate,
                "ms": 1000 * step,
                "share_of_matrix_rate": flops * rate * 1e-12 / machine["matrix_tflops"],
                "peak_memory_bytes": memory,
            }
            if device.type == "cuda":
                yield self._profile(stage, trainer, step)
            yield {
                "what": "epoch",
                "method": name,
                "model": self.model,
                "images_per_second": self.images / epoch,
                "seconds": epoch,
                "seconds_to_first_step": first,
            }
            if task.method.stages == 1:
                return
            probing = make_probing(task, stage.net)
            first, epoch = self._time_epochs(probing, Trainer(probing, device, compiled=self.compile))
        yield {
            "what": "probe",
            "method": name,
            "model": self.model,
            "images_per_second": self.images / epoch,
            "seconds_of_100_epochs": 100 * epoch,
            "seconds_to_first_step": first,
        }

    def _time_epochs(self, stage: Stage, trainer: Trainer) -> tuple[float, float]:
        """Seconds to the end of the first step, and of an epoch once everything is set up: the best of some."""
        start, first, times = time.perf_counter(), 0.0, []
        for epoch in range(_PLAIN_EPOCHS + self.epochs):
            if epoch == 1:  # as many calls as it takes until the smaller last batch is recorded, too
                self._repeat_last(stage, trainer)
            _synchronise(trainer.device)
            begun = time.perf_counter()
            for step, batch in enumerate(stage.batches(epoch, 0)):
                trainer.update(batch.images, batch.labels, step)
                if first == 0:
                    _synchronise(trainer.device)
                    first = time.perf_counter() - start
            trainer.check()
            times.append(time.perf_counter() - begun)
        return first, min(times[_PLAIN_EPOCHS:])

    def _profile(self, stage: Stage, trainer: Trainer, step: float) -> Row:
        """Where the time of a step goes: milliseconds of the GPU by kind of kernel, batch and augmentation included."""

        def one() -> None:
            batch = next(stage.batches(0, 0))
            trainer.update(batch.images, batch.labels, 0)

        by_kind: dict[str, float] = {}
        for name, seconds in _gpu_seconds_by_name(one).items():
            kind = _kind_of(name)
            by_kind[f"{kind}_ms"] = by_kind.get(f"{kind}_ms", 0.0) + 1000 * seconds
        largest_first = dict(sorted(by_kind.items(), key=lambda item: -item[1]))
        return {"what": "profile", "model": self.model, "step_ms": 1000 * step, **largest_first}

    def _repeat_last(self, stage: Stage, trainer: Trainer) -> None:
        last = next(stage.batches(0, stage.steps_per_epoch - 1))
        for _ in range(4):
            trainer.update(last.images, last.labels, 0)

    def _baseline(self, method: str, device: torch.device) -> Row:
        say(f"bench: {method} as the released code trains it")
        settings = self._settings(method)
        net = self._task(method, device).build_network(classifiers=False).to(memory_format=torch.contiguous_format)
        rate, network_rate = peers.train_as_released(
            net,
            self._source.train,
            settings,
            device=device,
            workers=self.workers,
            steps=100 if device.type == "cuda" else 2,
        )
        return {
            "what": "released code's manner",
            "method": method,
            "model": self.model,
            "images_per_second": rate,
            "without_data_images_per_second": network_rate,
            "workers": self.workers,
        }

    def _settings(self, method: str) -> Settings:
        recipe = dict(load_recipe(f"cifar100-{self.model}-{method}").settings)
        given = {"width": self.width, "batch_size": self.batch_size, "image_size": self.image_size}
        precision = {} if torch.cuda.is_available() else {"precision": "fp32"}
        return make_settings(recipe, given, precision)

    @cached_property
    def _source(self) -> Source:
        generator = torch.Generator().manual_seed(0)
        shape = (self.images, self.image_size, self.image_size, 3)
        pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).numpy()
        images = ArrayImages(pixels, (torch.arange(self.images) % _CLASSES).numpy(), "random")
        return Source("random", tuple(str(number) for number in range(_CLASSES)), images, images)

    def _task(self, method: str, device: torch.device) -> Task:
        data = make_resident(self._source.train, device=device)
        return Task(
            settings=self._settings(method),
            method=with_own_parts(get_method(method), device),
            source=self._source,
            train=data,
            val=None,
            test=data,
            size=self.image_size,
            device=device,
        )


def table(rows: Sequence[Row]) -> list[str]:
    """The rows for somebody who reads."""
    lines = []
    for row in rows:
        what = " ".join(str(row[key]) for key in ("what", "by", "model", "method", "device") if row.get(key))
        numbers = ", ".join(
            f"{key.replace('_', ' ')} {_number(value)}"
            for key, value in row.items()
            if isinstance(value, int | float) and value is not None
        )
        lines.append(f"{what:44s}{numbers}")
    return lines


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _flops_an_image(task: Task) -> float:
    """Arithmetic of forward and backward of an image, all its views together."""
    net = task.build_network(classifiers=task.method.stages == 1)
    samples = 4
    images = torch.randn(samples * task.method.views, 3, task.size, task.size, device=task.device)
    labels = torch.arange(samples, device=task.device) % 2
    with FlopCounterMode(display=False) as counter:
        task.method.loss_from_output(net(images), labels).backward()
    return float(counter.get_total_flops() / samples)


def _seconds(work: Callable[[], Any], device: torch.device, calls: int) -> float:
    """Of one call, on average, once it is set up."""
    for _ in range(max(1, calls // 5)):
        work()
    _synchronise(device)
    start = time.perf_counter()
    for _ in range(calls):
        work()
    _synchronise(device)
    return (time.perf_counter() - start) / calls


def _gpu_seconds(work: Callable[[], Any], calls: int = 10) -> float:
    """What the GPU itself was busy with a call, whatever the host needed to launch it."""
    return sum(_gpu_seconds_by_name(work, calls).values())


def _gpu_seconds_by_name(work: Callable[[], Any], calls: int = 10) -> dict[str, float]:
    """The same by the names of kernels."""
    with profile(activities=[ProfilerActivity.CUDA]) as watched:
        for _ in range(calls):
            work()
        torch.cuda.synchronize()
    busy: dict[str, float] = {}
    for event in watched.key_averages():
        busy[event.key] = busy.get(event.key, 0.0) + event.self_device_time_total * 1e-6 / calls
    return busy


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _kind_of(kernel: str) -> str:
    """Which part of a step a kernel belongs to."""
    if kernel in _KERNELS["loss_kernels"]:  # these are common words
        return "loss_kernels"
    others = ((kind, marks) for kind, marks in _KERNELS.items() if kind != "loss_kernels")
    return next((kind for kind, marks in others if any(mark in kernel for mark in marks)), "other")
