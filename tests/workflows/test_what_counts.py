"""What is learnt from is not what is measured on, and what a stage is given is what it needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import selfcon
from selfcon.config import make_settings
from selfcon.data.policies import Policy
from selfcon.errors import InputMissingError, SelfconWarning, UsageError
from selfcon.training.trainer import Trainer
from selfcon.workflows.pipeline import make_pretraining, make_probing
from selfcon.workflows.task import prepare
from tests.workflows.conftest import write_noise, write_stripes

SMALL: dict[str, Any] = {"width": 0.125, "epochs": 2, "batch_size": 32, "probe.epochs": 3, "device": "cpu"}


def test_a_probe_needs_no_weights_that_the_pretraining_began_with(stripes: Path, tmp_path: Path) -> None:
    selfcon.pretrain(data=str(stripes), out=tmp_path / "first", **SMALL)
    weights = {
        name.removeprefix("encoder."): value
        for name, value in load_file(tmp_path / "first" / "model.safetensors").items()
        if name.startswith("encoder.")
    }
    torch.save(weights, tmp_path / "weights.pth")
    keys = {**SMALL, "data": str(stripes), "weights": str(tmp_path / "weights.pth"), "trust": True}
    whole = selfcon.fit(out=tmp_path / "whole", **keys)
    selfcon.pretrain(out=tmp_path / "parts", **keys)
    (tmp_path / "weights.pth").unlink()
    assert selfcon.probe(tmp_path / "parts", device="cpu")["accuracy"] == whole["accuracy"]
    told = [(tmp_path / name / "model.json").read_bytes() for name in ("whole", "parts")]
    assert told[0] == told[1]


def test_a_run_folder_is_weights_to_begin_with(stripes: Path, tmp_path: Path) -> None:
    keys = {**SMALL, "data": str(stripes), "epochs": 1}
    with pytest.raises(InputMissingError, match=r"There is no file .*model\.safetensors"):
        selfcon.pretrain(out=tmp_path / "never", weights=str(tmp_path), **keys)
    selfcon.pretrain(out=tmp_path / "first", **keys)
    told = []
    for number, weights in enumerate((tmp_path / "first", tmp_path / "first" / "model.safetensors")):
        selfcon.pretrain(out=tmp_path / str(number), weights=str(weights), **keys)
        told.append((tmp_path / str(number) / "model.safetensors").read_bytes())
    assert told[0] == told[1] != (tmp_path / "first" / "model.safetensors").read_bytes()


def test_what_is_held_out_is_at_least_one_image(stripes: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"0\.005 of 96 training images is none to hold out"):
        selfcon.fit(data=str(stripes), out=tmp_path / "run", val_fraction=0.005, **SMALL)


def test_test_images_that_were_learnt_are_told(tmp_path: Path) -> None:
    with np.load(write_stripes(tmp_path / "x.npz")) as arrays:
        changed = dict(arrays)
    changed["x_test"][:5] = changed["x_train"][10:15]
    np.savez(tmp_path / "x.npz", **changed)
    with pytest.warns(SelfconWarning, match="5 of the 36 test images are training images, too"):
        selfcon.fit(data=str(tmp_path / "x.npz"), out=tmp_path / "run", **SMALL)


def test_the_probe_takes_out_what_all_features_share(stripes: Path) -> None:
    """Classifiers for features as they are equal those of training, whose features are centred and short."""
    settings = make_settings({"data": str(stripes), "width": 0.125, "batch_size": 32, "augment.flip": False})
    task = prepare(settings, torch.device("cpu"))
    net = task.build_network(classifiers=False)
    stage = make_probing(task, net)
    assert stage._policy.flip_probability == 0
    features = net(torch.randn(9, 3, 16, 16)).features
    with torch.no_grad():
        for parameter in stage.module.parameters():
            parameter.normal_()
    plain = stage.unwrap(stage.module)
    for name, each in features.items():
        expected, linear = stage._classify(name, each), plain.get_submodule(name)
        torch.testing.assert_close(linear(each), expected, rtol=1e-3, atol=1e-4)
    seen = net(stage._arranged(task.train.batch(torch.arange(96), Policy(), seed=0, epoch=0).images)).features
    for name, each in seen.items():
        scale = stage._scales[name]
        apart = (each - scale.mean) / scale.length
        assert apart.mean(0).abs().max() < 1e-4
        assert apart.square().sum(1).mean() == pytest.approx(1, abs=1e-3)


def test_fine_tuning_on_its_own_folder_is_tested_on_what_it_never_saw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("selfcon.workflows.transfer._RATES", (0.01,))
    monkeypatch.setattr("selfcon.workflows.transfer._DECAYS", (1e-4,))
    write_noise(tmp_path / "all")
    small: Any = {"width": 0.125, "epochs": 1, "batch_size": 16, "image_size": 16, "device": "cpu", "probe.epochs": 1}
    selfcon.fit(data=str(tmp_path / "all"), out=tmp_path / "run", seed=1, **small)
    with pytest.warns(SelfconWarning, match="learnt from some of the held-out images"):  # which settings are chosen by
        found = selfcon.transfer.classify(
            tmp_path / "run", data=str(tmp_path / "all"), modes=["finetune"], epochs=2, batch_size=16, device="cpu"
        )
    whole = json.loads((Path(found["out"]) / "whole" / "results.json").read_text())
    for name, each in found["finetune"]["accuracy"].items():
        assert each["top1"] == pytest.approx(whole["accuracy"][name]["top1"])
    hashes = [
        json.loads((folder / "model.json").read_text())["data_sha256"]["test"]
        for folder in (tmp_path / "run", Path(found["out"]) / "whole")
    ]
    assert hashes[0] == hashes[1]


def test_pretrainings_start_slowly_and_others_do_not(stripes: Path) -> None:
    def first_rate(method: str, **more: Any) -> float:
        given = {"data": str(stripes), "width": 0.125, "batch_size": 8, "epochs": 200, "method": method, **more}
        stage = make_pretraining(prepare(make_settings(given), torch.device("cpu")), lambda *_: None)
        return Trainer(stage, torch.device("cpu"), compiled=False).rate.at(0) / stage.lr

    assert first_rate("selfcon") == first_rate("supcon") == pytest.approx(0.02, rel=0.01)  # 2,400 updates
    assert first_rate("selfcon", epochs=100) == first_rate("selfcon-1stage") == first_rate("ce") == 1.0
    assert first_rate("selfcon", schedule={"warmup_epochs": 0}) == 1.0
