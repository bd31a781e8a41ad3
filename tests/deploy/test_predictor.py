"""Answers for images: the same as in evaluation, early where that suffices, and a sentence for what is no image."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from timm.data.config import resolve_model_data_config
from timm.data.transforms_factory import create_transform

import selfcon
from selfcon.cli.predict import _as_text
from selfcon.data.cutting import fit as streamed_fit
from selfcon.data.source import ArrayImages
from selfcon.deploy.predictor import Predictor
from selfcon.errors import BadImageError, DataError, UsageError
from selfcon.evaluation.accuracy import Predictions, predict
from selfcon.evaluation.early_exit import Rule, follow, name_answers, running_answers
from selfcon.networks.weights import hash_file
from selfcon.workflows.held_out import HeldOut
from selfcon.workflows.inference import find_images
from selfcon.workflows.reporting import write_report
from selfcon.workflows.silence import fit_silence
from selfcon.workflows.trained import open_run
from tests.cli.calling import call
from tests.workflows.conftest import write_stripes

SMALL: dict[str, Any] = {"width": 0.125, "epochs": 3, "batch_size": 32, "probe.epochs": 10, "device": "cpu"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibrated run with two exits, and its test images as files."""
    folder = tmp_path_factory.mktemp("deploy")
    data = write_stripes(folder / "stripes.npz", train=160, test=60)
    selfcon.fit(data=str(data), out=folder / "run", exits="1:fc,2:fc", **SMALL)
    selfcon.calibrate(folder / "run", most_wrong=20, within=2, device="cpu")
    arrays = np.load(data)
    for number, pixels in enumerate(arrays["x_test"]):
        path = folder / "images" / f"class {arrays['y_test'][number]}" / f"{number:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    return folder


@pytest.fixture(scope="module")
def model(place: Path) -> Predictor:
    return selfcon.load(place / "run", "cpu")


def in_order(place: Path) -> list[Path]:
    return sorted((place / "images").rglob("*.png"), key=lambda path: path.name)


@pytest.mark.medium
def test_answers_are_those_of_evaluation(place: Path, model: Predictor) -> None:
    run = open_run(place / "run", "cpu")
    expected = predict(run.net, run.split("test"), size=run.size)
    for leave in (*run.net.names, "ensemble"):
        found = model.predict(in_order(place), exit=leave, batch_size=7)
        assert [each.classes[0] for each in found] == [
            run.facts["classes"][int(guess)] for guess in expected.logits[leave].argmax(1)
        ]
        heat = model.trust.temperature(leave)
        probabilities = (expected.logits[leave] / heat).softmax(1).max(1).values
        assert torch.allclose(torch.tensor([each.probabilities[0] for each in found]), probabilities, atol=1e-4)
        assert {each.exit for each in found} == {leave}


def test_timm_prepares_images_for_the_encoder_as_we_do(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "run", tmp_path / "streamed")
    told = json.loads((tmp_path / "streamed" / "model.json").read_text())
    (tmp_path / "streamed" / "model.json").write_text(json.dumps({**told, "streamed": True}))
    rng = np.random.default_rng(0)
    large = Image.fromarray(rng.integers(0, 256, (40, 56, 3), dtype=np.uint8)).resize(
        (70, 50), Image.Resampling.BICUBIC
    )
    with Image.open(in_order(place)[0]) as small:
        given = {"run": [small.copy(), large], "streamed": [large]}
    for folder, pictures in given.items():
        model = selfcon.load(tmp_path / folder if folder == "streamed" else place / folder, "cpu")
        encoder = model.net.to_timm()
        transform = create_transform(**resolve_model_data_config(encoder), is_training=False)
        for picture in pictures:
            ours = model.eye.stack([model.eye.crop(np.array(picture))])
            theirs = transform(picture)[None]
            assert float(((ours - theirs) * model.eye.std.view(3, 1, 1)).abs().max()) <= 1.01 / 255  # of rounding
            assert torch.allclose(encoder(ours), model.embed(picture)["backbone"], atol=1e-4)
    opened = open_run(place / "run", "cpu")
    known = resolve_model_data_config(opened.net.to_timm())
    assert known["mean"] == tuple(opened.facts["mean"])
    assert resolve_model_data_config(opened.with_fresh_weights(0).net.to_timm()) == known


