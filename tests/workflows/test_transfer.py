"""A run's encoder at other tasks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import selfcon
from selfcon import transfer
from selfcon.cli.main import run as command
from selfcon.config import read_yaml
from selfcon.errors import InputMissingError, SelfconError, UnsafeError, UsageError
from selfcon.workflows.trained import open_encoder
from tests.data.test_scenes import write_voc
from tests.workflows.conftest import write_stripes

SMALL: dict[str, Any] = {"width": 0.125, "epochs": 4, "batch_size": 32, "probe.epochs": 10, "device": "cpu"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on stripes of 32 pixels, and other data of two classes."""
    folder = tmp_path_factory.mktemp("transfer")
    selfcon.fit(data=str(write_stripes(folder / "stripes.npz", side=32, train=160)), out=folder / "run", **SMALL)
    rng = np.random.default_rng(0)
    for split, count in (("train", 30), ("test", 12)):
        for index in range(count):
            wave = np.sin(np.arange(32) * (0.5 if index % 2 else 1.0) + rng.uniform(0, 6))
            pixels = (128 + 60 * wave[:, None, None] + rng.normal(0, 60, (32, 32, 3))).clip(0, 255).astype(np.uint8)
            path = folder / "waves" / split / f"class{index % 2}" / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path)
    return folder


def test_classify(place: Path) -> None:
    result = transfer.classify(place / "run", data=str(place / "waves"), device="cpu")
    assert result["metric"] == "top1"
    for mode in ("linear", "knn"):
        assert set(result[mode]["accuracy"]) == {"backbone", "exit2", "ensemble"}
    assert result["linear"]["accuracy"]["ensemble"]["top1"] > 75
    stored = json.loads((Path(result["out"]) / "classify.json").read_text())
    assert stored["linear"] == result["linear"]
    fresh = transfer.classify(place / "run", data=str(place / "waves"), random=True, device="cpu")
    assert fresh["knn"] != result["knn"]
    assert fresh["method"] == "none: fresh weights"
    assert transfer.classify(place / "run", data=str(place / "waves"), device="cpu") == result


def test_one_way_after_another_adds_up(place: Path, tmp_path: Path) -> None:
    options: Any = {"data": str(place / "waves"), "out": tmp_path, "device": "cpu"}
    first = transfer.classify(place / "run", modes=["linear"], **options)
    assert "knn" not in first
    assert transfer.classify(place / "run", modes=["knn"], **options)["linear"] == first["linear"]
    other = transfer.classify(place / "run", modes=["knn"], random=True, **options)
    assert "linear" not in other  # that was of other weights


def test_images_to_validate_with_choose_the_decay_and_are_learnt_from(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "waves", tmp_path / "waves")
    shutil.copytree(place / "waves" / "test", tmp_path / "waves" / "val")
    result = transfer.classify(place / "run", data=str(tmp_path / "waves"), device="cpu")
    assert result["images"] == {"train": 30, "val": 12, "test": 12}
    nearest = transfer.classify(place / "run", data=str(tmp_path / "waves"), modes=["knn"], k=1, device="cpu")
    assert nearest["knn"]["accuracy"]["ensemble"]["top1"] == 100  # the test images were among those to learn from


