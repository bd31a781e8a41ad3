"""The main job on small data: every method, the run folder, going on, and the numbers about a run."""

from __future__ import annotations

import importlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load, load_file

import selfcon
from selfcon.errors import DataError, InputMissingError, NonFiniteError, SelfconWarning, StoppedError, UsageError
from selfcon.networks.exits import parse_exits
from selfcon.training import checkpoint
from selfcon.training.artifact import load_model
from selfcon.workflows.doctor import examine, expected_positives
from selfcon.workflows.settings import collect_settings
from selfcon.workflows.task import find_size
from tests.cli.calling import call
from tests.workflows.conftest import write_noise, write_stripes

SMALL: dict[str, Any] = {"width": 0.125, "epochs": 2, "batch_size": 32, "probe.epochs": 3, "device": "cpu"}


def options(**more: Any) -> dict[str, Any]:
    return {**SMALL, **more}


@pytest.mark.parametrize("method", selfcon.list_methods())
def test_every_method_fits(method: str, stripes: Path, tmp_path: Path) -> None:
    result = selfcon.fit(data=str(stripes), method=method, out=tmp_path / "run", **SMALL)
    names = ["backbone", "exit2", "ensemble"] if selfcon.get_method(method).uses_exits else ["backbone", "ensemble"]
    assert list(result["accuracy"]) == names
    for values in result["accuracy"].values():
        assert set(values) == {"top1", "train_top1"}  # four classes: no top5
    assert {key: result[key] for key in ("method", "model", "epochs", "seed")} == {
        "method": method,
        "model": "resnet18",
        "epochs": 2,
        "seed": 0,
    }
    assert result["images_per_second"] > 0
    assert result["peak_memory_bytes"] > 0
    for name in ("config.yaml", "environment.json", "metrics.jsonl", "model.safetensors", "model.json", "report.html"):
        assert (tmp_path / "run" / name).stat().st_size > 0
    assert json.loads((tmp_path / "run" / "results.json").read_text()) == result


def test_it_learns_and_the_numbers_about_it_agree(stripes: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = options(epochs=10, val_fraction=0.25, keep_epochs=[5, 10], batch_size=24)
    settings["probe.epochs"] = 20
    settings["watch.knn_every"] = 5
    result = selfcon.fit(data=str(stripes), out=run, ema=0.8, **settings)
    assert result["accuracy"]["ensemble"]["top1"] > 70  # chance is 25
    assert set(result["held_out_accuracy"]) == {"backbone", "exit2", "ensemble"}
    again = selfcon.evaluate(run)
    for name, values in again["accuracy"].items():
        assert values["top1"] == pytest.approx(result["accuracy"][name]["top1"])
    for split, images, key, numbers in (
        ("train", 72, "train_top1", result["accuracy"]),
        ("val", 24, "top1", result["held_out_accuracy"]),
    ):
        found = selfcon.evaluate(run, split=split)
        assert found["images"] == images
        told = {name: values[key] for name, values in numbers.items()}
        assert told == pytest.approx({name: values["top1"] for name, values in found["accuracy"].items()})
        assert told != {name: values["top1"] for name, values in result["accuracy"].items()}
    assert set(selfcon.knn(run, k=5)["accuracy"]) == {"backbone", "exit2"}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines if line["stage"] == "pretrain"] == list(range(1, 11))
    assert [line["epoch"] for line in lines if "knn" in line] == [5, 10]
    net, facts = load_model(run)
    _, last = checkpoint.read_newest(run / "checkpoints" / "pretrain") or ("", None)
    assert last is not None
    kept = load_file(run / "encoders" / "epoch-0010.safetensors")
    for name, value in net.encoder.named_parameters():  # the average, and not the weights of the last step
        assert torch.equal(value, last.tensors[f"average.encoder.{name}"])
        assert torch.equal(value, kept[f"encoder.{name}"])
        assert not torch.equal(value, last.tensors[f"module.encoder.{name}"])
    assert (run / "encoders" / "epoch-0005.safetensors").exists()
    assert facts["classes"][0] == "rows"
    assert torch.isfinite(net(torch.randn(1, 3, 16, 16)).logits["exit2"]).all()
    with pytest.raises(DataError, match="other classes"):
        selfcon.evaluate(run, data="digits")
    with pytest.raises(UsageError, match="has no split 'dev'"):
        selfcon.evaluate(run, split="dev")


