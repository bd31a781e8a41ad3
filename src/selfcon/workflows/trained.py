"""A trained run, opened: its network, what is known of it, and the data as it saw them; or timm's weights like one."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import timm
import torch

from selfcon.config import Settings, make_settings, read_yaml
from selfcon.data.folders import is_to_be_split, list_classes, read_classes
from selfcon.data.resident import Resident, make_resident
from selfcon.data.source import FileImages, Images, Source
from selfcon.data.sources import list_sources, load
from selfcon.data.split import Split
from selfcon.data.streamed import make_streamed
from selfcon.errors import DataError, InputMissingError, SelfconError, UsageError, added_elsewhere
from selfcon.evaluation.cost import zero_image
from selfcon.losses.methods import Method, get_method, list_methods
from selfcon.networks.multi_exit import MultiExitNetwork
from selfcon.networks.weights import find_timm_weights, load_encoder, read_weights
from selfcon.progress import say
from selfcon.training.artifact import build_model, load_model, remember_images
from selfcon.training.files import inside
from selfcon.training.folder import RunFolder
from selfcon.workflows.places import noted_place, same_place, with_data
from selfcon.workflows.task import choose_device, read_source

_TIMM = "timm:"


@dataclass(frozen=True)
class TrainedRun:
    """What `open_run` gives; data are read when they are first asked for."""

    path: Path
    net: MultiExitNetwork
    facts: dict[str, Any]
    settings: Settings
    device: torch.device
    weights: Path  # the file that they came from

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def size(self) -> int:
        """The side of its images."""
        return int(self.facts["image_size"])

    @property
    def method(self) -> Method:
        """Its method; of a script's, only where the script is at work."""
        name = self.settings.method
        if name not in list_methods() and (self.path / "method.json").is_file():
            raise added_elsewhere("method", name, self.path)
        return get_method(name)

    @property
    def temperature(self) -> float:
        """That of its loss: the one given, or what it was learnt to be in the end."""
        if not self.settings.loss.learn_temperature:
            return self.settings.loss.temperature
        learnt = [line["temperature"] for line in RunFolder.follow(self.path).read_metrics() if "temperature" in line]
        if not learnt or not isinstance(learnt[-1], float) or not 0 < learnt[-1] < math.inf:
            raise DataError(f"{self.path / 'metrics.jsonl'} does not tell the temperature that was learnt.")
        return learnt[-1]

    @cached_property
    def source(self) -> Source:
        """Its own data."""
        data = self.settings.data
        if data not in list_sources() and not Path(data).exists():
            raise InputMissingError(
                f"{self.path} was trained on {noted_place(self.path) or data}, which is not there: bring it back, "
                f"go to where that was begun, or take the script that added it."
            )
        return read_source(self.settings)

    def is_own(self, data: str) -> bool:
        """Whether these are the data that it was trained on."""
        return same_place(data, self.settings.data)

    def other_source(self, data: str, *, root: str | None = None) -> Source:
        """Other data; named ones lie below `root`, which is that of its own unless it is given.

        Where they are its own after all, what it was trained on must not become what it is tested on: they are read
        as they were, and a folder that would be split otherwise by now is refused. Training images that are found among
        images to test with are told.
        """
        root = root or self.settings.data_root
        if self.is_own(data):
            own = read_source(self.settings.model_copy(update={"data_root": root}))
            if is_to_be_split(Path(data)) and not self._tests_on(own.test):
                raise UsageError(
                    f"{data} has changed since {self.path} was trained on it, and would be split otherwise: "
                    f"images that it learnt from would be tested on."
                )
            return own
        found = load(data, root=root)
        self._tell_known(found.test, f"test images of {found.name}")
        return found

    def labelled_source(self, data: str) -> Source:
        """Other images of its classes, to measure with: a folder that holds nothing but its classes is not split."""
        folder, classes = Path(data), list(self.facts["classes"])
        others = data not in list_sources() and not self.is_own(data) and is_to_be_split(folder)
        if not others or list_classes(folder) != sorted(classes) or self._is_moved(folder):
            found = self.other_source(data)
            if list(found.classes) != classes:
                raise DataError(
                    f"{found.name} has other classes than the {len(classes)} that {self.path} was trained on."
                )
            return found
        images = read_classes(folder, classes)
        self._tell_known(images, f"images of {folder.resolve().name}")
        return Source(folder.resolve().name, tuple(classes), train=images, test=images)

    def _is_moved(self, folder: Path) -> bool:
        """Whether a folder of classes is its own by another path: split as it was, the test images are the same."""
        with suppress(SelfconError):  # what cannot be split was not
            return self._tests_on(load(folder).test)
        return False

    def _tests_on(self, images: Images) -> bool:
        """Whether these are the images that it was tested on, at the size that they had."""
        then = replace(self, facts={**self.facts, "image_size": self.facts["network"]["image_size"]})
        return bool(then.as_seen(images).fingerprint() == self.facts.get("data_sha256", {}).get("test"))

    def _tell_known(self, images: Images, name: str) -> None:
        if not isinstance(images, FileImages) or not Path(self.settings.data).is_dir():
            return
        with suppress(SelfconError):
            if isinstance(own := self.source.train, FileImages):
                known = {path.resolve() for path in own.paths}
                count = sum(path.resolve() in known for path in images.paths)
                if count:
                    say(f"note: {count:,} of the {len(images):,} {name} were trained on")

    def at_size(self, size: int) -> Self:
        """The same for images of another side, where its network takes such."""
        try:
            with torch.no_grad():
                self.net.eval()(zero_image(self.net, size))
        except (AssertionError, RuntimeError):
            raise UsageError(
                f"The network of {self.path} does not take images of {size} pixels; it was trained on {self.size}."
            ) from None
        return replace(self, facts={**self.facts, "image_size": size})

    def with_fresh_weights(self, seed: int) -> Self:
        """The same network, untrained."""
        torch.manual_seed(seed)
        net = build_model(self.facts["network"]).to(self.device).eval()
        remember_images(net, self.facts)
        return replace(self, net=net, facts={**self.facts, "method": "none: fresh weights"})

    def split(self, name: str) -> Split:
        """A split of its own data, once it is seen to be what it was trained with."""
        images = self.source.splits().get(name)
        if images is None:
            raise UsageError(f"{self.source.name} has no split {name!r}; it has {', '.join(self.source.splits())}.")
        data = self.as_seen(images)
        if self.facts.get("data_sha256", {}).get(name) != data.fingerprint():
            raise UsageError(
                f"{self.facts['data']} is not what {self.path} was trained on ({name} differs): "
                f"name other data with --data."
            )
        return data

    def as_seen(self, images: Images) -> Split:
        """Images as the run saw them, with its statistics."""
        like = Resident(
            torch.empty(0, 3, 1, 1, dtype=torch.uint8),
            torch.empty(0, dtype=torch.long),
            torch.tensor(self.facts["mean"]),
            torch.tensor(self.facts["std"]),
        )
        if self.facts.get("streamed"):
            return make_streamed(images, size=self.size, device=self.device, budget=0, like=like)  # read once or twice
        return make_resident(images, size=self.size, device=self.device, like=like)