def test_weights_of_timm_are_an_encoder_too(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    theirs: Any = timm.create_model("resnet18")
    save_file(theirs.state_dict(), "theirs.safetensors")
    options: Any = {"data": str(place / "waves"), "image_size": 32, "modes": ["linear"], "device": "cpu"}
    result = transfer.classify("timm:resnet18=theirs.safetensors", **options)
    assert result["method"] == "timm:resnet18"
    assert result["out"] == "runs/timm-resnet18/transfer/classify-waves-32px-0"
    net = open_encoder("timm:resnet18=theirs.safetensors", "cpu").net
    images = torch.rand(2, 3, 64, 64)
    features = theirs.eval().forward_head(theirs.forward_features(images), pre_logits=True)
    assert torch.equal(net(images).features["backbone"], features)
    tagged = open_encoder("timm:resnet18.fb_ssl_yfcc100m_ft_in1k=theirs.safetensors", "cpu")
    published = timm.get_pretrained_cfg("resnet18.fb_ssl_yfcc100m_ft_in1k")
    assert published is not None
    assert tagged.facts["mean"] == list(published.mean)
    with pytest.raises(InputMissingError, match="not in this machine's cache"):
        transfer.classify("timm:resnet18", **options)
    with pytest.raises(UsageError, match="no network 'resnet1'"):
        transfer.classify("timm:resnet1=theirs.safetensors", **options)
    torch.save(theirs.state_dict(), "theirs.pth")
    with pytest.raises(UnsafeError, match="pickle"):
        transfer.classify("timm:resnet18=theirs.pth", **options)
    assert transfer.classify("timm:resnet18=theirs.pth", trust=True, **options)["linear"] == result["linear"]


def test_fine_tuning_begins_with_the_encoder_and_goes_on_where_it_was(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("selfcon.workflows.transfer._RATES", (0.01,))
    monkeypatch.setattr("selfcon.workflows.transfer._DECAYS", (1e-4,))
    options: Any = {"data": str(place / "waves"), "modes": ["finetune"], "epochs": 2, "batch_size": 10, "device": "cpu"}
    result = transfer.classify(place / "run", **options)
    assert result["finetune"]["lr"] == 0.01
    assert set(result["finetune"]["accuracy"]) == {"backbone", "exit2", "ensemble"}
    whole = Path(result["out"]) / "whole"
    assert (whole / "report.html").is_file()
    before, after = load_file(place / "run" / "model.safetensors"), load_file(whole / "model.safetensors")
    some = [name for name in before if "conv1.weight" in name or name.startswith("subnetworks.")]
    assert any(name.startswith("subnetworks.") for name in some)
    for name in some:
        similar = torch.nn.functional.cosine_similarity(before[name].flatten(), after[name].flatten(), dim=0)
        assert float(similar) > 0.9  # they were not drawn anew
    time = (whole / "model.safetensors").stat().st_mtime_ns
    assert transfer.classify(place / "run", **options)["finetune"] == result["finetune"]
    assert (whole / "model.safetensors").stat().st_mtime_ns == time


def test_fine_tuning_on_a_runs_own_data_sees_them_as_it_did(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("selfcon.workflows.transfer._RATES", (0.01,))
    monkeypatch.setattr("selfcon.workflows.transfer._DECAYS", (1e-4,))
    data = str(place / "stripes.npz")
    own: Any = {"per_class": 8, "val_fraction": 0.25, "augment.flip": False}
    selfcon.fit(data=data, out=tmp_path / "run", **{**SMALL, "epochs": 1, "probe.epochs": 1}, **own)
    result = transfer.classify(tmp_path / "run", data=data, modes=["finetune"], epochs=1, device="cpu")
    (short,) = Path(result["out"]).glob("choose-*")
    chosen, whole = (read_yaml(folder / "config.yaml") for folder in (short, Path(result["out"]) / "whole"))
    assert (chosen["val_fraction"], whole["val_fraction"]) == (0.25, 0.0)
    for settings in (chosen, whole):
        assert (settings["per_class"], settings["augment"]["flip"]) == (8, False)
    other = transfer.classify(tmp_path / "run", data=str(place / "waves"), modes=["finetune"], epochs=1, device="cpu")
    assert read_yaml(Path(other["out"]) / "whole" / "config.yaml")["per_class"] is None


def test_corruption(place: Path) -> None:
    pytest.importorskip("imagecorruptions")
    options: Any = {"corruptions": ["gaussian_noise", "contrast"], "severities": [1, 5], "samples": 12, "device": "cpu"}
    result = transfer.corruption(place / "run", **options)
    assert set(result["summary"]) == {"backbone", "exit2", "ensemble"}
    assert result["images"] == 12
    for name, errors in result["errors"].items():
        mean = np.mean([np.mean(each) for each in errors.values()])
        assert result["summary"][name]["mean_error"] == pytest.approx(mean)
        assert result["summary"][name]["relative_error"] == pytest.approx(mean - result["clean_error"][name])
    assert transfer.corruption(place / "run", **options) == result
    folder = place / "run" / "transfer"
    assert [path.name for path in folder.glob("corruption*.json")] == ["corruption.json"]
    transfer.corruption(place / "run", **{**options, "severities": [5]})
    (before,) = folder.glob("corruption-*.json")
    assert json.loads(before.read_text())["severities"] == [1, 5]
    assert json.loads((folder / "corruption.json").read_text())["severities"] == [5]


def test_imagenet_c_from_disk(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    selfcon.fit(data=str(place / "waves"), image_size=32, out=run, **{**SMALL, "epochs": 1, "batch_size": 10})
    for severity in (1, 2):
        for name in ("class0", "class1"):
            path = tmp_path / "fog" / str(severity) / name / "x.png"
            path.parent.mkdir(parents=True)
            Image.new("RGB", (40, 36), (100, 90, 80)).save(path)
    monkeypatch.setattr("selfcon.workflows.transfer.CORRUPTIONS", ("fog",))
    monkeypatch.setattr("selfcon.workflows.transfer.SEVERITIES", (1, 2))
    options: Any = {"corruptions": ("fog",), "severities": (1, 2), "imagenet_c": tmp_path, "device": "cpu"}
    result = transfer.corruption(run, **options)
    assert set(result["summary"]["ensemble"]) == {"mean_error", "relative_error"}  # AlexNet chose among 1,000 classes
    monkeypatch.setattr("selfcon.workflows.transfer._CLASSES_OF_ALEXNET", 2)
    result = transfer.corruption(run, **options)
    assert set(result["summary"]["ensemble"]) == {"mce", "relative_mce"}
    assert result["errors"]["ensemble"]["fog"] == [50.0, 50.0]  # equal images of two classes
    with pytest.raises(SelfconError, match="over all corruptions"):
        transfer.corruption(run, **{**options, "severities": (2,)})
    monkeypatch.setattr("selfcon.workflows.transfer.SEVERITIES", (1, 2, 3))
    with pytest.raises(SelfconError, match="CORRUPTION/SEVERITY/CLASS"):
        transfer.corruption(run, **{**options, "severities": (1, 2, 3)})


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["classify", "run", "--data", "waves", "--modes", "linar"], 64, "linear"),
        (["classify", "run", "--data", "nowhere/at-all"], 66, "no file or folder"),
        (["classify", "run", "--data", "waves", "--modes", "finetune", "--random"], 64, "fresh weights"),
        (["classify", "run"], 64, "--data"),
        (["classify", "run", "--data", "waves", "--modes", ""], 64, "at least one way"),
        (
            ["classify", "run", "--data", "waves", "--modes", "finetune", "--epochs", "0"],
            64,
            "epochs must be at least 1",
        ),
        (["classify", "run", "--data", "waves", "--seed", "-3"], 64, "--seed: wants a whole number from 0 on"),
        (["detect", "run", "--data", "waves", "--epochs", "0", "--lr", "nan"], 64, "epochs .*; lr should be a finite"),
        (["segment", "run", "--data", "waves", "--image-size", "0"], 64, "image_size should be"),
        (["corruption", "run", "--corruptions", "fogg"], 64, "fog"),
        (["corruption", "nowhere"], 66, "no folder nowhere"),
    ],
)
def test_mistakes(words: list[str], code: int, says: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    with pytest.raises(SelfconError, match=says) as told:
        command(["transfer", *words])
    assert told.value.exit_code == code


def test_verbs(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(place)
    assert command(["transfer", "classify", "run", "--data", "waves", "--modes", "knn"]) == 0
    assert "knn       backbone " in capsys.readouterr().out
    if pytest.importorskip("imagecorruptions"):
        words = ["transfer", "corruption", "run", "--corruptions", "contrast", "--severities", "1", "--samples", "8"]
        assert command(words) == 0
        assert "ensemble    clean" in capsys.readouterr().out


def test_segment(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("segmentation_models_pytorch")
    write_voc(tmp_path / "voc")
    folder = tmp_path / "voc" / "VOCdevkit" / "VOC2012"
    (folder / "ImageSets" / "Segmentation" / "train.txt").write_text("2012_0\n2012_1\n" * 2)
    options: Any = {"data": str(tmp_path / "voc"), "image_size": 32, "epochs": 2, "batch_size": 2, "device": "cpu"}
    result = transfer.segment(place / "run", out=tmp_path / "out", **options)
    assert 0 <= result["miou"] <= 100
    assert result["scenes"] == {"train": 4, "test": 1}
    assert (tmp_path / "out" / "predictions.png").read_bytes().startswith(b"\x89PNG")
    again = transfer.segment(place / "run", out=tmp_path / "out", **options)
    assert again["already_done"]
    assert again["miou"] == result["miou"]
    other = transfer.segment(place / "run", out=tmp_path / "other", **options)
    assert other["miou"] == result["miou"]  # the same run gives the same result
    with pytest.raises(SelfconError, match="other settings"):
        transfer.segment(place / "run", out=tmp_path / "out", **{**options, "epochs": 3})
    fresh = transfer.segment(place / "run", out=tmp_path / "fresh", random=True, **options)
    assert fresh["method"] == "none: fresh weights"
    monkeypatch.chdir(tmp_path)
    words = ["transfer", "segment", str(place / "run"), "--data", "voc", "--image-size", "32", "--epochs", "1"]
    assert command([*words, "--batch-size", "2", "--device", "cpu", "--out", "said"]) == 0
    assert "mIoU" in capsys.readouterr().out
    with pytest.raises(SelfconError, match="more than the 4 scenes"):
        command([*words, "--batch-size", "9", "--out", "large", "--device", "cpu"])


def test_detect(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pycocotools")
    write_voc(tmp_path / "voc")
    options: Any = {"data": str(tmp_path / "voc"), "image_size": 64, "epochs": 2, "batch_size": 1, "device": "cpu"}
    result = transfer.detect(place / "run", out=tmp_path / "out", **options)
    assert set(result) >= {"map", "map50", "map75", "scenes"}
    assert (tmp_path / "out" / "predictions.png").read_bytes().startswith(b"\x89PNG")
    assert transfer.detect(place / "run", out=tmp_path / "out", **options)["already_done"]
    with pytest.raises(SelfconError, match="task: 'detect' -> 'segment'"):
        transfer.segment(place / "run", out=tmp_path / "out", **options)
    monkeypatch.chdir(tmp_path)
    words = ["transfer", "detect", str(place / "run"), "--data", "voc", "--image-size", "64", "--epochs", "1"]
    assert command([*words, "--batch-size", "1", "--device", "cpu", "--out", "said", "--random"]) == 0
    assert "at IoU 0.5" in capsys.readouterr().out
