"""Claim: a change of the code does not change results.

Write what a revision computes to a file, and compare two such files:
    python benchmarks/same_results.py --dump FILE
    python benchmarks/same_results.py --compare A B [--tolerance T]
    python benchmarks/same_results.py --against REV [--tolerance T]
`--against` compares REV (A) with this working tree (B). It takes one to two minutes on two cores.

A dump holds losses with their gradients, random draws, first batches, learning rates, six short training runs, and the
predictions of one of them, opened again from its run directory. Items have fixed names, and every setting of a run is
given, so a new default changes nothing here. Bits depend on the CPU and on the libraries: compare dumps of one machine.
Equal means equal bits. Only predictions of the reopened run may differ, by 1e-6 of an item's largest magnitude
(OOD scores by 1e-4).

`--tolerance T` is for changes that may move the last bits of a loss. Losses, gradients and the first step of each run
may then differ by T times their largest magnitude, and final accuracies by 3 percentage points. The rest of what
was trained is not compared. All other items must still be equal.

The exit code is 0 if all items are equal, 1 if one differs or is missing, and 2 if a dump cannot be made or read.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import itertools
import json
import os
import platform
import random
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

Array = npt.NDArray[Any]
Arrays = Mapping[str, Any]  # arrays, tensors or numbers by name

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = Path("benchmarks", "same_results.py")
LOCK_FILE = "requirements.lock"
FORMAT = 1


class SameResultsError(Exception):
    """A dump cannot be made or read; the message says why."""


# Items and dumps


@dataclass(frozen=True)
class Item:
    """One row of the comparison: named arrays, and the kind that decides how they are compared."""

    name: str
    kind: str
    parts: Mapping[str, Array]


@dataclass(frozen=True)
class Rule:
    """The largest allowed difference of a kind, as a share of the largest magnitude; 0.0 means equal to the bit."""

    limit: float = 0.0
    tolerant: bool = False  # with --tolerance T, T is the limit
    skipped: bool = False  # with --tolerance, the item is not compared
    points: float | None = None  # with --tolerance, the largest absolute difference


RULES = {
    "bit": Rule(),
    "loss": Rule(tolerant=True),
    "run": Rule(skipped=True),
    "first-step": Rule(tolerant=True),
    "accuracy": Rule(points=3.0),
    "reopened": Rule(limit=1e-6, skipped=True),
    "ood": Rule(limit=1e-4, skipped=True),
}
"""How items are compared, by the kind in the index of a dump. Accuracies are percentages."""


class Dump:
    """Items in the order in which they were added."""

    def __init__(self) -> None:
        self.items: dict[str, Item] = {}

    def add(self, name: str, kind: str, parts: Arrays) -> None:
        """Add an item; tensors and numbers become arrays."""
        if name in self.items or kind not in RULES or not parts:
            raise SameResultsError(f"Item {name!r} of kind {kind!r} is empty, added twice or of an unknown kind.")
        self.items[name] = Item(name, kind, {part: as_array(value) for part, value in parts.items()})

    def write(self, path: Path, about: Mapping[str, str]) -> None:
        """Write all items to an .npz file: plain arrays, and an index of them as JSON text."""
        arrays: dict[str, Any] = {}
        rows = []
        for number, item in enumerate(self.items.values()):
            keys = {part: f"{number}.{part}" for part in item.parts}
            arrays |= {keys[part]: value for part, value in item.parts.items()}
            rows.append({"name": item.name, "kind": item.kind, "parts": keys})
        index = json.dumps({"format": FORMAT, "about": dict(about), "items": rows})
        staged = path.with_name(f".{path.name}.part")
        with staged.open("wb") as file:
            np.savez(file, index=np.array(index), **arrays)
        staged.replace(path)


def as_array(value: Any) -> Array:
    """Return an array of numbers or text; NumPy would need pickle for anything else."""
    array = np.ascontiguousarray(value.detach().cpu().numpy() if hasattr(value, "detach") else value)
    if array.dtype.kind not in "biufU":
        raise SameResultsError(f"A dump holds numbers and text, not arrays of {array.dtype}.")
    return array


def read_dump(path: Path) -> tuple[dict[str, Item], dict[str, str]]:
    """Return the items of a dump by name, and the versions that made it."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            index = json.loads(str(arrays["index"]))
            if index["format"] != FORMAT:
                raise SameResultsError(f"{path} has format {index['format']}, but this script reads {FORMAT}.")
            items = {}
            for row in index["items"]:
                parts = {part: arrays[key] for part, key in row["parts"].items()}
                items[row["name"]] = Item(row["name"], row["kind"], parts)
    except (AttributeError, EOFError, KeyError, OSError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise SameResultsError(f"{path} is not a dump ({type(error).__name__}: {error}).") from error
    if not items:
        raise SameResultsError(f"{path} has no items.")
    return items, index["about"]


# Comparison: nothing from here to the next headline needs selfcon or torch


@dataclass(frozen=True)
class Row:
    """The verdict on one item."""

    name: str
    status: str  # equal, differs, missing or not compared
    text: str


def compare_items(a: Mapping[str, Item], b: Mapping[str, Item], tolerance: float | None = None) -> list[Row]:
    """Return a row for every item of A, then for those that only B has."""
    rows = []
    for name in {**a, **b}:
        if name not in b or name not in a:
            rows.append(Row(name, "missing", f"missing in {'B' if name in a else 'A'}"))
        else:
            rows.append(_compare_item(a[name], b[name], tolerance))
    return rows


def _compare_item(a: Item, b: Item, tolerance: float | None) -> Row:
    if a.kind != b.kind or a.kind not in RULES:
        return Row(a.name, "differs", f"differs: its kind is {a.kind} in A and {b.kind} in B")
    rule = RULES[a.kind]
    if tolerance is not None and rule.skipped:
        return Row(a.name, "not compared", "not compared")
    found = []
    for part in {**a.parts, **b.parts}:
        if part not in a.parts or part not in b.parts:
            found.append(f"{part} is missing in {'B' if part in a.parts else 'A'}")
        elif text := _compare_arrays(a.parts[part], b.parts[part], rule, tolerance):
            found.append(f"{part} {text}")
    if not found:
        return Row(a.name, "equal", "equal")
    more = f"; and {len(found) - 2} more" if len(found) > 2 else ""
    return Row(a.name, "differs", f"differs: {'; '.join(found[:2])}{more}")


def _compare_arrays(a: Array, b: Array, rule: Rule, tolerance: float | None) -> str:
    """Return what differs, or nothing."""
    if a.dtype.kind == b.dtype.kind == "U":  # lists of hashes, whose order means nothing
        common = sum((Counter(a.ravel().tolist()) & Counter(b.ravel().tolist())).values())
        count = max(a.size, b.size)
        return "" if common == count else f"has {count - common} of {count} entries that differ"
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"is {a.dtype} {list(a.shape)} in A and {b.dtype} {list(b.shape)} in B"
    if a.tobytes() == b.tobytes():
        return ""
    if a.dtype == np.bool_:
        return f"has {int((a != b).sum())} of {a.size} values that differ"
    difference, largest = _measure(a, b)
    limit = rule.limit * largest
    if tolerance is not None:
        limit = max(limit, tolerance * largest if rule.tolerant else 0.0, rule.points or 0.0)
    if limit and difference <= limit:
        return ""
    if not difference:
        return "has zeros of another sign or NaN of other bits"
    return f"max difference {difference:.1e} ({difference / largest:.1e} of the largest magnitude)"


def _measure(a: Array, b: Array) -> tuple[float, float]:
    """Return the largest difference and the largest magnitude; NaN and Inf must be at the same positions."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    finite = np.isfinite(x) & np.isfinite(y)
    largest = max((float(np.abs(each[finite]).max(initial=0.0)) for each in (x, y)), default=0.0)
    if not np.array_equal(x[~finite], y[~finite], equal_nan=True):
        return float("inf"), largest or 1.0
    return float(np.abs(x[finite] - y[finite]).max(initial=0.0)), largest or 1.0


def report(rows: Sequence[Row]) -> int:
    """Print a line per item and the counts; return the exit code."""
    width = max(len(row.name) for row in rows) + 2
    for row in rows:
        print(f"{row.name:{width}s}{row.text}")
    counts = Counter(row.status for row in rows)
    skipped = f", {counts['not compared']} not compared" if counts["not compared"] else ""
    print(
        f"{len(rows)} items: {counts['equal']} equal, {counts['differs']} different, {counts['missing']} missing"
        f"{skipped}",
        flush=True,
    )
    return 1 if counts["differs"] or counts["missing"] or not counts["equal"] else 0


def compare(a: Path, b: Path, tolerance: float | None) -> int:
    """Compare two dumps, print the result and return the exit code."""
    (before, versions_before), (after, versions_after) = read_dump(a), read_dump(b)
    for name in {**versions_before, **versions_after}:
        ours, theirs = versions_before.get(name), versions_after.get(name)
        if ours != theirs:
            print(f"note: {name} is {ours} in A and {theirs} in B")
    return report(compare_items(before, after, tolerance))


# What is computed: settings of runs, methods, schedules

METHODS = {
    # name: (views, uses exits, trains in one stage)
    "supcon": (2, False, False),
    "supcon-s": (1, False, False),
    "selfcon": (1, True, False),
    "selfcon-m": (2, True, False),
    "selfcon-star": (1, True, False),
    "selfcon-m-star": (2, True, False),
    "simclr": (2, False, False),
    "selfcon-su": (1, True, False),
    "selfcon-mu": (2, True, False),
    "selfcon-mu-released": (2, True, False),
    "selfcon-su-star": (1, True, False),
    "selfcon-mu-star": (2, True, False),
    "ce": (1, False, True),
    "ce-sub": (1, True, True),
    "sd": (1, True, True),
    "selfcon-1stage": (1, True, True),
}

POLICIES = ("standard", "simple", "randaugment", "randaugment-simple", "randaugment-standard", "none")

SETTINGS: dict[str, Any] = {
    "data": "digits",
    "data_root": "data",
    "class_list": None,
    "bad_images": "error",
    "val_fraction": 0.0,
    "image_size": 16,
    "stream": False,
    "limit_batches": None,
    "per_class": None,
    "imbalance": None,
    "sampler": "plain",
    "model": "resnet18",
    "width": 0.125,
    "stem": "small",
    "exits": "2:fc",
    "norm": "batch",
    "projection_dim": 32,
    "method": "selfcon",
    "epochs": 2,
    "batch_size": 128,
    "micro_batch": None,
    "cutmix": 0.0,
    "lr": 0.003,
    "seed": 0,
    "precision": "fp32",
    "sync_bn": False,
    "ema": None,
    "keep_epochs": [],
    "optim.name": "adamw",
    "optim.momentum": 0.9,
    "optim.nesterov": False,
    "optim.weight_decay": 0.05,
    "optim.beta2": 0.999,
    "optim.clip_norm": None,
    "schedule.kind": "smooth-cosine",
    "schedule.warmup_epochs": 0,
    "schedule.warmup_from": 0.01,
    "schedule.floor": 0.001,
    "schedule.milestones": [0.6, 0.8],
    "schedule.gamma": 0.1,
    "loss.temperature": 0.1,
    "loss.learn_temperature": False,
    "loss.alpha": 1.0,
    "loss.base_temperature": None,
    "loss.implementation": "dense",
    "loss.ring": False,
    "augment.policy": "simple",
    "augment.scale": [0.5, 1.0],
    "augment.flip": True,
    "augment.strength": 1.0,
    "probe.epochs": 2,
    "probe.batch_size": 128,
    "probe.lr": 0.3,
    "probe.momentum": 0.9,
    "probe.weight_decay": 0.0,
    "probe.augment.policy": "simple",
    "probe.augment.scale": [0.5, 1.0],
    "probe.augment.flip": True,
    "probe.augment.strength": 1.0,
    "probe.schedule.kind": "step",
    "probe.schedule.warmup_epochs": 0,
    "probe.schedule.warmup_from": 0.01,
    "probe.schedule.floor": 0.001,
    "probe.schedule.milestones": [0.6, 0.8],
    "probe.schedule.gamma": 0.1,
    "watch.knn_every": 1,
    "watch.knn_samples": 300,
    "watch.test_in_probe": False,
}
"""Every setting of a run, so that no default decides a result. Names are those of 0.1.0; adapters translate them."""

SETTINGS_SINCE_010: frozenset[str] = frozenset()
"""Names in SETTINGS or RUNS that 0.1.0 did not have. They are left out for a revision that does not know them."""

RUNS: dict[str, dict[str, Any]] = {
    "selfcon": {"method": "selfcon", "epochs": 5, "ema": 0.9, "schedule.warmup_epochs": 1},
    "supcon": {
        "method": "supcon",
        "lr": 0.05,
        "optim.name": "sgd",
        "optim.nesterov": True,
        "optim.weight_decay": 0.0001,
        "optim.clip_norm": 5.0,
        "schedule.kind": "cosine",
        "loss.base_temperature": 0.07,
        "augment.policy": "standard",
        "augment.scale": [0.2, 1.0],
    },
    "simclr": {
        "method": "simclr",
        "per_class": 64,
        "norm": "group",
        "micro_batch": 40,
        "optim.name": "lars",
        "lr": 0.5,
        "schedule.kind": "step",
        "loss.implementation": "tiled",
    },
    "selfcon-m-star": {
        "method": "selfcon-m-star",
        "exits": "1:fc,3:small",
        "per_class": 64,
        "sampler": "balanced",
        "loss.learn_temperature": True,
        "loss.alpha": 0.5,
        "augment.policy": "randaugment-simple",
    },
    "ce": {
        "method": "ce",
        "imbalance": 4.0,
        "cutmix": 0.5,
        "optim.name": "sgd",
        "optim.weight_decay": 0.0005,
        "lr": 0.05,
        "schedule.kind": "constant",
    },
    "selfcon-1stage": {
        "method": "selfcon-1stage",
        "exits": "1:fc,2:same",
        "epochs": 3,
        "batch_size": 64,
        "val_fraction": 0.2,
        "seed": 1,
    },
}
"""Short training runs: what each changes in SETTINGS. Together they use most features of the trainer."""

INTERRUPTED = "selfcon"
"""The run that is stopped by SIGTERM after two epochs, and resumed."""

REOPENED = "selfcon-1stage"
"""The run that is calibrated, exported and opened again."""

CALIBRATION = {"within": 3.0, "most_wrong": 10.0, "batch_size": 64, "seed": 0, "outside": "cifar.npz"}
"""`within` asks for early-exit thresholds, whether they pay for this model or not."""

SCHEDULES: dict[str, dict[str, Any]] = {
    "smooth-cosine": {"kind": "smooth-cosine", "warmup_epochs": 0},
    "smooth-cosine-warm-up": {"kind": "smooth-cosine", "warmup_epochs": 3, "floor": 0.01},
    "cosine": {"kind": "cosine", "warmup_epochs": 0},
    "cosine-warm-up": {"kind": "cosine", "warmup_epochs": 4, "warmup_from": 0.02},
    "cosine-batch-1023": {"kind": "cosine", "warmup_epochs": None, "batch_size": 1023},
    "cosine-batch-1024": {"kind": "cosine", "warmup_epochs": None, "batch_size": 1024, "epochs": 60},
    "smooth-cosine-1980-steps": {"kind": "smooth-cosine", "warmup_epochs": None, "steps_per_epoch": 99},
    "smooth-cosine-2000-steps": {"kind": "smooth-cosine", "warmup_epochs": None, "steps_per_epoch": 100},
    "step": {"kind": "step", "warmup_epochs": 0, "milestones": [0.37, 0.7, 0.9], "gamma": 0.2},
    "step-warm-up": {"kind": "step", "warmup_epochs": 2, "warmup_from": 5.0},
    "constant": {"kind": "constant", "warmup_epochs": 2},
}
SCHEDULE_DEFAULTS = {"warmup_from": 0.01, "floor": 0.001, "milestones": [0.6, 0.8], "gamma": 0.1}
SCHEDULE_LENGTH = {"epochs": 20, "steps_per_epoch": 7, "batch_size": 256}


# Adapters: the only part that knows where things are in selfcon


class Adapter(ABC):
    """What this script needs of a revision of selfcon. A change of the layout adds a class below, in ADAPTERS.

    Names of methods, policies, exits and settings are those of 0.1.0: a class for a later layout translates them.
    """

    metrics_file = "metrics.jsonl"
    stopped_code = 75  # the exit code of a run that was stopped and can be resumed

    @staticmethod
    @abstractmethod
    def fits() -> bool:
        """Return whether the selfcon on the path has this layout."""

    @abstractmethod
    def loss(self, method: str, features: Tensor, logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
        """Return a method's loss of features [B, V, E, D] and logits [E, B, C]."""

    @abstractmethod
    def draws(self, digits: int) -> Iterator[tuple[str, Arrays]]:
        """Yield random draws by name; `digits` is how many samples to draw for."""

    @abstractmethod
    def augmentation(self, policy: str, samples: Tensor, **options: Any) -> Arrays:
        """Return the random parameters of a policy for samples, by name."""

    @abstractmethod
    def batches(self, data: str, policy: str, *, count: int, **options: Any) -> Arrays:
        """Return the first batches of a dataset, its statistics and its first test images."""

    @abstractmethod
    def learning_rates(self, schedule: Mapping[str, Any], **options: Any) -> list[float]:
        """Return the learning rate of every step."""

    @abstractmethod
    def fit_command(self, settings: Mapping[str, Any], out: str) -> list[str]:
        """Return the arguments of a training run. Settings that this revision does not know are dropped here."""

    @abstractmethod
    def calibrate_command(self, out: str, options: Mapping[str, Any]) -> list[str]:
        """Return the arguments that calibrate a run."""

    @abstractmethod
    def export_command(self, out: str) -> list[str]:
        """Return the arguments that export a run to ONNX."""

    @abstractmethod
    def read_run(self, out: Path) -> tuple[Arrays, Arrays]:
        """Return metrics by stage, without timings, and final accuracies by split, exit and metric."""

    @abstractmethod
    def weights_file(self, out: Path) -> Path:
        """Return the path of a run's weights, a safetensors file."""

    @abstractmethod
    def onnx_file(self, out: Path) -> Path:
        """Return the path of a run's ONNX model. Its outputs are `logits_NAME` by exit, and `probabilities`."""

    @abstractmethod
    def reopen(self, out: Path, outside: Array) -> Iterator[tuple[str, str, Arrays]]:
        """Open a calibrated run and yield the name, the kind and the parts of each item.

        `outside` are out-of-distribution images [N, H, W, 3].
        """

    @abstractmethod
    def test_images(self, out: Path) -> Array:
        """Return a run's test images, uint8 [N, 3, S, S]."""


class Adapter010(Adapter):
    """Version 0.1.0. Frozen: it serves revisions from before this script."""

    @staticmethod
    def fits() -> bool:
        return importlib.util.find_spec("selfcon.workflows") is not None

    def loss(self, method: str, features: Tensor, logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
        chosen = import_module("selfcon.losses.methods").get_method(method)
        if chosen.one_stage is None:
            return chosen.loss(features, labels, **options)  # type: ignore[no-any-return]
        names = ["backbone", *(f"exit{number}" for number in range(1, len(logits)))]
        output = SimpleNamespace(
            names=names, logits=dict(zip(names, logits, strict=True)), projections_bved=lambda _views=1: features
        )
        return chosen.loss_from_output(output, labels, **options)  # type: ignore[no-any-return]

    def draws(self, digits: int) -> Iterator[tuple[str, Arrays]]:
        import torch

        numbers = import_module("selfcon.data.random")
        samples = torch.arange(digits)
        counter = tuple(torch.arange(64) * factor + factor for factor in (1, 7, 11, 13))
        for seed in (0, 7, (5 << 32) + 3):
            yield f"philox/seed-{seed}", {"words": torch.stack(numbers.philox(counter, seed))}
        words = numbers.draw_words(samples, seed=3, epoch=2, stream=2, words=6)
        yield "words", {"words": words}
        yield "uniform", {"values": numbers.to_uniform(words)}
        yield "integer", {"values": numbers.to_integer(words, 24)}
        labels = samples % 7 % 5
        draw_order = import_module("selfcon.data.orders").draw_order
        for balanced in (False, True):
            orders = [draw_order(labels, seed=1, epoch=epoch, balanced=balanced, device="cpu") for epoch in (0, 1, 5)]
            yield f"order/{'balanced' if balanced else 'plain'}", {"samples": torch.stack(orders)}
        hold_out = import_module("selfcon.data.splits").hold_out
        kept, held = hold_out(labels.numpy(), digits // 5, 4)
        yield "hold-out", {"kept": kept, "held": held}
        source = import_module("selfcon.data.sources").load("digits")
        thin = import_module("selfcon.data.thinning").thin
        for name, wanted in {"per-class": (12, None), "imbalance": (None, 6.0)}.items():
            train = thin(source, per_class=wanted[0], imbalance=wanted[1], seed=2).train
            yield f"subsample/{name}", {"pixels": train.as_array(), "labels": train.labels}
        cut_mix = import_module("selfcon.data.mixing").cut_mix
        images = torch.arange(2 * 8 * 3 * 12 * 10, dtype=torch.float32).view(16, 3, 12, 10)
        for step in range(4):
            mixed, others, share = cut_mix(
                images, torch.arange(8), torch.tensor(step), probability=0.7, seed=5, views=2
            )
            yield f"cutmix/step-{step}", {"images": mixed, "labels": others, "share": share}

    def augmentation(self, policy: str, samples: Tensor, **options: Any) -> Arrays:
        chosen = import_module("selfcon.data.policies").get_policy(policy)
        draws = import_module("selfcon.data.draws").draw(chosen, samples, **options)
        names = ("top", "left", "height", "width", "flip", "jitter", "order", "factors", "grey", "choices")
        return {name: getattr(draws, name) for name in names}

    def batches(self, data: str, policy: str, *, count: int, **options: Any) -> Arrays:
        source = import_module("selfcon.data.sources").load(data)
        make_resident = import_module("selfcon.data.resident").make_resident
        train = make_resident(source.train)
        test = make_resident(source.test, like=train)
        chosen = import_module("selfcon.data.policies").get_policy(policy)
        found = {"mean": train.mean, "std": train.std}
        for number, batch in enumerate(itertools.islice(train.batches(chosen, **options), count)):
            found |= {
                f"{number}.{name}": value
                for name, value in (("images", batch.images), ("labels", batch.labels), ("samples", batch.samples))
            }
        plain = next(test.plain_batches(batch_size=options["batch_size"]))
        return found | {"test.images": plain.images, "test.labels": plain.labels}

    def learning_rates(self, schedule: Mapping[str, Any], **options: Any) -> list[float]:
        settings = import_module("selfcon.config").Schedule(**schedule)
        rate = import_module("selfcon.training.schedule").plan(0.3, settings, **options)
        return [rate.at(step) for step in range(rate.epochs * rate.steps_per_epoch)]

    def fit_command(self, settings: Mapping[str, Any], out: str) -> list[str]:
        known = import_module("selfcon.config").NAMES
        words = ["fit", "--out", out, "--device", "cpu"]
        for name, value in settings.items():
            if name in SETTINGS_SINCE_010 and name not in known:
                continue
            words += [f"--{name}" if "." in name else f"--{name.replace('_', '-')}", json.dumps(value).strip('"')]
        return words

    def calibrate_command(self, out: str, options: Mapping[str, Any]) -> list[str]:
        words = ["calibrate", out, "--device", "cpu", "--criterion", "confidence", "--strangers", "neighbours"]
        for name, value in options.items():
            words += [f"--{name.replace('_', '-')}", str(value)]
        return words

    def export_command(self, out: str) -> list[str]:
        return ["export", out, "--formats", "onnx"]

    def read_run(self, out: Path) -> tuple[Arrays, Arrays]:
        metrics: dict[str, list[list[float]]] = {}
        for line in map(json.loads, (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()):
            for name in ("loss", "lr", "knn", "temperature"):
                if name in line:
                    metrics.setdefault(f"{line['stage']}.{name}", []).append([line["epoch"], line[name]])
        results = json.loads((out / "results.json").read_text(encoding="utf-8"))
        accuracy = {
            f"{split}.{exit_}.{metric}": value
            for split, key in (("test", "accuracy"), ("validation", "held_out_accuracy"))
            for exit_, values in results.get(key, {}).items()
            for metric, value in values.items()
        }
        return metrics, accuracy

    def weights_file(self, out: Path) -> Path:
        return out / "model.safetensors"

    def onnx_file(self, out: Path) -> Path:
        return out / "export" / "model.onnx"

    def reopen(self, out: Path, outside: Array) -> Iterator[tuple[str, str, Arrays]]:
        import torch

        run = import_module("selfcon.workflows.trained").open_run(out, "cpu")
        accuracy = import_module("selfcon.evaluation.accuracy")
        train, test = run.split("train"), run.split("test")
        logits = accuracy.predict(run.net, test, size=run.size).logits
        features, known = (accuracy.embed(run.net, split, size=run.size) for split in (test, train))
        yield from ((f"logits/{name}", "reopened", {"logits": value}) for name, value in logits.items())
        yield from ((f"features/{name}", "reopened", {"features": value}) for name, value in features.items())
        knn = import_module("selfcon.evaluation.knn")
        scorer = import_module("selfcon.evaluation.outliers").KINDS["mahalanobis"]
        for name in run.net.names:
            scores = knn.classify(features[name], known[name], train.labels, classes=10, k=20, temperature=0.07)
            percent = knn.accuracy(features[name], test.labels, known[name], train.labels, k=20, temperature=0.07)
            yield f"knn/{name}", "reopened", {"scores": scores, "accuracy": percent}
            fitted = scorer.fit(known[name], train.labels)
            yield f"ood/mahalanobis/{name}", "ood", {"scores": fitted.score(features[name])}
        model = import_module("selfcon.workflows.inference").load(out, "cpu")
        images = list(test.pictures(torch.arange(len(test))).permute(0, 2, 3, 1).numpy())
        for exit_ in (*run.net.names, "ensemble", "early"):
            predictions = model.predict(images, exit=exit_, top=len(model.classes))
            probabilities = [
                [dict(zip(each.classes, each.probabilities, strict=True))[name] for name in model.classes]
                for each in predictions
            ]
            steps = [each.exit.count("+") if each.exit != "ensemble" else len(model.exits) for each in predictions]
            yield f"probabilities/{exit_}", "reopened", {"probabilities": probabilities, "exit": steps}
            yield f"abstentions/{exit_}", "reopened", {"unknown": [each.unknown for each in predictions]}
            strange = model.predict(list(outside), exit=exit_)
            scores = {"test": [each.strangeness for each in predictions]}
            yield f"ood/{exit_}", "ood", scores | {"outside": [each.strangeness for each in strange]}
        trust = model.trust
        yield "temperatures", "reopened", dict(trust.temperatures)
        yield "early-exit-thresholds", "reopened", {"thresholds": trust.rule.thresholds, "costs": trust.costs}
        curve = {
            name: [getattr(point, name) for point in trust.curve]
            for name in ("thresholds", "accuracy", "cost", "shares")
        }
        yield "early-exit-curve", "reopened", curve
        yield "abstention-thresholds", "reopened", dict(trust.silence)
        yield "ood-thresholds", "ood", dict(trust.strange_above)

    def test_images(self, out: Path) -> Array:
        import torch

        test = import_module("selfcon.workflows.trained").open_run(out, "cpu").split("test")
        return test.pictures(torch.arange(len(test))).numpy()  # type: ignore[no-any-return]


ADAPTERS: list[type[Adapter]] = [Adapter010]
"""Newest first: the first that fits is taken."""


def choose_adapter() -> Adapter:
    """Return the adapter of the selfcon on the path."""
    for kind in ADAPTERS:
        if kind.fits():
            return kind()
    raise SameResultsError("No adapter fits this layout of selfcon: add one to ADAPTERS.")


# The dump


def make_dump(adapter: Adapter, directory: Path, label: str) -> Dump:
    """Compute all items in a directory that becomes the current one; print times, each line with a label."""
    dump = Dump()
    with contextlib.chdir(directory):
        np.savez("cifar.npz", **make_images())
        for step in (dump_losses, dump_draws, dump_batches, dump_schedules, dump_runs, dump_reopened):
            begun = time.monotonic()
            step(dump, adapter)
            name = step.__name__.removeprefix("dump_")
            print(f"{label}: {name} in {time.monotonic() - begun:.1f} s", file=sys.stderr, flush=True)
    return dump


def make_images() -> dict[str, Any]:
    """Return images of CIFAR's shape: noise of the standard library over a gradient that depends on the class."""
    arrays: dict[str, Any] = {}
    for split, count in (("train", 160), ("test", 60)):
        labels = np.arange(count) * 7 % 10
        noise = np.frombuffer(random.Random(count).randbytes(count * 32 * 32 * 3), np.uint8).reshape(count, 32, 32, 3)
        ramp = np.arange(32)[:, None, None] * (labels[:, None, None, None] % 5) + np.arange(32)[:, None] * 2
        arrays |= {f"x_{split}": (noise // 3 + ramp).astype(np.uint8), f"y_{split}": labels}
    return arrays


def make_values(shape: Sequence[int], seed: int) -> Array:
    """Return values in [-1, 1) that no version of a library changes."""
    draw = random.Random(seed).random
    return np.array([2 * draw() - 1 for _ in range(int(np.prod(shape)))]).reshape(shape)


def dump_losses(dump: Dump, adapter: Adapter) -> None:
    """Add value and gradient of every method, dense and tiled, in float32 and float64."""
    samples, dim, classes, exits = 26, 16, 7, 3
    labels = np.append(np.arange(samples - 1) * 5 % 6, 6)  # the last sample has no positive of another image
    for (name, (views, uses_exits, one_stage)), dtype in itertools.product(METHODS.items(), ("float32", "float64")):
        count = exits if uses_exits else 1
        features, logits = make_values((samples, views, count, dim), 1), make_values((count, samples, classes), 2)
        for kind in ("dense", "tiled") if not one_stage or name == "selfcon-1stage" else ("dense",):
            inputs = {"features": features, "logits": 4 * logits, "labels": labels}
            parts = differentiate(adapter, name, **inputs, dtype=dtype, implementation=kind)
            dump.add(f"loss/{name}/{kind}/{dtype}", "loss", parts)
    # More features than a tile has rows.
    samples = 350
    for name in ("selfcon", "supcon-s", "selfcon-m-star"):
        views, uses_exits, _ = METHODS[name]
        count = 2100 // samples // views if uses_exits else 1
        features = make_values((samples if uses_exits else 2100, views, count, 4), 3)
        labels = np.arange(len(features)) * 11 % 13
        inputs = {"features": features, "logits": np.zeros((count, len(features), 1)), "labels": labels}
        parts = differentiate(adapter, name, **inputs, dtype="float32", implementation="tiled")
        dump.add(f"loss/{name}/tiled/float32/2100-features", "loss", parts)


def differentiate(
    adapter: Adapter, method: str, *, features: Array, logits: Array, labels: Array, dtype: str, implementation: str
) -> Arrays:
    """Return a loss and its gradients by features, temperature and logits, where it depends on them."""
    import torch

    inputs = {
        "features": torch.tensor(features, dtype=getattr(torch, dtype), requires_grad=True),
        "logits": torch.tensor(logits, dtype=getattr(torch, dtype), requires_grad=True),
        "temperature": torch.tensor(0.13, dtype=getattr(torch, dtype), requires_grad=True),
    }
    value = adapter.loss(
        method,
        inputs["features"],
        inputs["logits"],
        torch.tensor(labels),
        temperature=inputs["temperature"],
        alpha=0.7,
        base_temperature=0.07,
        implementation=implementation,
    )
    value.backward()
    gradients = {f"gradient.{name}": each.grad for name, each in inputs.items() if each.grad is not None}
    return {"value": value, **gradients}


def dump_draws(dump: Dump, adapter: Adapter) -> None:
    """Add random numbers and the random parameters of every augmentation policy."""
    import torch

    for name, parts in adapter.draws(500):
        dump.add(f"draws/{name}", "bit", parts)
    samples = torch.arange(300)
    for policy in POLICIES:
        parts = adapter.augmentation(policy, samples, height=32, width=32, seed=11, epoch=3, view=1)
        dump.add(f"draws/augmentation/{policy}", "bit", parts)
    sizes = {"height": 20 + samples % 50, "width": 20 + samples * 3 % 90}
    parts = adapter.augmentation("standard", samples, seed=0, epoch=0, **sizes)
    dump.add("draws/augmentation/standard/other-sizes", "bit", parts)


def dump_batches(dump: Dump, adapter: Adapter) -> None:
    """Add the first batches of digits and of images of CIFAR's shape."""
    cases: dict[str, dict[str, Any]] = {
        "digits/simple": {"data": "digits", "policy": "simple", "views": 1, "balanced": False},
        "digits/standard-two-views": {"data": "digits", "policy": "standard", "views": 2, "balanced": True},
    }
    for policy in POLICIES:
        cases[f"cifar/{policy}"] = {"data": "cifar.npz", "policy": policy, "views": 2, "balanced": False}
    for name, case in cases.items():
        parts = adapter.batches(**case, count=2, batch_size=48, seed=3, epoch=1)
        dump.add(f"batches/{name}", "bit", parts)


def dump_schedules(dump: Dump, adapter: Adapter) -> None:
    """Add the learning rate of every step of every schedule."""
    for item, case in SCHEDULES.items():
        length = {option: case.get(option, value) for option, value in SCHEDULE_LENGTH.items()}
        schedule = {**SCHEDULE_DEFAULTS, **{name: value for name, value in case.items() if name not in length}}
        rates = adapter.learning_rates(schedule, **length, slow_start=True)
        dump.add(f"schedule/{item}", "bit", {"rates": rates})


def dump_runs(dump: Dump, adapter: Adapter) -> None:
    """Train all runs through the command line, and add their first loss, metrics, accuracies and weights."""
    for name, changes in RUNS.items():
        command, out = adapter.fit_command({**SETTINGS, **changes}, f"run-{name}"), Path(f"run-{name}")
        first = interrupt(adapter, command, out) if name == INTERRUPTED else None
        loss = run_command(command) if first is None else (run_command(command), first)[1]
        dump.add(f"run/{name}/first-step", "first-step", {"loss": loss})
        metrics, accuracy = adapter.read_run(out)
        dump.add(f"run/{name}/metrics", "run", metrics)
        dump.add(f"run/{name}/accuracy", "accuracy", accuracy)
        dump.add(f"run/{name}/weights", "run", {"tensors": hash_weights(adapter.weights_file(out))})


def interrupt(adapter: Adapter, command: Sequence[str], out: Path) -> float:
    """Start a run in a process of its own and stop it by SIGTERM after two epochs; return its first loss."""
    log = Path("interrupted.log")
    for _ in range(3):
        with log.open("wb") as file:
            words = [sys.executable, str(Path(__file__).resolve()), "--command", "first-loss.json", *command]
            process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + 300
        try:
            while process.poll() is None and count_lines(out / adapter.metrics_file) < 2:
                if time.monotonic() > deadline:
                    raise SameResultsError(f"The run that was to be stopped writes no metrics:\n{read_tail(log)}")
                time.sleep(0.005)
            process.send_signal(signal.SIGTERM)
            code = process.wait()
        finally:
            process.kill()
        if code == adapter.stopped_code:
            return float(json.loads(Path("first-loss.json").read_text(encoding="utf-8")))
        if code:
            raise SameResultsError(f"The run that was to be stopped ended with code {code}:\n{read_tail(log)}")
        shutil.rmtree(out)  # it was done before the signal came
    raise SameResultsError("The run was done before it could be stopped, three times: give it more epochs.")


def count_lines(path: Path) -> int:
    """Return the number of whole lines of a file, 0 if there is none."""
    try:
        return path.read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def run_command(command: Sequence[str]) -> float | None:
    """Run a command of selfcon in this process; return its first loss, or None if it trains nothing."""
    log = Path("command.log")
    with log.open("w", encoding="utf-8") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        code, loss = run_module(command)
    if code:
        raise SameResultsError(f"selfcon {' '.join(command)} ended with code {code}:\n{read_tail(log)}")
    return loss


def run_module(command: Sequence[str]) -> tuple[Any, float | None]:
    """Do what `python -m selfcon` does; return the exit code and the first loss.

    The first loss is the first value that autograd is asked to differentiate, wherever selfcon does that.
    """
    import torch

    losses: list[float] = []
    backward = torch.autograd.backward

    def record(tensors: Any, *args: Any, **options: Any) -> None:
        if not losses and hasattr(tensors, "ndim") and tensors.ndim == 0:
            losses.append(float(tensors))
        backward(tensors, *args, **options)

    code: Any = 0
    arguments = sys.argv
    torch.autograd.backward, sys.argv = record, ["selfcon", *command]
    try:
        runpy.run_module("selfcon", run_name="__main__")
    except SystemExit as end:
        code = end.code
    finally:
        torch.autograd.backward, sys.argv = backward, arguments
    return code, losses[0] if losses else None


def run_and_record(file: Path, command: Sequence[str]) -> Any:
    """Run a command in a process of its own and write its first loss to a file; return its exit code."""
    import torch

    torch.set_num_threads(1)
    code, loss = run_module(command)
    file.write_text(json.dumps(loss), encoding="utf-8")
    return code


def read_tail(log: Path) -> str:
    """Return the last lines of a log."""
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-20:])


def hash_weights(path: Path) -> list[str]:
    """Return the type, shape and hash of every tensor of a safetensors file, sorted, without their names."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    found = []
    for name, entry in json.loads(data[8:start]).items():
        if name != "__metadata__":
            first, last = entry["data_offsets"]
            digest = hashlib.sha256(data[start + first : start + last]).hexdigest()
            found.append(f"{entry['dtype']} {entry['shape']} {digest}")
    return sorted(found)


def dump_reopened(dump: Dump, adapter: Adapter) -> None:
    """Calibrate and export a run, open it again, and add its predictions and thresholds."""
    import onnxruntime as ort

    name = f"run-{REOPENED}"
    out = Path(name)
    run_command(adapter.calibrate_command(name, CALIBRATION))
    run_command(adapter.export_command(name))
    with np.load("cifar.npz") as arrays:
        outside = arrays["x_test"]
    for item, kind, parts in adapter.reopen(out, outside):
        dump.add(f"reopened/{item}", kind, parts)
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = ort.InferenceSession(adapter.onnx_file(out), options, providers=["CPUExecutionProvider"])
    images = adapter.test_images(out).astype(np.float32) / 255
    found = session.run(None, {session.get_inputs()[0].name: images})
    for output, values in zip(session.get_outputs(), found, strict=True):
        dump.add(f"reopened/onnx/{output.name}", "reopened", {"values": values})


# Processes: a clean environment, worktrees, libraries of another lock file


def clean_environment(src: Path) -> dict[str, str]:
    """Return the environment of a dump: `src` first on the path, one thread, no GPU."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    fixed = {"PYTHONPATH": str(src), "PYTHONSAFEPATH": "1", "PYTHONHASHSEED": "0", "CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **threads, **fixed}


def start_dump(file: Path, src: Path, script: Path, python: str) -> subprocess.Popen[bytes]:
    """Start the dump of one revision by its own copy of this script, or by this one for revisions before it.

    Every later copy must therefore take `--dump FILE --src DIR`.
    """
    return subprocess.Popen([python, str(script), "--dump", str(file), "--src", str(src)])


def dump_here(file: Path, src: Path) -> int:
    """Write a dump of the selfcon in `src`, in a clean process; return its exit code."""
    words = [sys.executable, str(Path(__file__).resolve()), "--worker", str(file), "--src", str(src)]
    process = subprocess.Popen(words, env=clean_environment(src))
    try:
        return process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise


def work(file: Path, src: Path) -> None:
    """Compute and write the dump. The environment is that of `clean_environment`."""
    import torch

    torch.set_num_threads(1)
    package = import_module("selfcon")
    if not Path(str(package.__file__)).resolve().is_relative_to(src.resolve()):
        raise SameResultsError(f"selfcon was imported from {package.__file__}, but expected from {src}.")
    with tempfile.TemporaryDirectory(prefix="same-results-") as directory:
        dump = make_dump(choose_adapter(), Path(directory), file.stem)
    versions = {"python": platform.python_version(), "torch": str(torch.__version__), "numpy": np.__version__}
    dump.write(file, versions)
    used = sum(os.times()[:4])
    print(f"{file.stem}: {len(dump.items)} items, {used:.0f} s of CPU time", file=sys.stderr, flush=True)


@contextlib.contextmanager
def worktree(revision: str) -> Iterator[Path]:
    """Check out a revision in a temporary git worktree."""
    found = git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    if found is None:
        raise SameResultsError(f"{revision} is not a commit of this repository.")
    with tempfile.TemporaryDirectory(prefix="same-results-") as directory:
        path = Path(directory) / "revision"
        if git("worktree", "add", "--detach", "--quiet", str(path), found) is None:
            raise SameResultsError(f"git cannot check out {revision} in {path}.")
        try:
            yield path
        finally:
            git("worktree", "remove", "--force", str(path))


def git(*words: str) -> str | None:
    """Return the output of a git command in this repository, or None if it fails."""
    done = subprocess.run(["git", "-C", str(ROOT), *words], check=False, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def python_for(tree: Path) -> str:
    """Return the Python that has the libraries of a tree's lock file: this one, or that of an environment kept for it.

    Environments are in ~/.cache/selfcon-same-results (or below XDG_CACHE_HOME), one per lock file; they are kept.
    """
    lock = tree / LOCK_FILE
    if not lock.exists() or lock.read_bytes() == (ROOT / LOCK_FILE).read_bytes():
        return sys.executable
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "selfcon-same-results"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    kept = cache / f"{hashlib.sha256(lock.read_bytes()).hexdigest()[:32]}-py{version}"
    if not kept.exists():
        print(f"building {kept}, once for this lock file", file=sys.stderr, flush=True)
        staged = kept.with_name(f"{kept.name}.{os.getpid()}.part")
        try:
            build_environment(staged, lock)
            if not kept.exists():  # another process may have been faster
                staged.rename(kept)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
    return str(kept / "bin" / "python")


def build_environment(path: Path, lock: Path) -> None:
    """Install the libraries of a lock file into a new environment: with uv, or with pip where there is no uv."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(sys.executable).with_name("uv")
    uv = str(beside) if beside.exists() else shutil.which("uv")
    python = str(path / "bin" / "python")
    if uv is not None:
        commands = [
            [uv, "venv", "--quiet", "--python", sys.executable, str(path)],
            [uv, "pip", "install", "--python", python, "--compile-bytecode", "--require-hashes", "-r", str(lock)],
        ]
    else:
        commands = [
            [sys.executable, "-m", "venv", str(path)],
            [python, "-m", "pip", "install", "--disable-pip-version-check", "--require-hashes", "-r", str(lock)],
        ]
    for command in commands:
        done = subprocess.run(command, check=False, stdout=sys.stderr)
        if done.returncode:
            raise SameResultsError(f"An environment for another {LOCK_FILE} cannot be built: {' '.join(command)}")


def against(revision: str, tolerance: float | None) -> int:
    """Dump a revision (A) and this working tree (B) at the same time, and compare them."""
    with worktree(revision) as tree, tempfile.TemporaryDirectory(prefix="same-results-") as directory:
        own, ours = tree / SCRIPT, Path(__file__).resolve()
        files = [Path(directory, name) for name in ("a.npz", "b.npz")]
        python = python_for(tree)
        processes = [
            start_dump(files[0], tree / "src", own if own.exists() else ours, python),
            start_dump(files[1], ROOT / "src", ours, sys.executable),
        ]
        try:
            while any(process.poll() is None for process in processes) and not any(p.poll() for p in processes):
                time.sleep(0.1)
            codes = [process.poll() or 0 for process in processes]  # before the other one is terminated
        finally:
            for process in processes:
                process.terminate()
                process.wait()
        for code, name in zip(codes, (revision, "this working tree"), strict=True):
            if code:
                raise SameResultsError(f"The dump of {name} failed, see above.")
        print(f"A is {revision}, B is this working tree")
        return compare(files[0], files[1], tolerance)


# The command line


def main() -> int:
    """Parse the arguments and return the exit code."""
    if sys.argv[1:2] == ["--command"]:  # a run in a process of its own, for `interrupt`
        sys.exit(run_and_record(Path(sys.argv[2]), sys.argv[3:]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--dump", type=Path, metavar="FILE", help="write what this revision computes")
    what.add_argument("--compare", type=Path, nargs=2, metavar=("A", "B"), help="compare two dumps")
    what.add_argument("--against", metavar="REV", help="compare a commit with this working tree")
    what.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--tolerance", type=float, metavar="T", help="for a change that may move last bits of losses")
    parser.add_argument("--src", type=Path, default=ROOT / "src", help="with --dump: where selfcon is (default: here)")
    options = parser.parse_args()
    if options.tolerance is not None and not 0 < options.tolerance < 1:
        parser.error("--tolerance is a share above 0 and below 1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that worktrees and processes are cleaned up
    try:
        if options.compare:
            return compare(options.compare[0], options.compare[1], options.tolerance)
        if options.against:
            return against(options.against, options.tolerance)
        if options.worker:
            work(options.worker, options.src)
            return 0
        return dump_here(options.dump.resolve(), options.src.resolve())
    except SameResultsError as error:
        print(f"same_results: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
