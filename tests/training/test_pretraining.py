"""What a method of one's own brings along is trained, kept and left behind with the network's training."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

import selfcon
from selfcon.config import make_settings
from selfcon.errors import StoppedError, UsageError
from selfcon.losses import Term, methods
from selfcon.training import checkpoint
from selfcon.training.progress import Forecast, Reporter
from selfcon.training.trainer import Trainer
from selfcon.workflows.pipeline import make_pretraining
from selfcon.workflows.task import prepare
from tests.workflows.conftest import write_stripes
from tests.workflows.test_fit import stop_at

SMALL: dict[str, Any] = {"width": 0.125, "epochs": 2, "batch_size": 32, "probe.epochs": 1, "device": "cpu"}


@pytest.fixture(scope="module")
def stripes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_stripes(tmp_path_factory.mktemp("data") / "stripes.npz")


class Queue(nn.Module):
    """The last features and their labels."""

    features: Tensor
    labels: Tensor

    def __init__(self, size: int, dim: int) -> None:
        super().__init__()
        self.register_buffer("features", torch.zeros(size, dim))
        self.register_buffer("labels", torch.full((size,), -1))

    @torch.no_grad()
    def add(self, features: Tensor, labels: Tensor) -> None:
        self.features.copy_(torch.cat([features, self.features])[: len(self.features)])
        self.labels.copy_(torch.cat([labels, self.labels])[: len(self.labels)])


@dataclass(frozen=True, kw_only=True)
class Proxies(selfcon.Method):
    """A proxy of each class, beside SupCon with a queue."""

    proxies: nn.Module
    queue: Queue

    def loss(self, features: Tensor, labels: Tensor | None = None, **options: Any) -> Tensor:
        assert labels is not None
        z = features[:, 0, 0].float()
        near = normalize(z) @ normalize(self.proxies.weight).T.float()  # type: ignore[arg-type]
        contrast = super().loss(features, labels, **options, memory=(self.queue.features, self.queue.labels))
        self.queue.add(z, labels)
        return cross_entropy(near / 0.1, labels) + contrast


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> Proxies:
    monkeypatch.setattr("selfcon.losses.methods._METHODS", dict(methods._METHODS))
    monkeypatch.setattr("selfcon.losses.methods._ADDED", {})
    torch.manual_seed(3)
    proxies, queue = nn.Linear(128, 4, bias=False), Queue(48, 128)
    terms = (Term("F", "F", "F"),)
    method = Proxies(name="proxies", paper="", uses_exits=False, terms=terms, proxies=proxies, queue=queue)
    selfcon.add_method(method)
    return method


def newest(run: Path) -> dict[str, Tensor]:
    found = checkpoint.read_newest(run / "checkpoints" / "pretrain")
    assert found is not None
    return found[1].tensors


@pytest.mark.medium
@pytest.mark.parametrize("more", [{"ema": 0.9}, {"micro_batch": 8, "norm": "group"}, {"precision": "fp64"}])
def test_parts_are_trained_and_a_run_that_was_stopped_ends_the_same(
    more: dict[str, Any], added: Proxies, stripes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {"data": str(stripes), "method": "proxies", **SMALL, **more}
    selfcon.fit(out=tmp_path / "whole", **given)
    kept = newest(tmp_path / "whole")
    started = {name: value.clone() for name, value in added.proxies.state_dict().items()}
    assert not torch.equal(kept["module.parts.0.weight"].float(), started["weight"])
    assert sorted(set(kept["module.parts.1.labels"].tolist())) == [0, 1, 2, 3]
    assert not any("parts" in name for name in load_file(tmp_path / "whole" / "model.safetensors"))
    with monkeypatch.context() as patched:
        stop_at(patched, 4, signal.SIGINT)  # in mid-epoch
        with pytest.raises(StoppedError):
            selfcon.fit(out=tmp_path / "run", **given)
    selfcon.fit(out=tmp_path / "run", **given)
    assert checkpoint.same_tensors(newest(tmp_path / "run"), kept)
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "run")]
    assert models[0] == models[1]


@pytest.mark.medium
def test_other_modules_are_not_gone_on_with(added: Proxies, stripes: Path, tmp_path: Path) -> None:
    selfcon.fit(data=str(stripes), method="proxies", out=tmp_path / "run", **SMALL)
    with torch.no_grad():
        added.proxies.weight.add_(1)  # type: ignore[operator]
    selfcon.add_method(added)
    with pytest.raises(UsageError, match=r"began with \(proxies; what a script draws .* torch.manual_seed\(0\)\)"):
        selfcon.fit(data=str(stripes), method="proxies", out=tmp_path / "run", **SMALL)
    with pytest.raises(UsageError, match="proxies is not itself without proxies, queue"):
        selfcon.analyze.gradients(tmp_path / "run", methods=("supcon", "proxies"), device="cpu")


@pytest.mark.parametrize("pieces", [None, 8])
def test_an_update_is_that_of_any_parameter(pieces: int | None, added: Proxies, stripes: Path) -> None:
    """The step and the decay that SGD makes of the gradient of the loss, whole or in pieces."""
    given = {"data": str(stripes), "method": "proxies", "width": 0.125, "batch_size": 32, "norm": "group"}
    optim = {"optim.name": "sgd", "optim.weight_decay": 0.1, "optim.momentum": 0.0, "lr": 0.5, "precision": "fp64"}
    device = torch.device("cpu")
    task = prepare(make_settings({**given, **optim, "micro_batch": pieces}), device)
    stage = make_pretraining(task, lambda *_: None)
    batch = next(iter(stage.batches(0, 0)))
    before = added.proxies.weight.detach().double().requires_grad_()  # type: ignore[operator]
    with torch.no_grad():
        z = stage.net(batch.images.double()).projections_bved(1)[:, 0, 0].float()
    near = normalize(z) @ normalize(before).T.float()
    (gradient,) = torch.autograd.grad(cross_entropy(near / 0.1, batch.labels), before)
    trainer = Trainer(stage, device)
    trainer.update(batch.images, batch.labels, 0)
    rate = trainer.rate.at(0)
    after = stage.module.parts[0].weight.detach()  # type: ignore[index, union-attr]
    torch.testing.assert_close(after, before.detach() - rate * (gradient + 0.1 * before.detach()), rtol=1e-5, atol=1e-7)


def test_a_learned_temperature_has_the_name_it_had_in_checkpoints(stripes: Path) -> None:
    given = {"data": str(stripes), "width": 0.125, "batch_size": 32, "loss.learn_temperature": True}
    task = prepare(make_settings(given), torch.device("cpu"))
    stage = make_pretraining(task, lambda *_: None)
    names = set(stage.module.state_dict())
    assert {name.partition(".")[0] for name in names} == {"net", "log_temperature"}
    trainer = Trainer(stage, torch.device("cpu"))
    assert [group["weight_decay"] for group in trainer.optimizer.param_groups] == [0.05, 0.0]


@pytest.mark.parametrize(("fraction", "images"), [(0.0, "training"), (0.25, "held-out")])
def test_progress_tells_of_which_images_neighbours_are_counted(fraction: float, images: str, stripes: Path) -> None:
    given = {"data": str(stripes), "width": 0.125, "batch_size": 32, "val_fraction": fraction}
    stage = make_pretraining(prepare(make_settings(given), torch.device("cpu")), lambda *_: None)
    assert stage.describe({"loss": 1.0, "knn": 91.94}) == f"{images} kNN 91.9 %"
    assert stage.describe({"loss": 1.0}) == ""


def test_the_time_is_estimated_once_from_the_first_steps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = 0.0
    monkeypatch.setattr("time.monotonic", lambda: clock)

    def run(seconds_a_step: float, *, epochs: int = 30, later: int = 1000, seen: int = 0) -> str:
        nonlocal clock
        forecast = Forecast("30 epochs and the probe", later)
        with Reporter("pretrain", epochs, 100, seen=seen, forecast=forecast) as shown:
            for step in range(1, 21):
                clock += seconds_a_step
                shown.show(0, seen + 10 * step, lambda: 1.0)
        return capsys.readouterr().err

    assert run(0.5).startswith("About 3 min for 30 epochs and the probe.\n")  # 3,890 of 4,000 samples at 20 a second
    assert run(0.5).count("About") == 1
    assert "About 40 min for 30 epochs and the probe.\n" in run(6.0)  # known after one step that was measured
    assert "About 3 min for the rest of 30 epochs" in run(0.5, seen=50)
    assert "About" not in run(0.05) + run(0.5, epochs=2, later=0)  # a few seconds in all
    monkeypatch.setenv("RANK", "1")
    assert run(0.5) == ""


def lonely(tmp_path: Path) -> Path:
    """Images of which every tenth is the only one of its class."""
    path = write_stripes(tmp_path / "lonely.npz", train=80)
    arrays = dict(np.load(path))
    labels = arrays["y_train"] % 4
    labels[::10] = 4 + np.arange(8)
    arrays["y_train"], arrays["classes"] = labels, np.array([f"class {number}" for number in range(12)])
    arrays["y_test"] = np.arange(len(arrays["y_test"])) % 12
    np.savez(path, **arrays)
    return path


@pytest.mark.medium
@pytest.mark.parametrize("cutmix", [None, 1.0])
def test_anchors_that_are_left_out_are_counted(
    cutmix: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {**SMALL, "data": str(lonely(tmp_path)), "method": "supcon-s", "batch_size": 40}
    if cutmix:
        given["cutmix"] = cutmix
    selfcon.pretrain(out=tmp_path / "whole", **given)

    def counted(name: str) -> list[int]:
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["anchors_left_out"] for line in lines]

    assert counted("whole") == [8, 8]
    if cutmix:
        return
    with monkeypatch.context() as patched:
        stop_at(patched, 2, signal.SIGINT)  # in mid-epoch
        with pytest.raises(StoppedError):
            selfcon.pretrain(out=tmp_path / "run", **given)
    selfcon.pretrain(out=tmp_path / "run", **given)
    assert counted("run") == [8, 8]
    selfcon.pretrain(out=tmp_path / "none", **{**given, "method": "selfcon"})  # where every anchor has its exits
    assert "anchors_left_out" not in (tmp_path / "none" / "metrics.jsonl").read_text()