def test_the_loss_of_an_epoch_is_that_of_its_images(tmp_path: Path) -> None:
    data = str(write_stripes(tmp_path / "stripes.npz", train=99))
    losses = []
    for batch_size in (48, 99):  # the last batch has 3 images, and nothing is learnt
        run = tmp_path / str(batch_size)
        options: Any = {"width": 0.125, "norm": "group", "precision": "fp32", "device": "cpu"}
        selfcon.fit(data=data, out=run, method="ce", epochs=1, batch_size=batch_size, lr=1e-12, **options)
        losses.append(json.loads((run / "metrics.jsonl").read_text().splitlines()[0])["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize("method", ["selfcon", "supcon", "simclr"])
def test_an_encoder_that_has_not_begun_to_learn_is_told(
    method: str, stripes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = math.log(2 * 32 - 1)  # two features of each of 32 images, one of them the anchor
    selfcon.pretrain(data=str(stripes), out=tmp_path / "none", method=method, **options(epochs=1, lr=1e-12))
    before, said = capsys.readouterr().err.split("note: the loss ended at")
    assert f"is {base:.2f} where nothing is told apart" in said
    assert ("selfcon-1stage" in said) == (method != "simclr")
    assert "note: 3 steps are few for a contrastive loss. Use --epochs 1000, or a smaller --batch-size.\n" in before
    assert ("note: 96 training images are few for pretraining" in before) == (method != "simclr")
    if method == "supcon":
        selfcon.pretrain(data=str(stripes), out=tmp_path / "some", method=method, **options(epochs=10))
        assert "told apart" not in capsys.readouterr().err


def test_the_probe_can_be_watched_on_test_images(stripes: Path, tmp_path: Path) -> None:
    more = {"watch.test_in_probe": True, "method": "selfcon-mu-released"}
    result = selfcon.fit(data=str(stripes), out=tmp_path / "run", **options(**more))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    watched = [line for line in lines if line["stage"] == "probe"]
    assert len(watched) == 3
    for name, values in result["accuracy"].items():
        assert watched[-1][f"test_{name}"] == pytest.approx(values["top1"])


def test_a_learned_temperature(stripes: Path, tmp_path: Path) -> None:
    more = {"loss.learn_temperature": True, "loss.temperature": 0.2, "ema": 0.5}
    selfcon.fit(data=str(stripes), out=tmp_path / "run", **options(**more))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    learned = [line["temperature"] for line in lines if line["stage"] == "pretrain"]
    assert len(learned) == 2
    assert 0.01 < learned[1] < 1
    assert learned[1] != learned[0] != 0.2
    assert not any("temperature" in name for name in load_file(tmp_path / "run" / "model.safetensors"))


def test_the_default_run_directory_is_that_of_the_command_line(
    stripes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline, opened = importlib.import_module("selfcon.workflows.pipeline"), []

    def refuse(path: Path, *_: Any, **__: Any) -> Any:
        opened.append(path)
        raise UsageError("This test does not train.")

    monkeypatch.setattr(pipeline.RunFolder, "open", refuse)
    for train, method in ((selfcon.fit, "selfcon"), (selfcon.pretrain, "supcon"), (selfcon.train, "ce")):
        with pytest.raises(UsageError, match="does not train"):
            train(data=str(stripes), method=method, **SMALL)
    done = call("fit", "--data", stripes, "--device", "cpu", cwd=tmp_path)
    assert "does not train" in done.stderr
    assert opened == [Path("runs") / f"stripes-resnet18-{name}" for name in ("selfcon", "supcon", "ce", "selfcon")]


def test_done_is_said_and_other_settings_are_refused(stripes: Path, tmp_path: Path) -> None:
    first = selfcon.fit(data=str(stripes), out=tmp_path / "run", **SMALL)
    weights = (tmp_path / "run" / "model.safetensors").read_bytes()
    assert "already_done" not in first
    assert selfcon.fit(data=str(stripes), out=tmp_path / "run", **SMALL)["already_done"]
    with pytest.raises(UsageError, match=r"other settings \(seed: 0 -> 1\)"):
        selfcon.fit(data=str(stripes), out=tmp_path / "run", seed=1, **SMALL)
    selfcon.fit(data=str(stripes), out=tmp_path / "run", seed=1, overwrite=True, **SMALL)
    assert (tmp_path / "run" / "model.safetensors").read_bytes() != weights


def files_of(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_what_is_overwritten_stays_until_there_is_something_else(
    stripes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    selfcon.fit(data=str(stripes), out=run, **SMALL)
    (run / "train.log").write_text("somebody's")
    before = files_of(run)
    for refused in ({"data": "nosuch.npz"}, {"data": str(stripes), "stream": True, "augment.policy": "randaugment"}):
        with pytest.raises((UsageError, InputMissingError)):
            selfcon.fit(out=run, overwrite=True, **{**SMALL, **refused})
        assert files_of(run) == before

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("in the first step")

    with monkeypatch.context() as patched:
        patched.setattr("selfcon.training.trainer.Trainer.update", fail)
        with pytest.raises(RuntimeError, match="in the first step"):
            selfcon.fit(data=str(stripes), out=run, overwrite=True, **SMALL)
    assert files_of(run) == before


def test_what_was_set_aside_comes_back_after_a_kill(stripes: Path, tmp_path: Path) -> None:
    """Killed while it was set aside, after that while the data were read, and while it was removed."""
    run = tmp_path / "run"
    done = selfcon.fit(data=str(stripes), out=run, **SMALL)
    every = ["config.yaml", *sorted(path.name for path in run.iterdir() if path.name not in (".lock", "config.yaml"))]
    for moved in (every[:2], every):
        (run / ".before").mkdir()
        for name in moved:
            (run / name).rename(run / ".before" / name)
        if moved == every:
            (run / ".data.json.1.999999.part").write_text("{")
            (run / "method.json").write_text("{}")
            (run / "config.yaml").write_text("seed: 7\n")
        again = selfcon.fit(data=str(stripes), out=run, **SMALL)
        assert again.pop("already_done")
        assert again == done
        assert not (run / ".before").exists()
        assert not (run / "method.json").exists()
    (run / ".before" / "checkpoints").mkdir(parents=True)
    assert selfcon.fit(data=str(stripes), out=run, **SMALL)["already_done"]
    assert not (run / ".before").exists()


def test_a_run_needs_the_weights_no_more_that_it_began_with(stripes: Path, tmp_path: Path) -> None:
    selfcon.pretrain(data=str(stripes), out=tmp_path / "first", **SMALL)
    shutil.copy(tmp_path / "first" / "model.safetensors", tmp_path / "weights.safetensors")
    call_it = {"data": str(stripes), "out": tmp_path / "run", "weights": str(tmp_path / "weights.safetensors"), **SMALL}
    selfcon.pretrain(**call_it)
    (tmp_path / "weights.safetensors").unlink()
    assert selfcon.pretrain(**call_it)["already_done"]
    (tmp_path / "run" / "results.json").unlink()
    assert "already_done" not in selfcon.pretrain(**call_it)  # from its last checkpoint


def test_a_refused_run_with_a_log_leaves_nothing(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra [log] is not installed")
    with pytest.raises(InputMissingError):
        selfcon.fit(data="nosuch.npz", out=tmp_path / "run", log="tensorboard", **SMALL)
    assert not (tmp_path / "run").exists()


def test_pretrain_and_probe_are_fit(stripes: Path, tmp_path: Path) -> None:
    whole = selfcon.fit(data=str(stripes), out=tmp_path / "whole", **SMALL)
    bare = selfcon.pretrain(data=str(stripes), out=tmp_path / "parts", **SMALL)
    assert "accuracy" not in bare
    with pytest.raises(UsageError, match="has no classifiers yet"):
        selfcon.evaluate(tmp_path / "parts")
    parts = selfcon.probe(tmp_path / "parts", device="cpu")
    assert parts["accuracy"] == whole["accuracy"]
    same = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "parts")]
    assert same[0] == same[1]
    with pytest.raises(UsageError, match="trains in one stage"):
        selfcon.pretrain(data=str(stripes), out=tmp_path / "x", method="ce", **SMALL)
    with pytest.raises(UsageError, match="trains in two stages"):
        selfcon.train(data=str(stripes), out=tmp_path / "x", **SMALL)
    selfcon.train(data=str(stripes), out=tmp_path / "ce", method="ce", **SMALL)
    with pytest.raises(UsageError, match="classifiers are trained already"):
        selfcon.probe(tmp_path / "ce")
    with pytest.raises(InputMissingError):
        selfcon.probe(tmp_path / "nothing")


def test_another_probe_on_the_same_encoder(stripes: Path, tmp_path: Path) -> None:
    first = selfcon.fit(data=str(stripes), out=tmp_path / "run", **SMALL)
    same = selfcon.probe(tmp_path / "run", out=tmp_path / "same", device="cpu")
    assert same["accuracy"] == first["accuracy"]
    other = selfcon.probe(tmp_path / "run", out=tmp_path / "longer", device="cpu", probe={"epochs": 9})
    assert other["accuracy"] != first["accuracy"]
    lines = [json.loads(line) for line in (tmp_path / "longer" / "metrics.jsonl").read_text().splitlines()]
    assert [line["stage"] for line in lines] == ["pretrain"] * 2 + ["probe"] * 9
    nine: Any = {"probe.epochs": 9}
    again = selfcon.probe(tmp_path / "run", out=tmp_path / "longer", device="cpu", **nine)
    assert again == {**other, "already_done": True}
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("run", "longer")]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0] if not key.startswith("classif"))
    refused: list[tuple[dict[str, Any], str]] = [
        ({"out": tmp_path / "x", "epochs": 9}, "'epochs' cannot be set here"),
        (nine, "a folder of its own"),
        ({"out": tmp_path / "run", **nine}, "is the run itself"),
        ({"out": tmp_path / "longer", "probe.epochs": 5}, "probe.epochs: 9 -> 5"),
    ]
    for wrong, words in refused:
        with pytest.raises(UsageError, match=words):
            selfcon.probe(tmp_path / "run", device="cpu", **wrong)
    (tmp_path / "half").mkdir()  # a copy that was killed: the encoder is taken over again, not trained
    shutil.copy(tmp_path / "longer" / "config.yaml", tmp_path / "half")
    (tmp_path / "half" / "checkpoints" / "pretrain" / ".step-000000006.part").mkdir(parents=True)
    half = selfcon.probe(tmp_path / "run", out=tmp_path / "half", device="cpu", **nine)
    assert half["accuracy"] == other["accuracy"]
    copied = [(tmp_path / name / "metrics.jsonl").read_text().splitlines()[:2] for name in ("run", "half")]
    assert copied[0] == copied[1]  # to the seconds that it took
    selfcon.fit(data=str(stripes), out=tmp_path / "run", seed=1, overwrite=True, **SMALL)
    settings = (tmp_path / "run" / "config.yaml").read_text().replace("seed: 1", "seed: 0")
    (tmp_path / "run" / "config.yaml").write_text(settings)  # as if its data had changed
    with pytest.raises(UsageError, match="has another encoder than"):
        selfcon.probe(tmp_path / "run", out=tmp_path / "longer", device="cpu", **nine)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(InputMissingError, match="no checkpoint of its whole pretraining"):
        selfcon.probe(tmp_path / "run", out=tmp_path / "y", device="cpu")
    done = call("probe", tmp_path / "longer", "--out", tmp_path / "z", "--probe.epoch", "9", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (
        64,
        "selfcon: Unknown option '--probe.epoch'; did you mean '--probe.epochs'?\n",
    )


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("optimiser", ["sgd", "lars"])
def test_precisions_and_optimisers(stripes: Path, tmp_path: Path, precision: str, optimiser: str) -> None:
    more = {"optim.name": optimiser, "optim.clip_norm": 5.0, "precision": precision}
    selfcon.fit(data=str(stripes), out=tmp_path / "run", **options(**more))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    first, second = (line["loss"] for line in lines if line["stage"] == "pretrain")
    assert np.isfinite([first, second]).all()
    assert first != second  # something was updated


def test_a_loss_that_is_not_finite_ends_the_run(stripes: Path, tmp_path: Path) -> None:
    more = {"optim.name": "sgd", "lr": 1e30}
    with pytest.raises(
        NonFiniteError, match=r"at step 2 of pretrain \(epoch 1\).* There is no checkpoint yet"
    ) as caught:
        selfcon.fit(data=str(stripes), out=tmp_path / "run", **options(**more))
    assert caught.value.exit_code == 76


def test_a_step_that_is_not_finite_names_the_last_checkpoint(
    stripes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, run = importlib.import_module("selfcon.training.loop"), tmp_path / "run"
    stop_at(monkeypatch, 1, signal.SIGTERM)
    with pytest.raises(StoppedError):
        selfcon.fit(data=str(stripes), out=run, **SMALL)
    monkeypatch.undo()
    before = {path: path.read_bytes() for path in (run / "checkpoints").rglob("state.*")}
    original = loop.Trainer.update

    def broken(self: Any, images: Any, labels: Any, step: int) -> None:
        if step == 3:
            next(iter(self.stage.module.parameters())).data.fill_(float("nan"))
        original(self, images, labels, step)

    monkeypatch.setattr(loop.Trainer, "update", broken)
    with pytest.raises(NonFiniteError, match=r"at step 4 of pretrain .* The last checkpoint is .*step-000000002"):
        selfcon.fit(data=str(stripes), out=run, **SMALL)
    assert {path: path.read_bytes() for path in (run / "checkpoints").rglob("state.*")} == before


def test_a_checkpoint_of_an_earlier_version_ends_with_the_same_loss(
    stripes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    selfcon.fit(data=str(stripes), out=tmp_path / "whole", **SMALL)
    stop_at(monkeypatch, 1, signal.SIGTERM)
    with pytest.raises(StoppedError):
        selfcon.fit(data=str(stripes), out=tmp_path / "run", **SMALL)
    monkeypatch.undo()
    folder = tmp_path / "run" / "checkpoints" / "pretrain"
    found = checkpoint.read_newest(folder)
    assert found is not None
    name, kept = found
    kept.tensors["loss_sum"] = kept.tensors.pop("loss_of_images") / SMALL["batch_size"]  # over batches, as it was
    checkpoint.save(folder, name, kept)
    selfcon.fit(data=str(stripes), out=tmp_path / "run", **SMALL)
    lines = [(tmp_path / each / "metrics.jsonl").read_text().splitlines()[0] for each in ("whole", "run")]
    whole, resumed = (json.loads(line)["loss"] for line in lines)
    assert resumed == pytest.approx(whole, rel=1e-9)


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int, number: signal.Signals, stage: str = "pretrain") -> None:
    """Send a signal to this process in the middle of an update."""
    trainer = importlib.import_module("selfcon.training.loop").Trainer
    original = trainer.update

    def update(self: Any, images: Any, labels: Any, at: int) -> None:
        original(self, images, labels, at)
        if (self.stage.name, at) == (stage, step):
            os.kill(os.getpid(), number)

    monkeypatch.setattr(trainer, "update", update)


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(each, marks=pytest.mark.slow) for each in (signal.SIGINT, signal.SIGUSR1))],
)
@pytest.mark.parametrize("stage", ["pretrain", "probe"])
def test_stopped_anywhere_it_ends_with_the_same_bytes(
    number: signal.Signals, stage: str, stripes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {"ema": 0.9, "precision": "fp16", "optim.clip_norm": 1.0, "probe.batch_size": 32}
    kept = {"data": str(stripes), **options(**more)}
    whole = selfcon.fit(out=tmp_path / "whole", **kept)
    stop_at(monkeypatch, 4, number, stage)
    with pytest.raises(StoppedError, match=number.name) as caught:
        selfcon.fit(out=tmp_path / "run", **kept)
    assert caught.value.exit_code == 75
    monkeypatch.undo()
    newest = max((tmp_path / "run" / "checkpoints" / stage).iterdir())
    assert json.loads((newest / "state.json").read_text())["batch"] == 2  # in the middle of the second epoch of three
    again = selfcon.fit(out=tmp_path / "run", **kept)
    assert again["accuracy"] == whole["accuracy"]
    same = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "run")]
    assert same[0] == same[1]


