"""Claim: at 224 pixels the GPU does not wait for images.

From a folder in ImageFolder's layout, its training files repeated to a number of entries: how fast steps are on a batch
that lies on the device, how fast with images streamed from files (nothing kept in memory, then kept), from a packed
file and from torchvision's loader, in one run; and SelfCon beside SupCon in time and memory. A JSON line each.
    python benchmarks/large_images.py FOLDER [--entries 50000] [--model resnet50] [--exits 2:same] [--batch-size 256]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torchvision.transforms as tvt
from torch import Tensor
from torchvision.datasets.folder import default_loader

import selfcon
from selfcon.config import Settings, make_settings
from selfcon.data.source import FileImages, Images, Source
from selfcon.data.split import Batch
from selfcon.data.streamed import make_streamed
from selfcon.losses.methods import get_method
from selfcon.training.trainer import Trainer
from selfcon.workflows.pipeline import make_pretraining
from selfcon.workflows.task import Task, choose_device

SIZE = 224


def repeat(images: Images, entries: int) -> Images:
    return images.take(np.resize(np.arange(len(images)), entries))


def say(**row: object) -> None:
    print(json.dumps({"benchmark": "large_images", **row}), flush=True)


class TorchvisionLoader(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """What most scripts do: Pillow, and the policy image by image in worker processes."""

    def __init__(self, images: FileImages) -> None:
        self.images = images
        self.transform = tvt.Compose(
            [
                tvt.RandomResizedCrop(SIZE, scale=(0.2, 1.0)),
                tvt.RandomHorizontalFlip(),
                tvt.RandomApply([tvt.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8),
                tvt.RandomGrayscale(0.2),
                tvt.ToTensor(),
            ]
        )

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(default_loader(str(self.images.paths[index]))), int(self.images.labels[index])


def peer_batches(images: FileImages, batch_size: int, device: torch.device) -> Iterator[Batch]:
    loader = torch.utils.data.DataLoader(
        TorchvisionLoader(images),
        batch_size,
        shuffle=True,
        num_workers=os.cpu_count() or 1,
        pin_memory=device.type == "cuda",
        drop_last=True,
    )
    for pixels, labels in loader:
        yield Batch(pixels.to(device, non_blocking=True), labels.to(device, non_blocking=True), labels)


class Bench:
    """Steps of one method, and batches from several places."""

    def __init__(self, options: argparse.Namespace, source: Source, method: str) -> None:
        self.options, self.device = options, choose_device("auto")
        settings = self._settings(method)
        data = make_streamed(source.train, size=SIZE, device=self.device, budget=0)
        self.task = Task(
            settings=settings,
            method=get_method(method),
            source=source,
            train=data,
            val=None,
            test=data,
            size=SIZE,
            device=self.device,
        )
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        self.stage = make_pretraining(self.task, lambda epoch, module: None)
        self.trainer = Trainer(self.stage, self.device, compiled=self.device.type == "cuda")

    def _settings(self, method: str) -> Settings:
        options = self.options
        return make_settings(
            {
                "model": options.model,
                "exits": options.exits,
                "width": options.width,
                "image_size": SIZE,
                "batch_size": options.batch_size,
                "method": method,
                "optim": {"name": "sgd"},
                "watch": {"knn_every": 0},
                "precision": "bf16" if self.device.type == "cuda" else "fp32",
            }
        )

    def rate(self, batches: Iterable[Batch], steps: int, *, train: bool = True) -> float:
        """Images a second of so many steps, or of making the batches alone."""
        count, start = 0, time.perf_counter()
        for batch in itertools.islice(batches, steps):
            if train:
                self.trainer.update(batch.images, batch.labels, 0)
            count += len(batch.labels)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return count / (time.perf_counter() - start)

    def alone(self, steps: int) -> float:
        batch = next(self.stage.batches(0, 0))
        self.rate(itertools.repeat(batch), 12)
        return self.rate(itertools.repeat(batch), steps)

    def memory(self) -> float | None:
        return torch.cuda.max_memory_allocated() / 2**30 if self.device.type == "cuda" else None


def streams(bench: Bench, images: Images, budget: int | None) -> Iterator[Batch]:
    data = make_streamed(images, size=SIZE, device=bench.device, budget=budget)
    stage = make_pretraining(replace(bench.task, train=data), lambda epoch, module: None)
    for epoch in itertools.count():
        yield from (batch for batch in stage.batches(epoch, 0) if len(batch.labels) == bench.options.batch_size)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--entries", type=int, default=50_000)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--exits", default="2:same")
    parser.add_argument("--width", type=float, default=1.0)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument(
        "--methods", default="supcon,selfcon", help="whose steps are measured; streams are for the last"
    )
    parser.add_argument("--places", default="", help="streams to measure, by a part of their names; all without")
    options = parser.parse_args()
    loaded = selfcon.data.load(str(options.folder))
    source = replace(loaded, train=repeat(loaded.train, options.entries))
    assert isinstance(source.train, FileImages)
    say(what="data", entries=len(source.train), cores=os.cpu_count(), torch=torch.__version__)
    for method in options.methods.split(","):
        bench = Bench(options, source, method)
        rate = bench.alone(options.steps)
        say(what="steps alone", method=method, model=options.model, images_per_second=rate, GiB=bench.memory())
    with tempfile.TemporaryDirectory() as folder:
        packed = selfcon.data.load(str(selfcon.data.pack(loaded, Path(folder) / "raw.pack")))
        places = {
            "files, nothing kept": (source.train, 0),
            "files, kept in memory": (source.train, None),
            "packed pixels": (repeat(packed.train, options.entries), 0),
        }
        for place, (images, budget) in places.items():
            if options.places not in place:
                continue
            batches = streams(bench, images, budget)
            bench.rate(batches, 8)
            made = bench.rate(batches, options.steps, train=False)
            trained = bench.rate(batches, options.steps)
            row = {"made_images_per_second": made, "images_per_second": trained, "share_of_steps_alone": trained / rate}
            say(what="stream", place=place, method=method, gpu_waits=max(0.0, 1 - trained / rate), **row)
            batches.close()  # type: ignore[attr-defined]
        theirs = peer_batches(source.train, options.batch_size, bench.device)
        bench.rate(theirs, 2 * (os.cpu_count() or 1) + 8)  # until what its workers made ahead is used up
        trained = bench.rate(theirs, options.steps)
        say(what="torchvision's loader", images_per_second=trained, share_of_steps_alone=trained / rate)
    return 0


if __name__ == "__main__":
    sys.exit(main())
