"""Few labels, uneven classes, and weights of others to begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file

import selfcon
from selfcon.data.source import ArrayImages, Source
from selfcon.data.thinning import thin
from selfcon.errors import InputMissingError, UsageError
from selfcon.workflows.settings import collect_settings
from selfcon.workflows.task import prepare
from selfcon.workflows.trained import open_run
from tests.cli.calling import call
from tests.workflows.conftest import write_stripes

SMALL: dict[str, Any] = {"width": 0.125, "epochs": 2, "batch_size": 16, "probe.epochs": 2, "device": "cpu"}


def test_uneven_classes_in_balance(tmp_path: Path) -> None:
    data = str(write_stripes(tmp_path / "stripes.npz", train=160))
    folder = tmp_path / "run"
    words = ["fit", "--data", data, "--width", "0.125", "--epochs", "2", "--batch-size", "16", "--probe.epochs", "2"]
    done = call(*words, "--imbalance", "8", "--sampler", "balanced", "--out", folder, "--device", "cpu", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    train = open_run(folder, "cpu").split("train")  # and it is what was trained on
    assert torch.bincount(train.labels).tolist() == [40, 20, 10, 5]


@pytest.mark.parametrize(("classes", "imbalance", "images"), [(100, 100, 10847), (100, 10, 19573), (10, 100, 12406)])
def test_uneven_classes_are_those_of_long_tailed_cifar(classes: int, imbalance: int, images: int) -> None:
    labels = np.arange(50000) % classes
    arrays = ArrayImages(np.zeros((50000, 1, 1, 3), np.uint8), labels, "long")
    source = Source("long", tuple(map(str, range(classes))), train=arrays, test=arrays)
    sizes = np.bincount(thin(source, per_class=None, imbalance=imbalance, seed=0).train.labels)
    assert (sizes[0], sizes[-1]) == (50000 // classes, 50000 // classes // imbalance)
    assert sizes.sum() == images


def test_few_labels(tmp_path: Path) -> None:
    data = str(write_stripes(tmp_path / "stripes.npz"))
    selfcon.fit(data=data, out=tmp_path / "run", per_class=8, **SMALL)
    train = open_run(tmp_path / "run", "cpu").split("train")
    assert torch.bincount(train.labels).tolist() == [8] * 4
    with pytest.raises(UsageError, match="sampler"):
        selfcon.fit(data=data, out=tmp_path / "x", sampler="balance", **SMALL)


def test_timms_weights_when_they_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = str(write_stripes(tmp_path / "stripes.npz"))
    theirs = timm.create_model("resnet18")
    save_file(theirs.state_dict(), tmp_path / "theirs.safetensors")
    settings = collect_settings(None, {"data": data, "weights": "timm", "stem": "large", "batch_size": 32})
    with pytest.raises(InputMissingError, match="not in this machine's cache"):
        prepare(settings, torch.device("cpu"))
    monkeypatch.setattr(
        "huggingface_hub.try_to_load_from_cache", lambda repo, file: str(tmp_path / "theirs.safetensors")
    )
    task = prepare(settings, torch.device("cpu"))
    net = task.build_network(classifiers=False)
    assert torch.equal(net.encoder.get_parameter("conv1.weight"), theirs.state_dict()["conv1.weight"])
    assert "weights" in task.fingerprints()
    small = collect_settings(None, {"data": data, "weights": "timm", "batch_size": 32})
    with pytest.raises(UsageError, match=r"wants \[64, 3, 3, 3\]: --stem large would fit"):
        prepare(small, torch.device("cpu")).build_network(classifiers=False)
