"""Exported models give the answers of the model."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file
from timm.data.config import resolve_model_data_config

import selfcon
from selfcon.deploy import export as export_module
from selfcon.deploy.card import write_card
from selfcon.deploy.export import export_onnx, export_stages, export_timm
from selfcon.deploy.pictures import Eye, read_picture
from selfcon.deploy.trust import Trust
from selfcon.errors import SelfconError, StorageError, UsageError
from selfcon.evaluation.early_exit import Rule
from selfcon.training.artifact import load_model, remember_images
from tests.cli.calling import call
from tests.workflows.conftest import write_stripes

ort = pytest.importorskip("onnxruntime")
EXAMPLE = Path(__file__).parents[2] / "examples" / "onnx_early_exit.py"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    data = write_stripes(folder / "stripes.npz", train=96, side=32)
    small: Any = {"width": 0.125, "epochs": 2, "batch_size": 32, "probe.epochs": 4, "device": "cpu", "stem": "large"}
    selfcon.fit(data=str(data), out=folder / "run", **small)
    selfcon.calibrate(folder / "run", within=1, device="cpu")
    done = call("export", folder / "run", "--out", folder / "out", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    for name in json.loads(done.stdout)["files"]:
        assert (folder / "out" / name).stat().st_size
    return folder


@pytest.mark.medium
def test_whole_and_in_any_batch(place: Path) -> None:
    net, facts = load_model(place / "run")
    session = ort.InferenceSession(place / "out" / "model.onnx")
    told = session.get_modelmeta().custom_metadata_map
    assert json.loads(told["classes"]) == facts["classes"]
    assert (told["image_size"], told["shorter_side"]) == ("32", "32")
    program = torch.export.load(place / "out" / "model.pt2").module()
    mean, std = (torch.tensor(facts[key]).view(3, 1, 1) for key in ("mean", "std"))
    for batch in (1, 5, 64):
        images = torch.rand(batch, 3, 32, 32)
        with torch.no_grad():
            logits = net((images - mean) / std).logits
            others = program(images)
        found = session.run(None, {"images": images.numpy()})
        for place_of, name in enumerate(net.names):
            assert np.allclose(found[place_of], logits[name], atol=1e-4)
            assert torch.allclose(others[place_of], logits[name], atol=1e-4)
        assert np.allclose(found[-1].sum(1), 1, atol=1e-5)


def test_the_example_answers_as_the_model_does(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pixels = np.load(place / "stripes.npz")["x_test"]
    paths = [tmp_path / f"{number}.png" for number in range(len(pixels))]
    for path, each in zip(paths, pixels, strict=True):
        Image.fromarray(each).save(path)
    model = selfcon.load(place / "run", "cpu")
    first = sorted(each.probabilities[0] for each in model.predict(paths, exit="exit2"))
    threshold = (first[len(first) // 2 - 1] + first[len(first) // 2]) / 2  # half of them are sure enough
    model.trust = replace(model.trust, rule=Rule("confidence", threshold))
    shutil.copytree(place / "out", tmp_path / "out")
    about = json.loads((tmp_path / "out" / "stages.json").read_text())
    (tmp_path / "out" / "stages.json").write_text(json.dumps({**about, "thresholds": [threshold]}))
    monkeypatch.setattr(sys, "argv", ["x", str(tmp_path / "out"), *map(str, paths)])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    said = capsys.readouterr().out.splitlines()
    expected = model.predict(paths, exit="early")
    for line, each in zip(said, expected, strict=True):
        assert each.classes[0] in line
        assert line.endswith(f"({each.exit})")
    assert {each.exit for each in expected} == {"exit2", "ensemble"}


@pytest.mark.parametrize("streamed", [False, True], ids=["resident", "streamed"])
def test_the_example_sees_what_the_model_sees(streamed: bool, tmp_path: Path) -> None:
    read, eye = runpy.run_path(str(EXAMPLE))["read"], Eye(48, torch.zeros(3), torch.ones(3), streamed)
    rng = np.random.default_rng(0)
    sides = ((48, 48), (49, 49), (61, 97), (97, 61), (50, 333), (31, 47), (30, 41), (101, 77), (200, 63))
    for height, width in sides:
        Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(tmp_path / f"{width}.png")
    for kind in ("L", "P", "RGBA"):
        Image.fromarray(rng.integers(0, 256, (61, 83, 3), dtype=np.uint8)).convert(kind).save(tmp_path / f"{kind}.png")
    Image.fromarray(rng.integers(0, 1 << 16, (61, 83), dtype=np.uint16)).save(tmp_path / "16-bits.png")
    for path in tmp_path.iterdir():
        seen = read(str(path), eye.size, round(eye.size / eye.part)) * 255
        assert np.abs(seen.transpose(1, 2, 0) - eye.crop(read_picture(path))).max() <= 1.01, path.name  # of rounding


def test_the_encoder_is_timms(place: Path) -> None:
    net, _ = load_model(place / "run")
    about = json.loads((place / "out" / "encoder.json").read_text())
    assert (about["architecture"], about["width"], about["num_features"]) == ("resnet18", 0.125, net.width)
    assert (about["norm"], about["options"], about["stem"]) == ("batch", {}, "large")
    state = load_file(place / "out" / "encoder.safetensors")
    names = set(timm.create_model("resnet18", num_classes=0).state_dict())
    assert set(state) == names
    assert torch.equal(state["conv1.weight"], net.encoder.get_parameter("conv1.weight"))


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"model": "resnet18", "width": 0.125}, "(stem small, width 0.125): three lines in encoder.json"),
        ({"model": "test_resnet", "stem": "large"}, "timm', pretrained=True) loads the encoder"),
        ({"model": "test_efficientnet"}, "(stem small)"),
        ({"model": "test_efficientnet", "stem": "large", "norm": "group"}, "(norm group)"),
        ({"model": "test_vit", "model_options": {"depth": 2}}, "timm', pretrained=True) loads the encoder"),
    ],
    ids=lambda each: "-".join(map(str, each.values())) if isinstance(each, dict) else "",
)
@pytest.mark.filterwarnings("ignore:.*has no stem for small images")
def test_the_encoder_is_loaded_again(
    asked: dict[str, Any],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    small: Any = {"method": "supcon-s", "exits": "none", "epochs": 1, "batch_size": 48, "device": "cpu"}
    data = write_stripes(tmp_path / "stripes.npz")
    selfcon.pretrain(data=str(data), out=tmp_path / "run", **small, **asked)
    capsys.readouterr()
    files = selfcon.export(tmp_path / "run", formats=["timm"], out=tmp_path / "out")["files"]
    assert told in "".join(capsys.readouterr())
    run = selfcon.open_run(tmp_path / "run", "cpu")
    images = torch.rand(3, 3, run.size, run.size)
    monkeypatch.chdir(tmp_path / "out")
    found: dict[str, Any] = {}
    about = json.loads(Path("encoder.json").read_text())
    assert len(about["load"]) == 3
    exec("\n".join(about["load"]), found)
    assert torch.allclose(found["net"].eval().encoder(images), run.net.encoder(images), atol=1e-6)
    assert ("timm/config.json" in files) == ("loads the encoder" in told) == Path("timm").is_dir()
    if Path("timm").is_dir():
        loaded = timm.create_model("local-dir:timm", pretrained=True).eval()
        assert torch.allclose(loaded(images), run.net.encoder(images), atol=1e-6)
        known = resolve_model_data_config(loaded)
        assert known == {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in resolve_model_data_config(run.net.to_timm()).items()
        }
        selfcon.export(tmp_path / "run", formats=["timm"], out=tmp_path / "out")  # in place of the former


def test_the_hub_folder_is_a_model_with_a_card(place: Path) -> None:
    hub = place / "out" / "hub"
    model = selfcon.load(hub, "cpu")
    assert model.trust.rule is not None
    head, _, text = (hub / "README.md").read_text().removeprefix("---\n").partition("\n---\n")
    metrics = yaml.safe_load(head)["model-index"][0]["results"][0]["metrics"]
    assert [each["name"] for each in metrics] == ["top 1, backbone", "top 1, exit2", "top 1, ensemble"]
    for words in ("## Limits", "Calibration error", "multiply-adds", "&#60;b&#62;wide"):
        assert words in text
    assert "<b>" not in text


@pytest.mark.medium
@pytest.mark.parametrize(
    "name",
    ["vgg16_bn", *(pytest.param(name, marks=pytest.mark.slow) for name in ("resnet50", "wrn16_8", "efficientnet_b0"))],
)
def test_other_networks(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    after = 3 if name == "vgg16_bn" else 2
    net = selfcon.create_model(name, exits=[selfcon.Exit(after)], image_size=32, width=0.125, num_classes=3).eval()
    facts = {"mean": [0.5] * 3, "std": [0.2] * 3, "image_size": 32, "classes": ["a", "b", "c"]}
    write = export_onnx if name != "wrn16_8" else export_stages
    assert write(net, facts, Trust(), tmp_path)[0].endswith(".onnx")  # compared there


@pytest.mark.medium
def test_a_stage_between_two_exits(tmp_path: Path) -> None:
    exits = [selfcon.Exit(1), selfcon.Exit(2), selfcon.Exit(3)]
    net = selfcon.create_model("resnet18", exits=exits, image_size=32, width=0.125, num_classes=3).eval()
    facts = {"mean": [0.5] * 3, "std": [0.2] * 3, "image_size": 32, "classes": ["a", "b", "c"]}
    files = export_stages(net, facts, Trust(), tmp_path)  # compared there
    assert files == ["stage-1.onnx", "stage-2.onnx", "stage-3.onnx", "stage-4.onnx", "stages.json"]


@pytest.mark.slow
def test_what_does_not_run_stage_by_stage_is_exported_whole(tmp_path: Path) -> None:
    data = write_stripes(tmp_path / "stripes.npz", train=32)
    small: Any = {"model": "vit_tiny_patch16_224", "exits": "none", "stem": "large", "device": "cpu"}
    selfcon.train(data=str(data), out=tmp_path / "run", method="ce", epochs=1, batch_size=16, **small)
    result = selfcon.export(tmp_path / "run")
    assert "model.onnx" in result["files"]
    assert not any(name.startswith("stage") for name in result["files"])
    with pytest.raises(UsageError, match="does not take images of 64 pixels; it was trained on 16"):
        selfcon.transfer.classify(tmp_path / "run", data="digits", image_size=64, device="cpu")


@pytest.mark.medium
def test_mistakes(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "model.json").write_text("{}")
    for words, code, sentence in (
        ([place / "run", "--formats", "onx"], 64, "did you mean 'onnx'"),
        ([place / "run", "--formats", ""], 64, "at least one format"),
        ([tmp_path], 66, "holds no trained model: model.json and model.safetensors are not there"),
        ([tmp_path / "half"], 66, "holds no trained model: model.safetensors is not there"),
        ([tmp_path / "half" / "model.json"], 66, "is a file: name the folder of a run"),
        ([place / "run", "--formats", "timm", "--out", "/proc/x"], 74, "cannot be written"),
    ):
        done = call("export", *words, cwd=tmp_path)
        assert (done.returncode, sentence in done.stderr) == (code, True), done.stderr
    hub = tmp_path / "mine" / "hub"
    hub.mkdir(parents=True)
    (hub / "thesis.txt").write_text("years of work")
    done = call("export", place / "run", "--formats", "hub", "--out", tmp_path / "mine", cwd=tmp_path)
    assert (done.returncode, "holds thesis.txt" in done.stderr) == (64, True), done.stderr
    assert [path.name for path in hub.iterdir()] == ["thesis.txt"]

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(torch.onnx, "export", fail)
        with pytest.raises(StorageError, match="No space left"):
            selfcon.export(place / "run", formats=["onnx"], out=tmp_path / "full")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "model.onnx").write_text("an older one")
    with monkeypatch.context() as odd:
        odd.setattr(export_module, "TOLERANCE", -1.0)
        with pytest.raises(SelfconError, match="other answers"):
            selfcon.export(place / "run", formats=["onnx"], out=tmp_path / "kept")
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["model.onnx"]
    assert (tmp_path / "kept" / "model.onnx").read_text() == "an older one"
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    done = call("export", place / "run", "--formats", "onnx", "--out", tmp_path / "x", cwd=tmp_path)
    assert done.returncode == 64
    assert "pip install '.[export]' in selfcon's folder" in done.stderr


@pytest.mark.parametrize(
    ("name", "readable", "options"),
    [
        ("swin_tiny_patch4_window7_224", False, {"embed_dim": 24, "depths": (1, 1, 1, 1), "num_heads": (1, 2, 2, 2)}),
        ("coat_tiny", True, {"embed_dims": (16, 16, 16, 16), "serial_depths": (1, 1, 1, 1), "parallel_depth": 1}),
    ],
)
def test_what_timm_cannot_read_without_a_head_is_left_out_and_shared_weights_are_written(
    name: str, readable: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    net = selfcon.create_model(name, image_size=64, stem="large", num_classes=3, **options)
    facts = {"network": {"name": name, "options": options}, "image_size": 64, "mean": [0.5] * 3, "std": [0.25] * 3}
    remember_images(net, facts)
    files = export_timm(net, facts, Trust(), tmp_path)
    assert files[:2] == ["encoder.safetensors", "encoder.json"]
    assert (tmp_path / "timm").exists() == (len(files) > 2) == readable
    fresh = selfcon.create_model(name, image_size=64, stem="large", **options)
    fresh.encoder.load_state_dict(load_file(tmp_path / "encoder.safetensors"))
    x = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(fresh.eval().encoder(x), net.eval().encoder(x))


def test_a_page_names_nothing_that_the_model_cannot_do() -> None:
    given: Any = {
        "name": "x",
        "facts": {
            "network": {"name": "resnet18", "exits": ""},
            "method": "ce",
            "classes": ["a", "b"],
            "data": "d",
            "image_size": 8,
        },
        "results": {},
        "environment": {},
        "calibration": {},
        "costs": {"parameters": 1, "multiply_adds": 1},
    }
    page = write_card(**given)
    assert "top=2)" in page
    assert "early" not in page.split("## Use")[1]
