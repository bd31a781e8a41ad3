"""Whole runs on images that are read while training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import selfcon
from selfcon.cli.main import run as command
from selfcon.config import make_settings
from selfcon.data.streamed import Streamed
from selfcon.errors import UsageError
from selfcon.progress import as_time
from selfcon.training.folder import RunFolder
from selfcon.workflows import task
from selfcon.workflows.doctor import Pace, examine
from selfcon.workflows.task import choose_device, prepare

SMALL: dict[str, Any] = {"width": 0.125, "epochs": 2, "batch_size": 8, "probe.epochs": 2, "device": "cpu"}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of large images, bright above or bright below, of several sizes."""
    folder = tmp_path_factory.mktemp("large") / "photos"
    rng = np.random.default_rng(0)
    for split, count in (("train", 24), ("val", 8)):
        for index in range(count):
            height, width = [(150, 110), (120, 160), (128, 128)][index % 3]
            ramp = np.linspace(30, 220, height)[:: 1 if index % 2 else -1, None, None]
            noisy = ramp + rng.normal(0, 20, (height, width, 3))
            path = folder / split / f"class{index % 2}" / f"{index:02d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(path)
    return folder


def test_a_folder_and_a_packed_file_train_the_same_network(photos: Path, tmp_path: Path) -> None:
    packed = selfcon.data.pack(selfcon.data.load(photos), tmp_path / "photos.pack")
    places = {"folder": photos, "packed": packed}
    results = [
        selfcon.fit(data=str(data), image_size=100, out=tmp_path / name, **SMALL) for name, data in places.items()
    ]
    assert results[0]["accuracy"] == results[1]["accuracy"]
    assert len({(tmp_path / name / "model.safetensors").read_bytes() for name in places}) == 1
    run = tmp_path / "folder"
    assert selfcon.evaluate(run, device="cpu")["accuracy"]["ensemble"]["top1"] == pytest.approx(
        results[0]["accuracy"]["ensemble"]["top1"]
    )
    assert set(selfcon.knn(run, device="cpu")["accuracy"]) == {"backbone", "exit2"}
    assert selfcon.analyze.embedding(run, split="train", device="cpu")["exits"]
    assert selfcon.analyze.gradcam(run, images=2, device="cpu")["classes"] == ["class0", "class1"]


def test_when_images_are_streamed(photos: Path) -> None:
    def kind(**given: Any) -> bool:
        made = prepare(make_settings({"data": str(photos), "batch_size": 8, **given}), choose_device("cpu"))
        return isinstance(made.train, Streamed) and isinstance(made.test, Streamed)

    assert kind(image_size=100)
    assert not kind(image_size=64)
    assert kind(image_size=64, stream=True)
    assert not kind(image_size=100, stream=False)
    assert not kind(image_size=100, probe={"augment": {"policy": "randaugment"}})
    with pytest.raises(UsageError, match="RandAugment"):  # before anything is trained
        kind(image_size=100, stream=True, probe={"augment": {"policy": "randaugment"}})


def test_a_run_goes_on_as_it_began_whatever_memory_there_is(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**SMALL, "data": str(photos), "image_size": 64, "out": tmp_path / "run"}
    monkeypatch.setattr(task, "_should_stream", lambda *_: True)  # as if there were little
    selfcon.pretrain(**options)
    assert json.loads((tmp_path / "run" / "data.json").read_text())["streamed"] is True
    monkeypatch.setattr(task, "_should_stream", lambda *_: False)
    assert selfcon.probe(tmp_path / "run", device="cpu")["accuracy"]
    RunFolder.reopen(tmp_path / "run")[0].close()  # nobody holds on to it
    selfcon.pretrain(**{**options, "out": tmp_path / "older", "stream": False})
    noted = json.loads((tmp_path / "older" / "data.json").read_text())
    del noted["streamed"]
    (tmp_path / "older" / "data.json").write_text(json.dumps(noted))
    assert selfcon.probe(tmp_path / "older", device="cpu")["accuracy"]  # of before it was noted


def test_a_dry_run_takes_some_of_each_split(photos: Path, tmp_path: Path) -> None:
    result = selfcon.fit(
        data=str(photos), image_size=32, out=tmp_path, **{**SMALL, "limit_batches": 1, "batch_size": 6}
    )
    assert result["data_bytes"] == 3 * 32 * 32 * (6 + 6)


def test_the_doctor_tells_what_limits(photos: Path) -> None:
    found = examine(data=str(photos), image_size=100, width=0.125, batch_size=8, epochs=3, device="cpu")
    assert {"an update", "of it, the network", "pretraining", "probe", "limited by", "memory to expect"} <= set(
        found.task
    )
    cpu = choose_device("cpu")
    assert Pace(first=1.0, later=1.0, network=0.95).limit(cpu) == "the CPU, which computes"
    assert Pace(first=2.0, later=1.0, network=0.95).limit(cpu).endswith("in the first epoch by reading images")
    assert Pace(first=2.0, later=2.0, network=1.0).limit(cpu).startswith("making batches")
    assert [as_time(seconds) for seconds in (5, 600, 9000, 400_000)] == ["5 s", "10 min", "2.5 h", "4.6 days"]


def test_packing_for_large_images(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert command(["data", "pack", str(photos), "small.pack", "--max-side", "80"]) == 0
    assert command(["data", "pack", str(photos), "files.pack", "--encoded"]) == 0
    assert (tmp_path / "files.pack").stat().st_size < (tmp_path / "small.pack").stat().st_size
    assert max(selfcon.data.load(tmp_path / "small.pack").train[0].shape[:2]) == 80
    with pytest.raises(UsageError, match="not for --shards"):
        command(["data", "pack", str(photos), "shards", "--shards", "5", "--encoded"])