def test_what_was_begun_with_overwrite_goes_on_without_and_where_torchrun_begins_it_anew(
    stripes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = {"data": str(stripes), **options(epochs=3, **{"model_options.drop_path_rate": 0.3})}
    whole = selfcon.fit(out=tmp_path / "whole", **kept)
    selfcon.pretrain(out=tmp_path / "run", data=str(stripes), **options(epochs=1))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with monkeypatch.context() as stopping:
        stopping.setattr("selfcon.workflows.pipeline._check_same_data", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(StoppedError, match="the same command goes on from here"):  # the old run is there again
            selfcon.fit(out=tmp_path / "run", overwrite=True, **kept)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with monkeypatch.context() as stopping:
        stop_at(stopping, 4, signal.SIGTERM)
        with pytest.raises(StoppedError, match="the same command without --overwrite goes on from here"):
            selfcon.fit(out=tmp_path / "run", overwrite=True, **kept)  # which is not of this launch, and overwritten
    capsys.readouterr()
    assert selfcon.fit(out=tmp_path / "run", overwrite=True, **kept)["accuracy"] == whole["accuracy"]
    assert "goes on in epoch 2 of 3" in capsys.readouterr().err
    # Also what is drawn in the network, such as which of its parts are left out, is what it would have been.
    same = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "run")]
    assert same[0] == same[1]