def test_paths_in_an_array_are_many(place: Path, model: Predictor) -> None:
    paths = sorted(map(str, (place / "images").rglob("*.png")))[:3]
    assert len(model.predict(np.array(paths))) == 3


def test_images_of_every_kind_are_one_image(place: Path, model: Predictor) -> None:
    path = in_order(place)[0]
    with Image.open(path) as picture:
        pixels = np.array(picture)
    tensor = torch.from_numpy(pixels.copy())
    kinds: list[Any] = [
        path,
        str(path),
        path.read_bytes(),
        pixels,
        tensor,
        tensor.permute(2, 0, 1),
        tensor.permute(2, 0, 1) / 255,
        Image.fromarray(pixels),
        io.BytesIO(path.read_bytes()),
    ]
    expected = model.predict(path)[0]
    with path.open("rb") as opened:
        assert model.predict(opened) == [expected]
    for kind in kinds:
        assert model.predict([kind])[0] == expected
    assert model.predict(np.stack([pixels, pixels]))[1].classes == expected.classes
    with pytest.raises(UsageError, match="uint8 pixels"):
        model.predict([pixels / 255])  # type: ignore[list-item]
    with pytest.raises(UsageError, match=r"0 to 1, which float32 \[3, 16, 16\] are not"):
        model.predict([tensor.permute(2, 0, 1).float()])
    grey = tensor[:, :, 0]
    expected = model.predict(grey.numpy())[0]
    for kind in (grey[None], grey[None] / 255, grey.numpy()[:, :, None]):
        assert model.predict([kind])[0] == expected
    for wrong, words in ((None, "not NoneType"), (3, "not int")):
        with pytest.raises(UsageError, match=words):
            model.predict(wrong)  # type: ignore[arg-type]
    two: Any = ArrayImages(np.stack([pixels, pixels]), np.zeros(2, np.int64), "two")
    assert len(model.predict(two)) == 2
    many: Any = np.int64(2)
    assert len(model.predict(path, top=many)[0].classes) == 2
    for top in ("3", 1.5):
        with pytest.raises(UsageError, match="likeliest 1 to"):
            model.predict(path, top=top)  # type: ignore[arg-type]


@pytest.mark.parametrize("threshold", [0.0, 0.6, 0.9, 2.0])
def test_leaving_early_is_what_was_counted_on(place: Path, model: Predictor, threshold: float) -> None:
    run = open_run(place / "run", "cpu")
    split = run.split("test")
    whole = predict(run.net, split, size=run.size)
    names = name_answers(model.exits)
    logits = running_answers([whole.logits[name] for name in model.exits])
    answers = [(each / model.trust.temperature(name)).softmax(1) for name, each in zip(names, logits, strict=True)]
    rule = Rule("confidence", threshold)
    point = follow(answers, whole.labels, [0.2, 0.5, 1.0], rule)
    images = next(split.plain_batches(batch_size=60, size=run.size)).images
    found = model.answer(images, rule=rule)
    assert [found.names.count(name) / 60 for name in names] == pytest.approx(point.shares)
    right = (found.probabilities.argmax(1) == whole.labels).double().mean()
    assert 100 * float(right) == pytest.approx(point.accuracy)
    for row, name in enumerate(found.names):
        assert torch.allclose(found.probabilities[row], answers[names.index(name)][row], atol=1e-4)


