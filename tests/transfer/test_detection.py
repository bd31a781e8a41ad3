"""RetinaNet on our encoders, and mAP."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import selfcon
from selfcon.data.scenes import Scene, load_scenes
from selfcon.errors import UsageError
from selfcon.transfer.detection import Detecting, Detector, detect, fit_image, measure
from selfcon.transfer.scene_stage import Plan
from tests.data.test_scenes import write_voc

pytest.importorskip("pycocotools")


def detector(classes: int = 20) -> Detector:
    net = selfcon.create_model(
        "resnet18", exits=[selfcon.Exit(2)], image_size=64, width=0.125, projection_dim=8, stem="large"
    )
    return Detector(net.eval(), classes, size=64, mean=[0.5] * 3, std=[0.25] * 3)


def test_the_encoder_gives_the_very_features_of_the_pretrained_one() -> None:
    module = detector()
    net = module.net
    images = torch.randn(2, 3, 64, 64)
    expected = net(images).features["backbone"]
    seen: dict[str, torch.Tensor] = {}
    net.encoder.get_submodule("layer4").register_forward_hook(lambda _, __, out: seen.update(last=out))
    module.train()
    assert not net.training  # its normalisation stays what it was
    module.retina.backbone(images)
    assert torch.equal(net.encoder.get_submodule("global_pool")(seen["last"]), expected)
    trained = {id(each) for each in module.parameters() if each.requires_grad}
    assert {id(each) for each in net.encoder.parameters()} <= trained


def stage(scenes: list[Scene], module: Detector) -> Detecting:
    return Detecting(
        module,
        scenes,
        Plan(epochs=2, batch_size=2, lr=1e-3, weight_decay=0.0, precision="fp32", seed=3),
        device=torch.device("cpu"),
    )


def test_batches_hold_the_boxes_that_count(tmp_path: Path) -> None:
    found = load_scenes(write_voc(tmp_path), "detect")
    scenes = [*found.train, *found.test]
    one, again = (next(stage(scenes, detector()).batches(0, 0)) for _ in range(2))
    assert torch.equal(one.images, again.images)
    assert one.images.shape == (2, 3, 64, 64)
    assert one.labels.shape == (2, 1, 5)  # the dog is difficult
    module = detector()
    assert float(stage(scenes, module.train()).loss(one.images, one.labels).detach()) > 0


def test_boxes_are_mirrored_with_their_image(tmp_path: Path) -> None:
    found = load_scenes(write_voc(tmp_path), "detect")
    (scene,) = found.train
    Image.linear_gradient("L").rotate(90).resize((40, 30)).convert("RGB").save(scene.path)
    making = stage([scene, *found.test], detector())
    (plain, rows), (mirrored, mirrored_rows) = (making.make(scene, [uniform]) for uniform in (0.9, 0.1))
    assert torch.equal(plain, fit_image(scene, 64)[0])
    assert torch.equal(mirrored, plain.flip(2))
    assert not torch.equal(mirrored, plain)
    scale = 64 / 40
    assert rows[0, :4].tolist() == pytest.approx([2 * scale, 4 * scale, 20 * scale, 18 * scale], abs=1e-4)
    assert mirrored_rows[0, :4].tolist() == pytest.approx(
        [64 - 20 * scale, 4 * scale, 64 - 2 * scale, 18 * scale], abs=1e-4
    )
    assert found.classes[int(rows[0, 4])] == found.classes[int(mirrored_rows[0, 4])] == "cat"


def test_detections_are_in_the_pixels_of_the_scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (scene,) = load_scenes(write_voc(tmp_path), "detect").test
    image, scale = fit_image(scene, 64)
    assert image.shape == (3, 64, 64)
    assert scale == pytest.approx(1.6)
    assert float(image[:, 48:].abs().max()) == 0  # filled up below
    module = detector()
    assert detect(module, scene, torch.device("cpu"))["boxes"].shape[1:] == (4,)
    seen = {"boxes": torch.tensor([[16.0, 8.0, 64.0, 48.0]]), "labels": torch.tensor([7]), "scores": torch.ones(1)}
    monkeypatch.setattr(module, "forward", lambda images: [seen])
    found = detect(module, scene, torch.device("cpu"))
    assert found["boxes"].tolist() == [pytest.approx([10.0, 5.0, 40.0, 30.0])]
    assert found["labels"].tolist() == [7]


def test_map_equals_pycocotools(tmp_path: Path) -> None:
    """The same detections by pycocotools itself, from files in its own format."""
    coco_type: Any = import_module("pycocotools.coco").COCO
    evaluation_type: Any = import_module("pycocotools.cocoeval").COCOeval
    rng = np.random.default_rng(0)
    scenes, found = [], []
    for number in range(6):
        corner = rng.uniform(0, 50, (4, 2))
        boxes = np.concatenate([corner, corner + rng.uniform(8, 40, (4, 2))], axis=1).astype(np.float32)
        labels, hard = rng.integers(0, 3, 4), np.array([False, False, False, number % 2 == 0])
        scenes.append(Scene(Path("x.jpg"), (100, 100), boxes, labels, hard, number=number, crowds=True))
        moved = boxes[:3] + rng.normal(0, 3, (3, 4)).astype(np.float32)
        extra = np.array([[1, 1, 30, 30]], np.float32)
        found.append(
            {
                "boxes": torch.from_numpy(np.concatenate([moved, extra])),
                "labels": torch.from_numpy(np.append(labels[:3], 1)),
                "scores": torch.from_numpy(rng.uniform(0.2, 1, 4).astype(np.float32)),
            }
        )
    ours = measure(found, scenes)

    def as_xywh(box: Any) -> list[float]:
        left, top, right, bottom = (float(side) for side in box)
        return [left, top, right - left, bottom - top]

    truth = {
        "info": {},
        "images": [{"id": scene.number} for scene in scenes],
        "categories": [{"id": label} for label in range(3)],
        "annotations": [
            {
                "id": 1 + 10 * scene.number + row,
                "image_id": scene.number,
                "category_id": int(scene.labels[row]),
                "bbox": as_xywh(scene.boxes[row]),
                "area": float(np.prod(np.diff(scene.boxes[row].astype(float).reshape(2, 2), axis=0))),
                "iscrowd": int(scene.hard[row]),
            }
            for scene in scenes
            for row in range(4)
        ],
    }
    detections = [
        {
            "image_id": number,
            "category_id": int(each["labels"][row]),
            "bbox": as_xywh(each["boxes"][row].numpy()),
            "score": float(each["scores"][row]),
        }
        for number, each in enumerate(found)
        for row in range(4)
    ]
    (tmp_path / "truth.json").write_text(json.dumps(truth))
    coco = coco_type(str(tmp_path / "truth.json"))
    evaluation = evaluation_type(coco, coco.loadRes(detections), "bbox")
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    assert ours["map"] == pytest.approx(100 * evaluation.stats[0], abs=1e-6)
    assert ours["map50"] == pytest.approx(100 * evaluation.stats[1], abs=1e-6)
    assert 5 < ours["map"] < 95


def test_encoders_that_do_not_fit_are_told() -> None:
    vit = selfcon.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2)
    with pytest.raises(UsageError, match="needs an encoder that runs stage by stage"):
        Detector(vit, 3, size=32, mean=[0.5] * 3, std=[0.5] * 3)


def test_a_difficult_object_is_no_crowd() -> None:
    boxes = np.array([[0, 0, 300, 300], [310, 310, 350, 350]], np.float32)
    labels, hard = np.zeros(2, np.int64), np.array([True, False])
    found = [
        {
            "boxes": torch.tensor([[10.0, 10.0, 60.0, 60.0], [310.0, 310.0, 350.0, 350.0]]),
            "labels": torch.zeros(2, dtype=torch.long),
            "scores": torch.tensor([0.9, 0.8]),
        }
    ]
    whole = {**found[0], "boxes": torch.tensor([[0.0, 0.0, 300.0, 290.0], [310.0, 310.0, 350.0, 350.0]])}
    numbers = {}
    for crowds in (False, True):
        scene = Scene(Path("x.jpg"), (400, 400), boxes, labels, hard, crowds=crowds)
        numbers[crowds] = measure(found, [scene])["map50"]
        assert measure([whole], [scene])["map50"] == pytest.approx(100)  # who finds it is not punished
    assert numbers == {False: pytest.approx(50, abs=0.5), True: pytest.approx(100)}