def open_run(run_folder: str | Path, device: str = "auto") -> TrainedRun:
    """Return the model of a run directory on a device."""
    net, facts = load_model(run_folder)
    folder = Path(run_folder)
    settings = make_settings(read_yaml(inside(folder, "config.yaml")))
    chosen = choose_device(device)
    return TrainedRun(folder, net.to(chosen), facts, with_data(folder, settings), chosen, folder / "model.safetensors")


def open_encoder(what: str | Path, device: str = "auto", *, trust: bool = False) -> TrainedRun:
    """The model of a run folder, or timm's weights: `timm:NAME=FILE`, or `timm:NAME` if they are in the hub's cache."""
    if not str(what).startswith(_TIMM):
        return open_run(what, device)
    name, _, file = str(what).removeprefix(_TIMM).partition("=")
    weights = Path(file) if file else find_timm_weights(name)
    published = timm.get_pretrained_cfg(name) if timm.is_model(name) else None
    if published is None:
        raise UsageError(f"timm has no network {name!r} with published settings.")
    size = published.input_size[-1]
    network = {"name": name, "exits": "none", "stem": "large", "image_size": size, "projection_dim": None}
    facts: dict[str, Any] = {
        "network": {**network, "num_classes": None, "options": {}},
        "method": f"{_TIMM}{name}",
        "image_size": size,
        "mean": list(published.mean),
        "std": list(published.std),
        "streamed": True,  # seen as large images are, and not kept
    }
    net = build_model(facts["network"])
    load_encoder(net.encoder, read_weights(weights, trust=trust), str(weights))
    chosen = choose_device(device)
    settings = make_settings({"model": name, "stem": "large", "exits": "none"})
    return TrainedRun(Path("runs", f"timm-{name}"), net.to(chosen).eval(), facts, settings, chosen, weights)