def test_who_left_is_not_computed_further(place: Path, model: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    for segment in model.segments:
        monkeypatch.setattr(
            segment,
            "forward",
            lambda x, do=segment.forward: (seen.append(len(x)), do(x))[1],  # type: ignore[func-returns-value]
        )
    images = torch.randn(16, 3, 16, 16)
    model.answer(images, rule=Rule("confidence", 0.0))
    assert seen == [16]
    seen.clear()
    model.answer(images, rule=Rule("confidence", 2.0))
    assert seen == [16, 16, 16]


def test_budgets(place: Path, model: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    cheap = model.predict(in_order(place), budget=model.trust.curve[0].cost)
    assert {each.exit for each in cheap} == {"exit1"}
    # Where what costs more is better, too, it is taken as far as it can be afforded.
    curve = model.trust.curve
    better = [replace(point, accuracy=90.0 + number / len(curve)) for number, point in enumerate(curve)]
    monkeypatch.setattr(model, "trust", replace(model.trust, curve=tuple(better)))
    assert "ensemble" in {each.exit for each in model.predict(in_order(place), budget=1.0)}
    middle = (curve[0].cost + curve[-1].cost) / 2
    assert model.trust.rule_for(middle).thresholds == [point for point in curve if point.cost <= middle][-1].thresholds
    for budget, words in ((0.001, "no answer can cost"), (0.0, "above 0"), (1.5, "up to 1")):
        with pytest.raises(UsageError, match=words):
            model.predict(in_order(place), budget=budget)
    with pytest.raises(UsageError, match="cannot be asked for as well"):
        model.predict(in_order(place), exit="exit1", budget=0.5)
    with pytest.raises(UsageError, match="did you mean 'exit1'"):
        model.predict(in_order(place), exit="exit_1")
    with pytest.raises(UsageError, match="1 to 4 classes"):
        model.predict(in_order(place), top=5)


def test_features(place: Path, model: Predictor, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    expected = model.embed(in_order(place))
    assert expected["exit1"].shape == (60, model.net.width)
    for name in ("x.npz", "x.parquet"):
        done = call("embed", place / "run", place / "images", "--out", name, "--device", "cpu", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    arrays = np.load(tmp_path / "x.npz")
    order = [str(path) for path in in_order(place)]
    rows = [list(arrays["files"]).index(path) for path in order]
    assert np.allclose(arrays["backbone"][rows], expected["backbone"], atol=1e-5)
    table = pq.read_table(tmp_path / "x.parquet")
    assert table.column_names == ["file", "backbone", "exit1", "exit2"]
    assert np.allclose(np.stack(table["exit2"].to_numpy()), arrays["exit2"])
    assert call("embed", place / "run", place / "images", "--out", "x.csv", cwd=tmp_path).returncode == 64


def test_a_table_a_spreadsheet_and_lines(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words: list[str | Path] = ["predict", place / "run", "--device", "cpu", "--top", "2"]
    table = call(*words, place / "images", cwd=tmp_path).stdout.splitlines()
    assert len(table) == 60
    assert table[0].endswith("(ensemble)")
    found = call(*words, place / "images" / "class 0", "--format", "csv", cwd=tmp_path)
    rows = list(csv.DictReader(io.StringIO(found.stdout)))
    assert list(rows[0]) == ["file", "label", "exit", "unknown", "class1", "probability1", "class2", "probability2"]
    assert {row["unknown"] for row in rows if row["label"] != "unknown"} == {"no"}
    assert len(rows) == 15
    done = call(*words, place / "images" / "class 0", "--output", "x.CSV", cwd=tmp_path)
    assert (tmp_path / "x.CSV").read_text().splitlines() == found.stdout.splitlines()
    done = call(*words, f"{place}/images/**/00*.png", "--output", "x.jsonl", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    assert len(lines) == 10
    assert set(lines[0]) == {"file", "label", "classes", "probabilities", "exit", "unknown", "strangeness"}
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(map(str, in_order(place)[:3])) + "\n\n"))
    found = call(*words, "-", "--exit", "early", "--json", cwd=tmp_path)
    assert len(json.loads(found.stdout)["predictions"]) == 3
    for more in (["--output", "x.json"], ["--format", "json", "--output", "y.txt"]):
        assert call(*words, place / "images" / "class 0", *more, cwd=tmp_path).returncode == 0
        assert len(json.loads((tmp_path / more[-1]).read_text())["predictions"]) == 15
    done = call(*words, place / "images", "--json", "--format", "csv", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (64, "")
    assert "leave one of them out" in done.stderr


def test_a_line_is_no_pattern_and_other_endings_are_told(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words: list[str | Path] = ["predict", place / "run", "--device", "cpu"]
    shutil.copy(in_order(place)[0], tmp_path / "a.png")
    (tmp_path / "b.heic").write_bytes(b"")
    monkeypatch.setattr("sys.stdin", io.StringIO("a.png\n*.png\ngone[1].png\n"))
    done = call(*words, "-", cwd=tmp_path)
    assert done.returncode == 65
    assert done.stdout.startswith("a.png: ")
    assert "gone[1].png is not there" in done.stderr
    assert "2 images could not be read" in done.stderr
    done = call(*words, ".", cwd=tmp_path)
    assert done.returncode == 0
    assert "note: of ., 1 file is not taken for images, by the endings: '.heic'." in done.stderr


def test_what_is_no_image_does_not_stop_the_rest(place: Path, tmp_path: Path) -> None:
    shutil.copy(in_order(place)[0], tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(b"no image")
    (tmp_path / "c.jpg").write_bytes((tmp_path / "a.png").read_bytes()[:60])
    shutil.copy(in_order(place)[1], tmp_path / "d.png")
    done = call("predict", place / "run", ".", "gone.png", "--device", "cpu", cwd=tmp_path)
    assert done.returncode == 65
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["a.png", "d.png"]
    assert "b.png is not an image" in done.stderr
    assert "gone.png is not there" in done.stderr
    assert done.stderr.splitlines()[-1] == "selfcon: 3 images could not be read."
    with pytest.raises(BadImageError):
        selfcon.load(place / "run", "cpu").predict(tmp_path / "b.png")
    for path, code in ((tmp_path / "none", 65), (tmp_path / "*.gif", 66)):
        assert call("predict", place / "run", path, cwd=tmp_path).returncode == code
    (tmp_path / "empty").mkdir()
    with pytest.raises(selfcon.errors.InputMissingError, match="holds no image"):
        find_images([tmp_path / "empty"])


def test_unknown_is_said_below_the_threshold_and_of_strangers(place: Path, model: Predictor) -> None:
    silent = [each.unknown for each in model.predict(in_order(place))]
    for leave in ("exit1", "ensemble"):  # each with a threshold of its own
        for each in model.predict(in_order(place), exit=leave):
            if each.probabilities[0] < model.trust.silence[leave]:
                assert each.unknown
                assert each.label == "unknown"
    for budget in (None, 1.0, model.trust.curve[0].cost):  # and each rule, too
        thresholds = model.trust.rule_for(budget).thresholds
        assert isinstance(thresholds, tuple)
        for each in model.predict(in_order(place), exit="early", budget=budget):
            if each.probabilities[0] < model.trust.silence_early[thresholds][each.exit]:
                assert each.unknown
    noise = np.random.default_rng(0).integers(0, 256, (20, 16, 16, 3), dtype=np.uint8)
    strange = [each.strangeness or 0 for each in model.predict(list(noise))]
    known = [each.strangeness or 0 for each in model.predict(in_order(place))]
    assert np.mean(strange) > np.mean(known)
    assert sum(silent) < 60


def test_folders_that_were_changed(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "run", tmp_path / "run")
    run = tmp_path / "run"
    trust = json.loads((run / "calibration.json").read_text())
    cases: list[tuple[dict[str, Any], str]] = [
        ({"model_sha256": "0" * 64}, "other weights"),
        ({"format": 9}, "is of format 9"),
        ({"temperatures": 3}, "cannot be used"),
        ({"temperatures": {"ensemble": 0}}, "beyond what can be meant"),
        ({"temperatures": {"ensemble": 1e-300}}, "beyond what can be meant"),
        ({"temperatures": {"ensemble": float("nan")}}, "no number"),
        ({"temperatures": {"ensemble": 10**400}}, "cannot be used"),
        ({"silence": {"ensemble": float("nan")}}, "no number"),
        ({"early_exit": {**trust["early_exit"], "curve": []}}, "curve is empty"),
        ({"early_exit": {**trust["early_exit"], "thresholds": ["x"]}}, "cannot be used"),
        ({"strange_above": {"exit9": 1.0}}, "no exit 'exit9'"),
        ({"tensors_sha256": "0"}, "not the file that it tells of"),
    ]
    for change, words in cases:
        (run / "calibration.json").write_text(json.dumps({**trust, **change}))
        with pytest.raises(DataError, match=words):
            selfcon.load(run, "cpu")
    (run / "calibration.json").write_text("[" * 100_000)
    with pytest.raises(DataError, match="cannot be used"):
        selfcon.load(run, "cpu")
    (run / "calibration.json").write_text(json.dumps(trust))
    (run / "calibration.safetensors").rename(run / "x")
    with pytest.raises(DataError, match="cannot be used"):
        selfcon.load(run, "cpu")
    facts = json.loads((run / "model.json").read_text())
    for name, values in {
        "classes": (None, 5, ["a"], [1, 2, 3, 4]),
        "mean": (None, [0.5], ["x"] * 3, [float("nan")] * 3),
        "std": ([0.0] * 3,),
        "image_size": (None, "x", 0, 10**6),
        "method": (None,),
    }.items():
        for value in values:
            (run / "model.json").write_text(json.dumps({**facts, name: value}))
            with pytest.raises(DataError, match="cannot be read"):
                selfcon.load(run, "cpu")
    (run / "model.json").write_text(json.dumps(facts))
    (run / "calibration.json").unlink()
    with pytest.raises(UsageError, match=r"has no early-exit thresholds\. `selfcon calibrate RUN --within 1`"):
        selfcon.load(run, "cpu").predict(in_order(place), exit="early")
    weights = bytearray((run / "model.safetensors").read_bytes())
    weights[-5] ^= 1
    (run / "model.safetensors").write_bytes(weights)
    with pytest.raises(DataError, match=r"not the file that model\.json tells of"):
        selfcon.load(run, "cpu")


@pytest.mark.medium
def test_networks_without_exits_answer_too(tmp_path: Path) -> None:
    data = write_stripes(tmp_path / "stripes.npz", train=64)
    selfcon.train(data=str(data), out=tmp_path / "run", method="ce", width=0.125, epochs=1, batch_size=32, device="cpu")
    result = selfcon.calibrate(tmp_path / "run", device="cpu")
    assert "early_exit" not in result
    model = selfcon.load(tmp_path / "run", "cpu")
    assert model.predict(np.zeros((16, 16, 3), np.uint8))[0].exit == "backbone"
    with pytest.raises(UsageError, match="cannot be left early"):
        selfcon.calibrate(tmp_path / "run", mean_cost=0.5, device="cpu")
    with pytest.raises(UsageError, match="cannot be left early"):
        model.predict(np.zeros((16, 16, 3), np.uint8), exit="early")


@pytest.mark.medium
def test_a_rule_as_good_as_the_backbone_alone(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "run", tmp_path / "run")
    early = selfcon.calibrate(tmp_path / "run", as_good_as="backbone", device="cpu")["early_exit"]
    kept = json.loads((tmp_path / "run" / "calibration.json").read_text())["early_exit"]
    held_out = {tuple(point["thresholds"]): point for point in kept["curve"]}
    chosen = held_out[tuple(kept["thresholds"])]
    cheaper = [point for point in kept["curve"] if point["cost"] < chosen["cost"]]
    held = early["held_out_accuracy"]["backbone"]
    assert early["target"] == {"as_good_as": "backbone"}
    assert chosen["accuracy"] >= min(held, max(point["accuracy"] for point in kept["curve"]))
    assert all(point["accuracy"] < held for point in cheaper)
    costs = {name: each["cost"] for name, each in early["alone"].items()}
    assert costs["exit2"] < costs["backbone"] < costs["ensemble"] == 1
    with pytest.raises(UsageError, match="exit9"):
        selfcon.calibrate(tmp_path / "run", as_good_as="exit9", device="cpu")
    with pytest.raises(UsageError, match="one of --within"):
        selfcon.calibrate(tmp_path / "run", as_good_as="backbone", within=1.0, device="cpu")


@pytest.mark.medium
def test_early_exit_that_is_not_worth_it_is_left_off(place: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(place / "run", run)
    weights = load_file(run / "model.safetensors")
    for name in ("exit1", "exit2"):  # exits that are wrong, and sure of it
        weights[f"classifiers.{name}.weight"] *= -20
    save_file(weights, run / "model.safetensors")
    facts = json.loads((run / "model.json").read_text())
    (run / "model.json").write_text(json.dumps({**facts, "weights_sha256": hash_file(run / "model.safetensors")}))
    done = call("calibrate", run, "--most-wrong", "20", "--device", "cpu", cwd=tmp_path)
    early = json.loads((run / "analysis" / "calibration.json").read_text())["early_exit"]
    kept = json.loads((run / "calibration.json").read_text())
    other = early["compared_with"]
    told, alone = early["held_out"]["accuracy"], early["held_out_accuracy"][other]
    assert not early["stored"]
    assert not {"early_exit", "silence_early"} & set(kept)
    assert told < alone
    assert f"not worth it for this model: {told:.1f} % correct" in done.stdout
    assert f"the {other} alone is {alone:.1f} % correct" in done.stdout
    model = selfcon.load(run, "cpu")
    for asked in ({"exit": "early"}, {"budget": 0.9}):
        with pytest.raises(UsageError, match="they were not worth it when it was calibrated"):
            model.predict(in_order(place), **asked)
    assert {each.exit for each in model.predict(in_order(place))} == {"ensemble"}
    page = write_report([run], out=tmp_path / "page.html").read_text()
    assert "Early exit is not worth it for this model, so no thresholds were stored" in page
    selfcon.export(run, formats=["hub"], out=tmp_path / "out")
    assert 'exit="early"' not in (tmp_path / "out" / "hub" / "README.md").read_text()
    assert selfcon.calibrate(run, within=1, device="cpu")["early_exit"]["stored"]  # as asked
    assert selfcon.load(run, "cpu").predict(in_order(place)[0], exit="early")


@pytest.mark.medium
def test_strangers_of_any_folder(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "run", tmp_path / "run")
    (tmp_path / "flat").mkdir()
    for number in range(8):
        pixels = np.random.default_rng(number).integers(0, 256, (20, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "flat" / f"{number}.png")
    result = selfcon.calibrate(tmp_path / "run", outside=str(tmp_path / "flat"), strangers="mahalanobis", device="cpu")
    assert all(0 <= each["auroc"] <= 100 for each in result["strangers"]["exits"].values())
    assert result["strangers"]["outside"] == str(tmp_path / "flat")
    assert selfcon.load(tmp_path / "run", "cpu").predict(in_order(place))[0].strangeness is not None


def test_images_from_outside_that_are_not_there_are_told_before_any_work(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("selfcon.workflows.held_out.predict", lambda *args, **options: pytest.fail("work was done"))
    with pytest.raises(UsageError, match="no-such-folder"):
        selfcon.calibrate(place / "run", outside="no-such-folder", device="cpu")


def test_pillows_images_of_every_mode(model: Predictor, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (16, 12, 3), dtype=np.uint8)
    picture = Image.fromarray(pixels)
    for mode in ("CMYK", "YCbCr", "HSV", "LAB", "RGBA", "RGBX", "P", "L", "1"):
        assert len(model.predict(picture.convert(mode))) == 1
    with pytest.raises(BadImageError, match="range is unknown"):
        model.predict(picture.convert("F"))
    exif = Image.Exif()
    exif[0x0112] = 6
    picture.save(tmp_path / "turned.png", exif=exif)
    with Image.open(tmp_path / "turned.png") as turned:
        assert model.predict(turned) == model.predict(tmp_path / "turned.png")
    picture.save(tmp_path / "x.jpg")
    (tmp_path / "cut.jpg").write_bytes((tmp_path / "x.jpg").read_bytes()[:-40])
    with Image.open(tmp_path / "cut.jpg") as cut, pytest.raises(BadImageError):
        model.predict(cut)
    tensor = torch.from_numpy(pixels).permute(2, 0, 1)
    several: list[Any] = [tensor, pixels]
    assert model.predict(iter(several))[0].classes == model.predict(pixels)[0].classes
    assert model.embed(pixels)["backbone"].shape[0] == 1


def test_a_long_thin_image_takes_little_memory(model: Predictor) -> None:
    thin = np.zeros((1, 1_000_000, 3), np.uint8)
    assert model.eye.crop(thin).shape == (16, 16, 3)  # and not 16 million columns on the way
    assert streamed_fit(thin, 16).shape == (16, 16, 3)


@pytest.mark.medium
def test_lists_and_formats_that_are_none(place: Path, tmp_path: Path) -> None:
    one = in_order(place)[0]
    words: list[str | Path] = ["predict", place / "run", "--device", "cpu"]
    told = subprocess.run(
        [sys.executable, "-m", "selfcon", *words, "-"], input=one.read_bytes(), capture_output=True, check=False
    )
    assert (told.returncode, told.stdout) == (64, b"")
    assert b"names of images, one a line" in told.stderr
    assert len(told.stderr) < 200
    done = call(*words, one, "--output", "x.parquet", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (64, "")
    assert ".csv, .jsonl, .json or .txt, not to x.parquet" in done.stderr
    assert call(*words, one, "--output", "x.txt", cwd=tmp_path).returncode == 0
    assert "(ensemble)" in (tmp_path / "x.txt").read_text()


def test_numbers_are_no_formulas() -> None:
    assert [_as_text(name) for name in ("+1", "-1", "-0.5", "1")] == ["+1", "-1", "-0.5", "1"]
    assert [_as_text(name) for name in ("=1+1", "-1+cmd", "@x", "+", "\tx")] == [
        "'=1+1",
        "'-1+cmd",
        "'@x",
        "'+",
        "'\tx",
    ]


def test_names_that_are_no_text_and_formulas(place: Path, tmp_path: Path) -> None:
    odd = os.fsdecode(b"caf\xe9.png")
    shutil.copy(in_order(place)[0], tmp_path / odd)
    shutil.copy(in_order(place)[0], tmp_path / "=1+1.png")
    words: list[str | Path] = ["predict", place / "run", odd, "=1+1.png", "--device", "cpu"]
    for form in ("csv", "jsonl", "table"):
        done = call(*words, "--format", form, "--output", "x", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    done = call(*words, "--json", "--output", "x.json", cwd=tmp_path)
    assert len(json.loads((tmp_path / "x.json").read_text())["predictions"]) == 2
    call(*words, "--format", "csv", "--output", "x.csv", cwd=tmp_path)
    assert "\n./=1+1.png," in (tmp_path / "x.csv").read_text()  # the same file, and no formula
    assert call("embed", place / "run", odd, "--out", "x.parquet", "--device", "cpu", cwd=tmp_path).returncode == 0
    (tmp_path / "keep.csv").write_text("precious")
    assert call(*words, "--exit", "nosuch", "--output", "keep.csv", cwd=tmp_path).returncode == 64
    assert (tmp_path / "keep.csv").read_text() == "precious"
    assert call("predict", place / "run", "x" * 5000, "--device", "cpu", cwd=tmp_path).returncode == 65


@pytest.mark.parametrize(("sure", "silent"), [(100, False), (0, True)])
def test_a_threshold_that_nobody_was_told_by_is_still_one(
    sure: int, silent: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the images to choose by `sure` leave at exit1, and are right; of those to tell by nobody does."""

    def predictions(early: int, wrong: bool) -> Predictions:
        logits = torch.tensor([[9.0, 0.0]]).repeat(200, 1)
        first = torch.where(torch.arange(200)[:, None] < early, logits, logits / 90)
        labels = torch.full((200,), int(wrong))
        return Predictions({"backbone": logits, "exit1": first, "ensemble": (logits + first) / 2}, labels)

    run: Any = SimpleNamespace(net=SimpleNamespace(names=["backbone", "exit1"]))
    none: Any = None
    both = predictions(sure, wrong=silent), predictions(0, wrong=silent)
    found = HeldOut(run, none, none, "", "", *both, dict.fromkeys(("exit1", "backbone", "ensemble"), 1.0))
    early = {"criterion": "confidence", "thresholds": (0.9,), "curve": [{"thresholds": (0.9,)}]}
    told: dict[str, Any] = {}
    strange = {
        part: dict.fromkeys(("exit1", "backbone"), torch.zeros(200, dtype=torch.bool)) for part in ("held", "told")
    }
    fit_silence(found, told, 5.0, early, strange)
    assert told["silence"]["answers"]["early, exit1"]["answered"] == 0
    assert ("no threshold keeps wrong answers" in capsys.readouterr().err) == silent


@pytest.mark.medium
def test_what_is_told_of_unknown_is_what_is_answered(place: Path, tmp_path: Path) -> None:
    """Chosen on a folder of classes, in another order than the run's: the test images with noise."""
    shutil.copytree(place / "run", tmp_path / "run")
    arrays, classes, rng = dict(np.load(place / "stripes.npz")), ["d", "b", "c", "a"], np.random.default_rng(0)
    np.savez(tmp_path / "stripes.npz", **{**arrays, "classes": np.array(classes)})
    config = (tmp_path / "run" / "config.yaml").read_text()
    (tmp_path / "run" / "config.yaml").write_text(config.replace(str(place), str(tmp_path)))
    facts = json.loads((tmp_path / "run" / "model.json").read_text())
    (tmp_path / "run" / "model.json").write_text(json.dumps({**facts, "classes": classes}))
    (tmp_path / "outside").mkdir()
    for number in range(40):
        Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(tmp_path / "outside" / f"{number}.png")
    for number, (pixels, label) in enumerate(zip(arrays["x_test"], arrays["y_test"], strict=True)):
        noisy = np.clip(pixels.astype(np.int64) + rng.integers(-60, 60, (16, 16, 3)), 0, 255).astype(np.uint8)
        (tmp_path / "held" / classes[label]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(noisy).save(tmp_path / "held" / classes[label] / f"{number}.png")
    found = selfcon.calibrate(
        tmp_path / "run", data=str(tmp_path / "held"), most_wrong=30, outside=str(tmp_path / "outside"), device="cpu"
    )
    assert found["held_out"]["images"] == 60  # all of a folder of classes
    model = selfcon.load(tmp_path / "run", "cpu")
    for leave in ("exit1", "exit2", "backbone", "ensemble"):
        answers = model.predict(in_order(place), exit=leave)
        given = [(each, label) for each, label in zip(answers, arrays["y_test"], strict=True) if not each.unknown]
        told = found["silence"]["answers"][leave]
        assert 100 * len(given) / 60 == pytest.approx(told["answered"])
        wrong = sum(each.classes[0] != classes[label] for each, label in given)
        assert 100 * wrong / max(1, len(given)) == pytest.approx(told["wrong"])
    assert 0 < found["silence"]["answers"]["ensemble"]["answered"] < 100
    unknown = [each.unknown for each in model.predict(sorted((tmp_path / "outside").iterdir()))]
    assert 100 * sum(unknown) / 40 == pytest.approx(found["silence"]["outside_unknown"])
    evaluated = selfcon.evaluate(tmp_path / "run", data=str(tmp_path / "held"), device="cpu")
    assert evaluated["images"] == 60
    assert evaluated["accuracy"]["ensemble"]["top1"] > 40  # labels are told by their names


@pytest.mark.medium
def test_mistakes_of_calibration(place: Path, tmp_path: Path) -> None:
    words: list[str | Path] = ["calibrate", place / "run", "--device", "cpu"]
    for more, code, sentence in (
        (["--criterion", "margn"], 64, "did you mean 'margin'"),
        (["--within", "1", "--mean-cost", "0.5"], 64, "leave out all but one"),
        (["--within", "-1"], 64, "at least 0"),
        (["--mean-cost", "0.01"], 64, "No answer costs less"),
        (["--mean-cost", "60"], 64, "up to 1, not 60"),
        (["--most-wrong", "200"], 64, "between 0 and 100"),
        (["--strangers", "friends"], 64, "Unknown way to tell strange images"),
        (["--data", "digits"], 65, "other classes"),
        (["--data", place / "stripes.npz"], 64, "own test images"),
        (["--within", "nan"], 64, "at least 0"),
        (["--batch-size", "0"], 64, "at least 1 image"),
    ):
        done = call(*words, *more, cwd=tmp_path)
        assert (done.returncode, sentence in done.stderr) == (code, True), done.stderr
