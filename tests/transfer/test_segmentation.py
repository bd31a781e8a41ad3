"""DeepLabV3+ on our encoders, and mIoU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import selfcon
from selfcon.data.scenes import IGNORED, load_scenes
from selfcon.errors import UsageError
from selfcon.transfer.scene_stage import Plan
from selfcon.transfer.segmentation import (
    Look,
    Segmenter,
    Segmenting,
    count_confusions,
    intersection_over_union,
    predict_mask,
)
from tests.data.test_scenes import write_voc

pytest.importorskip("segmentation_models_pytorch")


def network(name: str = "resnet18", **options: Any) -> selfcon.MultiExitNetwork:
    return selfcon.create_model(name, exits=[selfcon.Exit(2)], image_size=64, width=0.125, projection_dim=8, **options)


@pytest.mark.parametrize("stem", ["small", "large"])
def test_the_encoder_gives_the_very_features_of_the_pretrained_one(stem: str) -> None:
    net = network(stem=stem).eval()
    images = torch.randn(2, 3, 64, 64)
    expected = net(images)
    module = Segmenter(net, 21).eval()
    logits = module(images)
    assert logits.shape == (2, 21, 64, 64)
    maps = module.net.stage_maps(images)
    assert torch.equal(net.encoder.get_submodule("layer4")(maps[-2]), maps[-1])
    assert torch.equal(net.encoder.get_submodule("global_pool")(maps[-1]), expected.features["backbone"])
    assert torch.equal(module.net(images).features["exit2"], expected.features["exit2"])
    trained = {name for name, _ in module.named_parameters()}
    assert {f"net.encoder.{name}" for name, _ in net.encoder.named_parameters()} <= trained


def test_sizes_and_encoders_that_do_not_fit_are_told() -> None:
    with pytest.raises(UsageError, match="a multiple of 32"):
        Segmenter(network(stem="large"), 3).check_size(72)
    Segmenter(network(stem="large"), 3).check_size(96)
    vit = selfcon.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2)
    with pytest.raises(UsageError, match="needs an encoder that runs stage by stage"):
        Segmenter(vit, 3)


def test_miou_is_the_plain_one() -> None:
    rng = np.random.default_rng(0)
    truth = rng.integers(0, 4, (9, 11)).astype(np.uint8)
    truth[0, :4] = IGNORED
    predicted = rng.integers(0, 3, (9, 11))
    mean, each = intersection_over_union(count_confusions(torch.from_numpy(predicted), truth, 5))
    counted = truth != IGNORED
    plain: list[float] = []
    for label in range(4):
        a, b = (truth == label) & counted, (predicted == label) & counted
        plain.append(100 * (a & b).sum() / (a | b).sum())
    assert each[:4] == pytest.approx(plain)
    assert each[4] is None  # neither there nor predicted
    assert mean == pytest.approx(np.mean(plain))


def test_crops_belong_to_their_scene_and_epoch(tmp_path: Path) -> None:
    scenes = load_scenes(write_voc(tmp_path), "segment")
    look = Look(32, torch.full((3,), 0.5), torch.full((3,), 0.25))

    def stage() -> Segmenting:
        return Segmenting(
            Segmenter(network(), 21),
            [*scenes.train, *scenes.test],
            Plan(epochs=2, batch_size=2, lr=1e-3, weight_decay=0.0, precision="fp32", seed=4),
            look=look,
            device=torch.device("cpu"),
        )

    one, again = (next(stage().batches(1, 0)) for _ in range(2))
    assert torch.equal(one.images, again.images)
    assert torch.equal(one.labels, again.labels)
    other = next(stage().batches(0, 0))
    assert not torch.equal(one.images, other.images)
    assert one.images.shape == (2, 3, 32, 32)
    assert set(one.labels.unique().tolist()) <= {0, 8, IGNORED}
    assert float(stage().loss(one.images, one.labels).detach()) > 0


def test_mirroring_keeps_image_and_mask_together(tmp_path: Path) -> None:
    (scene,) = load_scenes(write_voc(tmp_path), "segment").train
    look = Look(32, torch.zeros(3), torch.ones(3))
    plain, mirrored = (look.crop(scene, [0.5, 0.0, 0.0, flip]) for flip in (0.9, 0.1))
    assert torch.equal(plain[0].flip(2), mirrored[0])
    assert torch.equal(plain[1].flip(1), mirrored[1])


def test_what_is_filled_up_is_nothing_to_learn_from(tmp_path: Path) -> None:
    (scene,) = load_scenes(write_voc(tmp_path), "segment").train
    look = Look(64, torch.zeros(3), torch.ones(3))
    image, mask = look.crop(scene, [0.0, 0.0, 0.0, 0.9])  # half as large as the crop
    height, width = (round(side * 32 / 40) for side in (30, 40))
    assert float(image[:, height:].abs().max()) == float(image[:, :, width:].abs().max()) == 0
    assert set(mask[height:].unique().tolist()) == set(mask[:, width:].unique().tolist()) == {IGNORED}
    assert 0 in mask[:height, :width]


def test_a_prediction_is_of_the_scene_without_what_was_filled_up(tmp_path: Path) -> None:
    (scene,) = load_scenes(write_voc(tmp_path), "segment").train
    look = Look(64, torch.zeros(3), torch.ones(3))

    class Halves(torch.nn.Module):  # class 1 in the lower half of what it sees, class 0 above
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            lower = (torch.arange(64) >= 24).float()[:, None].expand(64, 64)
            return torch.stack([1 - lower, lower])[None]

    stub: Any = Halves()
    found = predict_mask(stub, scene, look, torch.device("cpu"))  # 30 x 40 pixels are seen as 48 x 64
    assert found.shape == (30, 40)
    assert torch.equal(found, (torch.arange(30) >= 15).long()[:, None].expand(30, 40))
