"""Few labels, uneven classes, and weights of others to begin with."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

import selfcon
from selfcon.cli.results import show_result
from selfcon.data.source import ArrayImages, Source
from selfcon.data.thinning import thin
from selfcon.errors import DataError, InputMissingError, SelfconWarning, UsageError
from selfcon.training.artifact import load_model
from selfcon.workflows.pipeline import make_pretraining, make_probing
from selfcon.workflows.settings import collect_settings
from selfcon.workflows.task import prepare, read_source
from selfcon.workflows.trained import open_run
from tests.cli.calling import call
from tests.workflows.conftest import write_noise, write_stripes

SMALL: dict[str, Any] = {"width": 0.125, "epochs": 2, "batch_size": 16, "probe.epochs": 2, "device": "cpu"}


def test_uneven_classes_in_balance(tmp_path: Path) -> None:
    data = str(write_stripes(tmp_path / "stripes.npz", train=160))
    folder = tmp_path / "run"
    words = ["fit", "--data", data, "--width", "0.125", "--epochs", "2", "--batch-size", "16", "--probe.epochs", "2"]
    done = call(*words, "--imbalance", "8", "--sampler", "balanced", "--out", folder, "--device", "cpu", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    train = open_run(folder, "cpu").split("train")  # and it is what was trained on
    assert torch.bincount(train.labels).tolist() == [40, 20, 10, 5]


@pytest.mark.parametrize(("stage", "sampler"), [("pretrain", "balanced"), ("probe", "balanced"), ("pretrain", "plain")])
def test_what_a_stage_sees_of_uneven_classes(stage: str, sampler: str, tmp_path: Path) -> None:
    data = str(write_stripes(tmp_path / "stripes.npz", train=160))
    given = {"data": data, "width": 0.125, "batch_size": 15, "probe.batch_size": 15, "imbalance": 8, "sampler": sampler}
    task = prepare(collect_settings(None, given), torch.device("cpu"))
    net = task.build_network(classifiers=False)
    work = make_pretraining(task, lambda *_: None) if stage == "pretrain" else make_probing(task, net)
    seen = torch.cat([batch.labels for batch in work.batches(1, 0)]).bincount(minlength=4)
    if sampler == "plain":
        assert seen.tolist() == [40, 20, 10, 5]
    else:
        assert seen.sum() == 75
        assert seen.max() - seen.min() <= 2


def test_uneven_and_few_together_and_from_classes_that_were_uneven() -> None:
    def sizes(counts: list[int], **how: Any) -> list[int]:
        labels = np.repeat(np.arange(len(counts)), counts)
        arrays = ArrayImages(np.zeros((len(labels), 1, 1, 3), np.uint8), labels, "some")
        source = Source("some", tuple(map(str, range(len(counts)))), train=arrays, test=arrays)
        return list(map(int, np.bincount(thin(source, seed=0, **how).train.labels)))

    assert sizes([100] * 3, per_class=20, imbalance=4) == [20, 10, 5]
    assert sizes([50, 10, 200], per_class=None, imbalance=10) == [31, 10, 3]
    with pytest.raises(DataError, match="There are 10 training images of '1', and 20 were asked for"):
        sizes([50, 10, 200], per_class=20, imbalance=None)


def test_some_are_drawn_by_the_seed() -> None:
    arrays = ArrayImages(np.zeros((40, 1, 1, 3), np.uint8), np.arange(40) % 2, "some")
    arrays.pixels[:, 0, 0, 0] = np.arange(40)
    source = Source("some", ("0", "1"), train=arrays, test=arrays)
    some = [thin(source, per_class=5, imbalance=None, seed=seed).train for seed in (0, 1)]
    chosen = [{int(images[row][0, 0, 0]) for row in range(len(images))} for images in some]
    assert chosen[0] != chosen[1]
    assert set(range(10)) not in chosen


def test_a_single_folder_is_tested_on_the_same_images_with_every_seed(tmp_path: Path) -> None:
    write_noise(tmp_path / "noise", images=12)
    options = {"data": str(tmp_path / "noise"), "val_fraction": 0.3}
    zero, one = (read_source(collect_settings(None, {**options, "seed": seed})) for seed in (0, 1))
    assert zero.test.paths == one.test.paths  # type: ignore[attr-defined]
    assert zero.val.paths != one.val.paths  # type: ignore[union-attr]


@pytest.mark.filterwarnings("always")
def test_weights_that_have_learnt_from_what_is_held_out_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_noise(tmp_path / "noise", images=12)
    data = str(tmp_path / "noise")
    small: dict[str, Any] = {
        "data": data,
        "width": 0.125,
        "epochs": 1,
        "batch_size": 8,
        "device": "cpu",
        "method": "ce",
    }
    selfcon.train(out=tmp_path / "first", **small)

    def told(**more: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            prepare(collect_settings(None, {**small, "weights": str(tmp_path / "first"), **more}), torch.device("cpu"))
        return [str(each.message) for each in caught if "learnt from" in str(each.message)]

    small.pop("device")
    assert told() == told(seed=1) == []  # what is tested on is the same
    assert "learnt from some of the held-out images here" in told(val_fraction=0.3)[0]
    assert "--seed 0 --val-fraction 0 holds out as there" in told(seed=1, val_fraction=0.3)[0]
    other = str(write_stripes(tmp_path / "stripes.npz"))
    assert told(data=other, val_fraction=0.3) == []
    selfcon.train(out=tmp_path / "held", val_fraction=0.5, keep_epochs=[1], device="cpu", **small)
    assert told(weights=str(tmp_path / "held"), val_fraction=0.3) == []  # which is a part of that half
    kept = str(tmp_path / "held" / "encoders" / "epoch-0001.safetensors")
    assert "held-out images" in told(weights=kept, val_fraction=0.6)[0]
    selfcon.export(tmp_path / "held", formats=["timm"])
    (exported,) = (tmp_path / "held" / "export").glob("*.safetensors")
    assert "held-out images" in told(weights=str(exported), val_fraction=0.6)[0]
    assert told(weights=str(exported), val_fraction=0.3) == []
    init: Any = {"weights": str(tmp_path / "first"), "val_fraction": 0.3}
    with pytest.warns(SelfconWarning, match="held-out images"):
        selfcon.train(out=tmp_path / "second", device="cpu", **small, **init)
    assert str(tmp_path / "first") in told(weights=str(tmp_path / "second"), val_fraction=0.3)[0]


def test_a_folder_that_was_moved_is_still_the_runs_own(tmp_path: Path) -> None:
    write_noise(tmp_path / "noise", images=20)
    small: dict[str, Any] = {"width": 0.125, "epochs": 1, "batch_size": 8, "device": "cpu", "method": "ce"}
    selfcon.train(data=str(tmp_path / "noise"), out=tmp_path / "run", **small)
    (tmp_path / "noise").rename(tmp_path / "moved")
    found = selfcon.evaluate(tmp_path / "run", data=str(tmp_path / "moved"), device="cpu")
    assert found["images"] == 8  # and not the 32 that it was trained on
    write_noise(tmp_path / "other", images=7)
    assert selfcon.evaluate(tmp_path / "run", data=str(tmp_path / "other"), device="cpu")["images"] == 14


def test_sub_networks_are_taken_over_one_by_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = str(write_stripes(tmp_path / "stripes.npz"))
    selfcon.pretrain(data=data, out=tmp_path / "first", width=0.125, epochs=1, batch_size=32, device="cpu")
    before, _ = load_model(tmp_path / "first")
    given = {"data": data, "width": 0.125, "exits": "2:fc,3:fc", "batch_size": 32, "weights": str(tmp_path / "first")}
    net = prepare(collect_settings(None, given), torch.device("cpu")).build_network(classifiers=False)
    for name, value in before.subnetworks["exit2"].state_dict().items():
        assert torch.equal(net.subnetworks["exit2"].state_dict()[name], value)
    assert "no weights that fit 'exit3': new ones are drawn" in capsys.readouterr().err


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
    monkeypatch.undo()  # before anybody fetches what would not fit
    for misfit in ({"stem": "large", "width": 0.25}, {"image_size": 32}, {"stem": "small"}):
        with pytest.raises(UsageError, match="for the full --width and the stem of large images"):
            prepare(small.model_copy(update=misfit), torch.device("cpu"))


def test_a_class_that_is_never_guessed_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    labels = np.array([0] * 40 + [1] * 4)
    arrays: dict[str, Any] = {
        f"{what}_{split}": value
        for split in ("train", "test")
        for what, value in (("x", rng.integers(0, 255, (44, 16, 16, 3), dtype=np.uint8)), ("y", labels))
    }
    np.savez(tmp_path / "uneven.npz", **arrays, classes=np.array(["often", "seldom"]))
    options: Any = {"epochs": 10, "batch_size": 22, "width": 0.125, "device": "cpu", "method": "ce"}
    result = selfcon.train(data=str(tmp_path / "uneven.npz"), out=tmp_path / "run", **options)
    answer = result["accuracy"]["ensemble"]
    assert result["never_guessed"] == ["seldom"]
    assert (answer["top1"], answer["mean_per_class"]) == (pytest.approx(100 * 40 / 44), 50.0)
    page = (tmp_path / "run" / "report.html").read_text()
    assert "mean of classes" in page
    assert "Never predicted by the backbone: seldom." in page
    found = selfcon.evaluate(tmp_path / "run", device="cpu")
    assert (found["never_guessed"], found["accuracy"]["ensemble"]["mean_per_class"]) == (["seldom"], 50.0)
    show_result(result, tmp_path / "run", as_json=False)
    shown = capsys.readouterr().out
    assert "mean of classes" in shown
    assert "never predicted by the backbone: 'seldom'" in shown
    even = selfcon.train(data=str(write_stripes(tmp_path / "even.npz")), out=tmp_path / "even", **options)
    assert "mean_per_class" not in even["accuracy"]["ensemble"]


@pytest.mark.filterwarnings("ignore::selfcon.errors.SelfconWarning")
def test_what_makes_accuracy_look_better_is_on_the_page(tmp_path: Path) -> None:
    write_noise(tmp_path / "noise", images=12)
    small: Any = {"data": str(tmp_path / "noise"), "width": 0.125, "epochs": 1, "batch_size": 8, "device": "cpu"}
    selfcon.train(out=tmp_path / "first", method="ce", **small)
    result = selfcon.train(
        out=tmp_path / "run", method="ce", weights=str(tmp_path / "first"), val_fraction=0.3, **small
    )
    (note,) = result["notes"]
    assert "learnt from some of the held-out images here" in note
    assert "learnt from some of the held-out images here" in (tmp_path / "run" / "report.html").read_text()
    assert "notes" not in selfcon.train(out=tmp_path / "first", method="ce", **small)


def test_a_run_finds_its_data_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_noise(tmp_path / "noise", images=20)
    small: Any = {"data": "noise", "width": 0.125, "epochs": 1, "batch_size": 8, "device": "cpu", "method": "ce"}
    selfcon.train(out="runs/noise", **small)
    expected = selfcon.evaluate("runs/noise", device="cpu")
    assert open_run("runs/noise", "cpu").settings.data == "noise"
    monkeypatch.chdir(tmp_path / "runs")  # where `noise` is the run
    assert selfcon.evaluate("noise", device="cpu") == expected
    larger = selfcon.transfer.classify(
        "noise", data=str(tmp_path / "noise"), modes=["knn"], image_size=24, device="cpu"
    )
    assert larger["images"] == {"train": 32, "test": 8}
    given = {**small, "data": str(tmp_path / "noise"), "weights": "noise", "val_fraction": 0.3}
    given.pop("device")
    with pytest.warns(SelfconWarning, match="learnt from some of the held-out"):  # by another path
        prepare(collect_settings(None, given), torch.device("cpu"))
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    selfcon.train(out="runs/noise", **small)
    assert "has changed" not in capsys.readouterr().err
    rng = np.random.default_rng(1)
    more = [Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)) for _ in range(5)]
    more[0].save(tmp_path / "noise" / "one" / "another.png")
    result = selfcon.train(out="runs/noise", **small)
    assert result["already_done"]
    said = capsys.readouterr()
    assert "then it had 32 train, 8 test images, now 33 train, 8 test" in said.err + said.out
    with pytest.raises(UsageError, match="would be split otherwise: images that it learnt from would be tested on"):
        selfcon.evaluate("runs/noise", data="noise", device="cpu")
    for number, image in enumerate(more[1:]):
        image.save(tmp_path / "noise" / "one" / f"more-{number}.png")
    again = {key: value for key, value in small.items() if key != "device"}
    with pytest.warns(SelfconWarning, match=r"runs/noise learnt from some of the test images here: .* than it is.$"):
        prepare(collect_settings(None, {**again, "weights": "runs/noise"}), torch.device("cpu"))
    (tmp_path / "noise").rename(tmp_path / "gone")
    with pytest.raises(InputMissingError, match=f"was trained on {tmp_path / 'noise'}, which is not there"):
        selfcon.evaluate("runs/noise", device="cpu")


def test_data_that_are_here_come_before_what_was_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_noise(tmp_path / "noise", images=20)
    small: Any = {"data": "noise", "width": 0.125, "epochs": 1, "batch_size": 8, "device": "cpu"}
    selfcon.pretrain(out="runs/first", **small)
    shutil.copytree(tmp_path, tmp_path.parent / f"{tmp_path.name}-copy")
    (tmp_path / "noise" / "one" / "1.png").rename(tmp_path / "1.png")
    monkeypatch.chdir(tmp_path.parent / f"{tmp_path.name}-copy")
    short: Any = {"probe.epochs": 1, "device": "cpu"}
    result = selfcon.probe("runs/first", out="runs/probed", **short)
    assert selfcon.evaluate("runs/probed", device="cpu")["images"] == 8
    (tmp_path / "1.png").rename(tmp_path / "noise" / "one" / "1.png")
    monkeypatch.chdir("runs")  # from where there is no `noise` to be seen
    assert selfcon.probe("first", out="again", **short)["accuracy"] == result["accuracy"]


@pytest.mark.parametrize("noted", [{"place": "x" * 5000}, {"place": "\0"}, {"place": 3, "images": [1]}, [1], "no JSON"])
def test_what_a_stranger_noted_of_data_breaks_nothing(
    noted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = write_stripes(tmp_path / "stripes.npz")
    small: Any = {"data": str(data), "width": 0.125, "epochs": 1, "batch_size": 8, "device": "cpu", "method": "ce"}
    selfcon.train(out="run", **small)
    Path("run", "data.json").write_text(noted if isinstance(noted, str) else json.dumps(noted))
    assert selfcon.train(out="run", **small)["already_done"]
    assert open_run("run", "cpu").settings.data == str(data)
    data.rename(tmp_path / "elsewhere.npz")
    with pytest.raises(InputMissingError, match="which is not there"):
        selfcon.evaluate("run", device="cpu")
    found = selfcon.evaluate("run", data="elsewhere.npz", device="cpu")
    assert found["images"] == 36
