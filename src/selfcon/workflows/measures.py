"""Numbers about a trained run: accuracy on any split, nearest neighbours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from selfcon.config import make_settings, read_yaml
from selfcon.data.resident import Resident, fingerprint, make_resident
from selfcon.data.source import Images, Source
from selfcon.data.sources import load
from selfcon.errors import DataError, UsageError
from selfcon.evaluation import knn as neighbours
from selfcon.evaluation.accuracy import embed, predict, summarise
from selfcon.networks.multi_exit import MultiExitNetwork
from selfcon.training.artifact import load_model
from selfcon.workflows.task import choose_device, read_source


def evaluate(
    run_folder: str | Path, *, data: str | None = None, split: str = "test", device: str = "auto"
) -> dict[str, Any]:
    """Accuracy of every exit and of the ensemble on a split of the run's data, or of other data of the same classes."""
    net, facts, source = _open(run_folder, data)
    if not net.classifiers:
        raise UsageError(f"{run_folder} has no classifiers yet: `selfcon probe` trains them.")
    if list(source.classes) != facts["classes"]:
        raise DataError(
            f"{source.name} has other classes than the {len(facts['classes'])} that the run was trained on."
        )
    images = source.splits().get(split)
    if images is None:
        raise UsageError(f"{source.name} has no split {split!r}; it has {', '.join(source.splits())}.")
    chosen = choose_device(device)
    resident = _resident(images, facts, chosen)
    if data is None:
        _check_unchanged(run_folder, facts, {split: resident})
    accuracy = summarise(predict(net.to(chosen), resident, size=facts["image_size"]))
    return {"data": source.name, "split": split, "images": len(resident), "accuracy": accuracy}


def knn(run_folder: str | Path, *, k: int = 20, temperature: float = 0.07, device: str = "auto") -> dict[str, Any]:
    """Accuracy of the nearest training images in the features of every exit, on the test images."""
    net, facts, source = _open(run_folder, None)
    chosen = choose_device(device)
    net = net.to(chosen)
    size = facts["image_size"]
    train, test = (_resident(images, facts, chosen) for images in (source.train, source.test))
    _check_unchanged(run_folder, facts, {"train": train, "test": test})
    known, asked = embed(net, train, size=size), embed(net, test, size=size)
    accuracy = {
        name: neighbours.accuracy(
            asked[name], test.labels.cpu(), known[name], train.labels.cpu(), k=k, temperature=temperature
        )
        for name in net.names
    }
    return {"data": source.name, "k": k, "images": len(test), "accuracy": accuracy}


def _check_unchanged(run_folder: str | Path, facts: dict[str, Any], splits: dict[str, Resident]) -> None:
    for split, data in splits.items():
        if facts["data_sha256"].get(split) != fingerprint(data):
            raise UsageError(
                f"{facts['data']} is not what {run_folder} was trained on ({split} differs): "
                f"name other data with --data."
            )


def _open(run_folder: str | Path, data: str | None) -> tuple[MultiExitNetwork, dict[str, Any], Source]:
    net, facts = load_model(run_folder)
    settings = make_settings(read_yaml(Path(run_folder) / "config.yaml"))
    if data is not None:
        return net, facts, load(data, root=settings.data_root)
    return net, facts, read_source(settings)


def _resident(images: Images, facts: dict[str, Any], device: torch.device) -> Resident:
    """The images as the run saw them, with its statistics."""
    like = Resident(
        torch.empty(0, 3, 1, 1, dtype=torch.uint8),
        torch.empty(0, dtype=torch.long),
        torch.tensor(facts["mean"]),
        torch.tensor(facts["std"]),
    )
    return make_resident(images, size=facts["image_size"], device=device, like=like)