def test_a_run_whose_model_is_gone_is_not_done(stripes: Path, tmp_path: Path) -> None:
    kept = {"data": str(stripes), **options()}
    selfcon.fit(out=tmp_path / "run", **kept)
    model = (tmp_path / "run" / "model.safetensors").read_bytes()
    (tmp_path / "run" / "model.safetensors").unlink()
    assert "already_done" not in selfcon.fit(out=tmp_path / "run", **kept)
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == model


@pytest.mark.parametrize(
    ("name", "value", "base"),
    [
        ("probe.weight_decay", 0.1, {}),
        ("probe.schedule.kind", "constant", {}),
        ("probe.momentum", 0.5, {}),
        ("loss.alpha", 3.0, {"method": "selfcon-star"}),
        ("augment.strength", 2.0, {}),
        ("optim.nesterov", True, {"optim.name": "sgd"}),
        ("optim.beta2", 0.9, {"optim.name": "adamw"}),
        ("sampler", "balanced", {"imbalance": 4}),
    ],
)
def test_what_is_asked_for_changes_what_is_learnt(
    name: str, value: Any, base: dict[str, Any], stripes: Path, tmp_path: Path
) -> None:
    kept = {"data": str(stripes), **options(epochs=1, **base)}
    selfcon.fit(out=tmp_path / "usual", **kept)
    selfcon.fit(out=tmp_path / "other", **kept, **{name: value})
    usual, other = (load_file(tmp_path / run / "model.safetensors") for run in ("usual", "other"))
    part = "classifiers" if name.startswith("probe.") else "encoder"
    assert any(not torch.equal(tensor, other[key]) for key, tensor in usual.items() if key.startswith(part))
    if part == "classifiers":
        assert all(torch.equal(tensor, other[key]) for key, tensor in usual.items() if key.startswith("encoder"))


