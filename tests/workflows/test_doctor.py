"""What the doctor advises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import selfcon
from selfcon.config import make_settings
from selfcon.data.orders import draw_order
from selfcon.errors import MemoryShortageError
from selfcon.training.trainer import Trainer
from selfcon.workflows.costs import Estimator
from selfcon.workflows.doctor import examine, expected_positives, suggest_size
from tests.workflows.conftest import write_stripes


@pytest.mark.parametrize(("sides", "size"), [([20], 32), ([40, 70, 500], 64), ([200, 150, 140], 128), ([500] * 3, 224)])
def test_sizes_that_networks_are_used_to(sides: list[int], size: int) -> None:
    assert suggest_size(sides, torch.device("cuda")) == size
    assert suggest_size(sides, torch.device("cpu")) == min(size, 64)


def test_advice_for_a_folder_of_few_and_uneven_images(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name, count in (("often", 30), ("rare", 5)):
        for split in ("train", "test"):
            (tmp_path / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 256, (40, 36 + number % 2, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / split / name / f"{number}.png")
    found = examine(data=str(tmp_path), width=0.125, batch_size=8, epochs=10, device="cpu")
    told = " ".join(found.advice)
    for words in (
        "--image-size 32.",
        "6 times the smallest: --sampler balanced",
        "35 training images are few to train from scratch",
        "50 steps are few for a contrastive loss. Use --epochs 600",
        "35 training images are few for pretraining and a linear probe. Use --method selfcon-1stage",
        "--val-fraction 0.1",
    ):
        assert words in told, told
    assert found.task["image size"] == 32
    calm = examine(
        data=str(tmp_path), width=0.125, batch_size=8, image_size=32, sampler="balanced", val_fraction=0.2, device="cpu"
    )
    assert not any("--sampler" in each or "--val-fraction" in each for each in calm.advice)


def test_positives_of_a_balanced_sampler() -> None:
    labels = np.repeat(np.arange(1000), 10)
    assert expected_positives(labels, 128, 2) == pytest.approx(0.001 * 127 * 2 + 1)
    assert expected_positives(labels, 128, 2, balanced=True) == 3.0  # a second sample of its class, with two features
    labels = np.repeat(np.arange(4), 50)
    assert expected_positives(labels, 32, 1, balanced=True) == 7.0
    assert expected_positives(labels, 1, 2, balanced=True) >= 1
    order = draw_order(torch.from_numpy(labels), seed=0, epoch=1, balanced=True, device="cpu") % len(labels)
    batch = labels[order[:100].numpy()]
    assert expected_positives(labels, 100, 1, balanced=True) == pytest.approx((batch[:, None] == batch).sum() / 100 - 1)


def test_small_images_are_not_called_larger_than_what_is_seen() -> None:
    found = examine(data="digits", device="cpu", width=0.125)
    assert not any("larger than what is seen" in each for each in found.advice)


def test_times_on_a_cpu_go_with_the_work() -> None:
    estimator = Estimator(torch.device("cpu"))
    small, large = (make_settings({"width": width, "epochs": 10}) for width in (0.125, 0.25))
    first = estimator.estimate(small, 1000).seconds
    assert first > 0
    assert estimator.estimate(large, 1000).seconds > 2 * first  # by their operations, whatever else the machine does
    assert estimator.estimate(small, 2000).seconds == pytest.approx(2 * first)
    few = estimator.estimate(small.model_copy(update={"stem": "large"}), 1000)  # maps a quarter as long and as wide
    assert few.seconds < first / 4
    assert few.peak_bytes < estimator.estimate(small, 1000).peak_bytes / 2


def test_what_does_not_fit_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")

    monkeypatch.setattr(Trainer, "update", fail)
    with pytest.raises(MemoryShortageError, match=r"Batches of 64 do not fit .*--micro-batch (32|16|8) "):
        examine(data="digits", width=0.125, batch_size=64, epochs=1, device="cpu")
    with pytest.raises(MemoryShortageError, match=r"Pieces of 4 do not fit .*--micro-batch (2|1) "):
        examine(data="digits", width=0.125, batch_size=64, micro_batch=4, norm="group", epochs=1, device="cpu")


def test_what_does_not_fit_is_explained_for_the_size_of_the_images(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sizes = []

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")

    def most(self: Estimator, settings: Any) -> int:
        sizes.append(settings.image_size)
        return 4

    monkeypatch.setattr(Trainer, "update", fail)
    monkeypatch.setattr(Estimator, "most_samples", most)
    data = write_stripes(tmp_path / "stripes.npz", side=48)
    with pytest.raises(MemoryShortageError, match="--micro-batch 4 "):
        selfcon.pretrain(data=str(data), out=tmp_path / "run", width=0.125, epochs=1, batch_size=32, device="cpu")
    assert sizes == [48]


def test_what_does_not_fit_in_the_probe_is_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    update = Trainer.update

    def fail(self: Trainer, *given: Any) -> Any:
        if self.stage.name == "probe":
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")
        return update(self, *given)

    monkeypatch.setattr(Trainer, "update", fail)
    given: dict[str, Any] = {
        "data": "digits",
        "width": 0.125,
        "batch_size": 64,
        "epochs": 1,
        "limit_batches": 2,
        "probe.batch_size": 512,
    }
    with pytest.raises(MemoryShortageError, match=r"Batches of 512 of the probe .*--probe\.batch_size 256"):
        selfcon.fit(out=tmp_path / "run", device="cpu", **given)
    with pytest.raises(MemoryShortageError, match="of the probe"):
        selfcon.probe(tmp_path / "run", device="cpu")