@pytest.mark.parametrize(
    ("method", "given", "told"),
    [
        ("selfcon", {"loss.alpha": 5.0}, "the loss of selfcon has no alpha"),
        ("selfcon-star", {"loss.alpha": 5.0}, ""),
        ("ce", {"loss.temperature": 0.5}, "ce contrasts nothing: its loss has no temperature"),
        ("selfcon-1stage", {"loss.temperature": 0.5}, ""),
        ("supcon", {"exits": "2:fc"}, "exits are not used"),
        ("supcon", {}, ""),
    ],
)
def test_what_a_method_does_not_use_is_told(
    method: str, given: dict[str, Any], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    collect_settings(None, {"data": "x.npz", "method": method, **given})
    said = capsys.readouterr().err
    assert told in said
    assert bool(told) == ("note:" in said)


_ABRUPT = """
import itertools, os, signal, sys
from selfcon.cli.main import main
from selfcon.training import loop
how, number, update, sync = sys.argv[1], itertools.count(1), loop.Trainer.update, os.fsync
def updated(self, images, labels, step):
    update(self, images, labels, step)
    if step == 4 and how != "killed while it saves":
        os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGINT)
def synchronised(handle):
    path = os.readlink(f"/proc/self/fd/{handle}")
    end = {"killed while it saves": signal.SIGKILL, "interrupted twice": signal.SIGINT}.get(how)
    if end and f".step-00000000{4 if end == signal.SIGKILL else 5}.part/.state.safetensors." in path:
        os.ftruncate(handle, os.fstat(handle).st_size // 2)
        os.kill(os.getpid(), end)
    sync(handle)
loop.Trainer.update, os.fsync = updated, synchronised
loop._Saves.due = property(lambda self: next(number) % 2 == 0)  # a checkpoint after every other step
main(sys.argv[2:])
"""


def find_leftovers(run: Path) -> list[Path]:
    return [path for path in run.rglob("*") if path.name.startswith(".") and path.name.endswith(".part")]


def read_all(run: Path) -> int:
    """How many files of a run there are, all of which can be read to their end; leftovers of a save are none of it."""
    readers: dict[str, Any] = {".json": json.loads, ".yaml": yaml.safe_load, ".safetensors": load, ".html": str}
    readers[".jsonl"] = lambda text: [json.loads(line) for line in text.splitlines()]
    files = [path for path in run.rglob("*.*") if path.is_file() and not path.name.startswith(".")]
    files = [path for path in files if not any(part.endswith(".part") for part in path.parts)]
    for path in files:
        readers[path.suffix](path.read_bytes() if path.suffix == ".safetensors" else path.read_text(encoding="utf-8"))
    return len(files)


def read_outcome(run: Path) -> dict[str, Any]:
    """What a run left behind, but for times: weights, the optimiser of each stage at its end, metrics."""
    newest = [max((run / "checkpoints" / stage).iterdir()) / "state.safetensors" for stage in ("pretrain", "probe")]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(any(name.startswith("optimizer.") for name in load_file(path)) for path in newest)
    return {
        "weights": (run / "model.safetensors").read_bytes(),
        **{str(path.relative_to(run)): path.read_bytes() for path in newest},
        "metrics": [{key: value for key, value in line.items() if key != "seconds"} for line in lines],
    }


@pytest.mark.parametrize(
    ("how", "code", "first"),
    [
        pytest.param("killed", -9, 4, marks=pytest.mark.slow),
        ("killed while it saves", -9, 2),
        pytest.param("interrupted twice", 130, 4, marks=pytest.mark.slow),
    ],
)
def test_ended_at_once_it_goes_on_with_the_same_bytes(
    how: str, code: int, first: int, stripes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    arguments = ["fit", "--data", str(stripes), "--out", str(run), "--epochs", "2", "--batch-size", "32"]
    arguments += ["--width", "0.125", "--probe.epochs", "3", "--device", "cpu"]
    ended = subprocess.run([sys.executable, "-c", _ABRUPT, how, *arguments], check=False, capture_output=True)
    assert ended.returncode == code, ended.stderr
    assert read_all(run) >= 5
    assert bool(find_leftovers(run)) == (how != "killed")
    assert (run / "checkpoints" / "pretrain" / f"step-{first:09d}").exists()
    trainer = importlib.import_module("selfcon.training.loop").Trainer
    original, steps = trainer.update, []

    def update(self: Any, images: Any, labels: Any, step: int) -> None:
        steps.append(step)
        original(self, images, labels, step)

    monkeypatch.setattr(trainer, "update", update)
    selfcon.fit(data=str(stripes), out=run, **SMALL)
    assert steps == [*range(first, 6), *range(3)]  # the rest of the pretraining, and the probe
    selfcon.fit(data=str(stripes), out=tmp_path / "whole", **SMALL)
    assert read_outcome(run) == read_outcome(tmp_path / "whole")
    assert find_leftovers(run) == []


def test_device_and_logging_may_differ_where_a_run_goes_on(
    stripes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard", reason="the extra [log] is not installed")
    selfcon.fit(data=str(stripes), out=tmp_path / "whole", **SMALL)
    stop_at(monkeypatch, 4, signal.SIGTERM)
    with pytest.raises(StoppedError):
        selfcon.fit(data=str(stripes), out=tmp_path / "run", **SMALL)
    monkeypatch.undo()
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)  # so that any device is a CPU
    again = options(device="auto", log=["tensorboard"], compile=False, deterministic=True)
    selfcon.fit(data=str(stripes), out=tmp_path / "run", **again)
    assert list((tmp_path / "run" / "tensorboard").glob("events*"))
    assert read_outcome(tmp_path / "run") == read_outcome(tmp_path / "whole")


def test_a_report_that_failed_is_written_the_next_time(
    stripes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = importlib.import_module("selfcon.workflows.pipeline")
    monkeypatch.setattr(pipeline, "render", lambda pages: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        selfcon.fit(data=str(stripes), out=tmp_path / "run", **SMALL)
    assert (tmp_path / "run" / "results.json").exists()
    monkeypatch.undo()
    selfcon.fit(data=str(stripes), out=tmp_path / "run", **SMALL)
    assert (tmp_path / "run" / "report.html").exists()
    assert selfcon.fit(data=str(stripes), out=tmp_path / "run", **SMALL)["already_done"]


def test_a_probe_waits_for_the_whole_pretraining(
    stripes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_at(monkeypatch, 4, signal.SIGTERM)
    with pytest.raises(StoppedError):
        selfcon.pretrain(data=str(stripes), out=tmp_path / "run", **SMALL)
    monkeypatch.undo()
    with pytest.raises(UsageError, match="pretrained for 1 of 2 epochs"):
        selfcon.probe(tmp_path / "run")


def test_folders_of_other_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    root = tmp_path / "my data [ü]"
    for split in ("train", "val"):
        for label, name in enumerate(("cat", "dog [1]")):
            (root / split / name).mkdir(parents=True)
            for number in range(6):
                pixels = rng.integers(0, 120, (20 + number, 30, 3)) + 100 * label
                Image.fromarray(pixels.astype(np.uint8)).save(root / split / name / f"{number}.jpg")
    with pytest.raises(UsageError, match="choose it with --image-size"):
        selfcon.fit(data=str(root), out=tmp_path / "run", **SMALL)
    with pytest.warns(SelfconWarning, match="each epoch is one step"):
        result = selfcon.fit(data=str(root), out=tmp_path / "out [ü]", image_size=16, **SMALL)
    assert f"note: {root} has no test folder, so val is the test set. Use --val-fraction" in capsys.readouterr().err
    assert list(result["accuracy"]) == ["backbone", "exit2", "ensemble"]
    assert selfcon.evaluate(tmp_path / "out [ü]")["images"] == 12


def test_small_squares_in_files_need_no_size(tmp_path: Path) -> None:
    write_noise(tmp_path / "noise", images=10)
    assert find_size(selfcon.data.load(tmp_path / "noise")) == 16
    Image.new("RGB", (16, 17)).save(tmp_path / "noise" / "one" / "9.png")
    assert find_size(selfcon.data.load(tmp_path / "noise")) is None
    for path in (tmp_path / "noise").rglob("*.png"):
        Image.new("RGB", (97, 97)).save(path)
    assert find_size(selfcon.data.load(tmp_path / "noise")) is None, "a size that takes long is chosen"


@pytest.mark.slow
def test_eight_channels_and_an_odd_batch_do_not_break_the_process(stripes: Path, tmp_path: Path) -> None:
    """They do with channels last on a CPU, in PyTorch 2.15: the process is aborted, so it must be another one."""
    code = f"import selfcon; selfcon.fit(data={str(stripes)!r}, out='run', **{options(batch_size=29)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_short_run_imports_only_what_it_uses(tmp_path: Path) -> None:
    code = f"""
import sys
import selfcon
from selfcon.training.trainer import Trainer

heavy, update, first = {{"matplotlib", "pandas", "scipy", "sklearn", "umap"}}, Trainer.update, set()

def look(*given):
    first.update(heavy & set(sys.modules))
    update(*given)

Trainer.update = look
selfcon.fit(data="digits", out="run", limit_batches=1, **{options(epochs=1)!r})
print(sorted(first), sorted(heavy & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[] ['matplotlib']", "the report draws"


def test_a_last_batch_of_one_image_is_foreseen(tmp_path: Path) -> None:
    data = write_stripes(tmp_path / "x.npz", train=33, side=8)
    with pytest.raises(UsageError, match="choose another --batch-size than 32"):
        selfcon.fit(data=str(data), out=tmp_path / "run", **SMALL)
    selfcon.fit(data=str(data), out=tmp_path / "run2", **options(batch_size=31))
    for more in ({"batch_size": 15, "micro_batch": 2}, {"batch_size": 11, "micro_batch": 1}, {"batch_size": 1}):
        with pytest.raises(UsageError, match=f"choose another --batch-size than {more['batch_size']}"):
            selfcon.fit(data=str(data), out=tmp_path / "run3", **options(**more))


def test_other_data_under_the_same_name_are_noticed(tmp_path: Path) -> None:
    data = write_stripes(tmp_path / "x.npz")
    selfcon.pretrain(data=str(data), out=tmp_path / "run", **SMALL)
    write_stripes(data, train=100)
    with pytest.raises(UsageError, match=r"has changed since .* began \(test, train\)"):
        selfcon.probe(tmp_path / "run", device="cpu")
    write_stripes(data)
    selfcon.probe(tmp_path / "run", device="cpu")
    write_stripes(data, test=40)
    with pytest.raises(UsageError, match=r"is not what .* was trained on"):
        selfcon.evaluate(tmp_path / "run")


@pytest.mark.parametrize("place", ["prepare", "predict", "render"])
def test_signals_outside_the_loop(place: str, stripes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("selfcon.workflows.pipeline")
    original = getattr(module, place)

    def interrupted(*args: Any, **keywords: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return original(*args, **keywords)

    monkeypatch.setattr(module, place, interrupted)
    if place == "render":  # so near the end, it is ended
        assert selfcon.fit(data=str(stripes), out=tmp_path / "run", **SMALL)["accuracy"]
        return
    with pytest.raises(StoppedError, match="Stopped by SIGTERM"):
        selfcon.fit(data=str(stripes), out=tmp_path / "run", **SMALL)
    monkeypatch.undo()
    assert selfcon.fit(data=str(stripes), out=tmp_path / "run", **SMALL)["accuracy"]


def test_a_batch_of_singletons_trains_and_says_so(tmp_path: Path) -> None:
    x, other = np.random.default_rng(0).integers(0, 256, (2, 8, 16, 16, 3), dtype=np.uint8)
    np.savez(tmp_path / "x.npz", x_train=x, y_train=np.arange(8), x_test=other, y_test=np.arange(8))
    with pytest.warns(SelfconWarning, match="no anchor of this batch has a positive"):
        selfcon.fit(data=str(tmp_path / "x.npz"), out=tmp_path / "run", method="supcon-s", **options(batch_size=4))


def test_wrong_settings_before_any_work(stripes: Path, tmp_path: Path) -> None:
    for more, words in (
        ({"exits": "9:fc"}, "no exit after stage 9; valid stages: 1, 2, 3"),
        ({"exits": "none"}, "selfcon needs a sub-network"),
        ({"augment.scale": [0.9, 0.2]}, "from a smaller to a larger share"),
        ({"probe.augment.scale": [0.9, 0.2]}, "from a smaller to a larger share"),
        ({"init": "x.safetensors"}, "did you mean 'weights'"),
        ({"model": "resnet81"}, "did you mean 'resnet18'"),
        ({"device": "tpu"}, "The device 'tpu' cannot be used here"),
        ({"log": ["tensorbord"]}, "did you mean 'tensorboard'"),
    ):
        with pytest.raises(UsageError, match=words):
            selfcon.fit(data=str(stripes), out=tmp_path / "run", **options(**more))
    assert not (tmp_path / "run").exists()
    assert [leave.name for leave in parse_exits("1:fc, 3:same")] == ["exit1", "exit3"]


def test_what_was_refused_leaves_no_folder(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "runs" / "other").mkdir(parents=True)
    for out in ("new/deep/run", "mine", "runs/run"):
        with pytest.raises(InputMissingError, match="no file or folder"):
            selfcon.fit(data=str(tmp_path / "nothing.npz"), out=tmp_path / out, **SMALL)
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert left == ["mine", "runs", "runs/other"]


def test_tensorboard(stripes: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra [log] is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = selfcon.fit(data=str(stripes), out=tmp_path / "run", log=["tensorboard"], **SMALL)
    seen = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [each.step for each in seen.Scalars("pretrain/loss")] == [1, 2]
    assert seen.Scalars("test/ensemble")[0].value == pytest.approx(result["accuracy"]["ensemble"]["top1"])
    assert b"batch_size: 32" in seen.Tensors("settings/text_summary")[0].tensor_proto.string_val[0]
    assert "_hparams_/session_start_info" in seen.summary_metadata


def test_the_report_shows_names_as_text(stripes: Path, tmp_path: Path) -> None:
    selfcon.fit(data=str(stripes), out=tmp_path / "run", **SMALL)
    page = (tmp_path / "run" / "report.html").read_text()
    assert "<b>wide</b>" not in page
    assert "&lt;b&gt;wide&lt;/b&gt;" in page
    assert "http://" not in page
    assert "https://" not in page
    assert page.count("<script") == 1  # our own, by its hash
    assert page.count("data:image/png") >= 3


def test_doctor(stripes: Path) -> None:
    bare = examine()
    assert bare.machine["cores"]
    assert bare.task == {}
    findings = examine(data=str(stripes), width=0.125, batch_size=2, method="supcon", device="cpu")
    assert findings.task["positives of an anchor"].startswith("1.5")  # its other view, and 2 · (2 - 1) / 4 others
    assert findings.task["pretraining"].startswith("100 epochs, 4,800 updates, about ")
    assert findings.task["probe"].startswith("100 epochs, 100 updates, about ")
    assert float(findings.task["memory to expect"].split()[0]) > 0.1
    milliseconds, a_second = (
        float(part.split()[0].replace(",", "")) for part in findings.task["an update"].split(", ")
    )
    assert a_second == pytest.approx(2 / milliseconds * 1000, rel=0.2)
    assert any("alone in their class" in sentence for sentence in findings.advice)
    enough = examine(data=str(stripes), width=0.125, batch_size=16, method="supcon", device="cpu")
    assert any("One view is enough" in sentence for sentence in enough.advice)
    assert "to train with" in "\n".join(enough.lines())


def test_expected_positives_against_draws() -> None:
    rng = np.random.default_rng(0)
    labels = np.repeat([0, 1, 2], [500, 300, 200])
    drawn = [labels[rng.permutation(1000)[:32]] for _ in range(2000)]
    seen = np.mean([[2 * ((batch == label).sum() - 1) + 1 for label in batch] for batch in drawn])
    assert expected_positives(labels, 32, features_a_sample=2) == pytest.approx(seen, rel=0.02)


def test_its_own_folder_is_split_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_noise(tmp_path / "all")
    small: Any = {"width": 0.125, "epochs": 1, "batch_size": 16, "image_size": 16, "device": "cpu", "probe.epochs": 1}
    selfcon.fit(data=str(tmp_path / "all"), out=tmp_path / "run", seed=1, **small)
    own = selfcon.evaluate(tmp_path / "run", device="cpu")
    again = selfcon.evaluate(tmp_path / "run", data=str(tmp_path / "run" / ".." / "all"), device="cpu")
    assert again["accuracy"] == own["accuracy"]
    capsys.readouterr()
    (tmp_path / "part").mkdir()
    for split in ("train", "test"):
        (tmp_path / "part" / split).symlink_to(tmp_path / "all")
    selfcon.evaluate(tmp_path / "run", data=str(tmp_path / "part"), device="cpu")
    assert "48 of the 60 test images of" in capsys.readouterr().err
