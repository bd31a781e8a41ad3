"""Object detection: RetinaNet with a feature pyramid on an encoder, its training on scenes, and mAP.

The encoder is used as it is; its normalisation stays as it was trained, since batches are small. B images, S the side
that images are brought to, M boxes at most.
"""

from __future__ import annotations

import contextlib
import io
import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torchvision.models.detection import RetinaNet
from torchvision.ops.feature_pyramid_network import FeaturePyramidNetwork, LastLevelP6P7
from torchvision.transforms import functional as tvf

from selfcon.config import Optim, Schedule
from selfcon.data.scenes import Scene, Scenes
from selfcon.errors import DataError, UsageError
from selfcon.evaluation.accuracy import evaluating
from selfcon.networks.multi_exit import MultiExitNetwork
from selfcon.training.distributed import ALONE, World
from selfcon.transfer.scene_stage import Plan, SceneStage

_CHANNELS = 256
_FILLED = -1.0  # the label of rows that are no box
Found = dict[str, Tensor]
"""boxes [M, 4], labels [M] and scores [M] of one image."""


class Pyramid(nn.Module):
    """The last three maps of an encoder and two coarser ones, all of one width."""

    out_channels = _CHANNELS

    def __init__(self, net: MultiExitNetwork) -> None:
        super().__init__()
        net.need_stages(3, "A feature pyramid")
        self.net = net
        net.keep_maps_only()
        self.joined = FeaturePyramidNetwork(
            net.stage_widths()[-3:], _CHANNELS, extra_blocks=LastLevelP6P7(_CHANNELS, _CHANNELS)
        )

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        maps = self.net.stage_maps(images)[-3:]
        joined: dict[str, Tensor] = self.joined(OrderedDict((str(number), each) for number, each in enumerate(maps)))
        return joined


class Detector(nn.Module):
    """RetinaNet on an encoder: images [B, 3, S, S] in [0, 1] to losses in training, to detections otherwise."""

    def __init__(
        self, net: MultiExitNetwork, classes: int, *, size: int, mean: Sequence[float], std: Sequence[float]
    ) -> None:
        super().__init__()
        self.size = size
        self.retina = RetinaNet(
            Pyramid(net), classes, min_size=size, max_size=size, image_mean=list(mean), image_std=list(std)
        )

    @property
    def net(self) -> MultiExitNetwork:
        """The encoder inside."""
        inner: MultiExitNetwork = self.retina.backbone.net
        return inner

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.net.eval()  # its normalisation stays what it was
        return self

    def forward(self, images: Tensor, targets: list[Found] | None = None) -> Any:
        return self.retina(list(images), targets)


class Detecting(SceneStage):
    """Trains a detector on whole scenes, some of them mirrored."""

    name, draws = "detect", 1
    module: Detector
    recordable = False  # how many anchors count is looked at in every step

    def __init__(
        self,
        module: Detector,
        scenes: Sequence[Scene],
        plan: Plan,
        *,
        device: torch.device,
        world: World = ALONE,
    ) -> None:
        super().__init__(module, scenes, plan, device, world)
        self.optim = Optim(name="adamw", weight_decay=plan.weight_decay, clip_norm=1.0)
        self.schedule = Schedule(warmup_epochs=min(1, plan.epochs - 1))
        self._most = max(1, *(int((~scene.hard).sum()) for scene in scenes))

    def make(self, scene: Scene, uniform: Sequence[float]) -> tuple[Tensor, Tensor]:
        image, scale = fit_image(scene, self.module.size)
        rows = torch.full((self._most, 5), _FILLED)
        kept = ~scene.hard
        boxes = torch.from_numpy(scene.boxes[kept]) * scale
        if uniform[0] < 0.5:
            image = image.flip(2)
            side = image.shape[2]
            boxes = torch.stack([side - boxes[:, 2], boxes[:, 1], side - boxes[:, 0], boxes[:, 3]], dim=1)
        rows[: len(boxes), :4] = boxes
        rows[: len(boxes), 4] = torch.from_numpy(scene.labels[kept]).float()
        return image, rows

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        targets = []
        for rows in labels:
            there = rows[rows[:, 4] != _FILLED]
            targets.append({"boxes": there[:, :4], "labels": there[:, 4].long()})
        losses = self.module(images, targets)
        return torch.stack([each.float() for each in losses.values()]).sum()


def fit_image(scene: Scene, size: int) -> tuple[Tensor, float]:
    """An image [3, S, S] in [0, 1] with its longer side at `size`, filled up at right and below; and the scale."""
    image = torch.from_numpy(np.array(scene.read())).permute(2, 0, 1)
    scale = size / max(image.shape[1:])
    sides = [max(1, round(side * scale)) for side in image.shape[1:]]
    small = tvf.resize(image, sides, antialias=True).float() / 255
    return nn.functional.pad(small, (0, size - sides[1], 0, size - sides[0])), scale


def detect(module: Detector, scene: Scene, device: torch.device) -> Found:
    """What a detector finds in a scene, in its own pixels."""
    image, scale = fit_image(scene, module.size)
    with evaluating(module):
        found = module(image[None].to(device))[0]
    return {"boxes": found["boxes"].cpu() / scale, "labels": found["labels"].cpu(), "scores": found["scores"].cpu()}


def measure(found: Sequence[Found], scenes: Sequence[Scene]) -> dict[str, float]:
    """mAP in percent by pycocotools, over IoU 0.50 to 0.95 and at 0.50 and 0.75.

    Hard objects count as neither found nor missed.
    """
    coco, cocoeval = _tools()
    truth, detections = coco.COCO(), coco.COCO()
    pictures = [{"id": number} for number in range(len(scenes))]
    categories = [{"id": label} for label in sorted({int(label) for scene in scenes for label in scene.labels})]
    truth.dataset = {"images": pictures, "categories": categories, "annotations": list(_as_objects(scenes))}
    detections.dataset = {"images": pictures, "categories": categories, "annotations": list(_as_found(found))}
    with contextlib.redirect_stdout(io.StringIO()):  # it tells what it does
        truth.createIndex()
        detections.createIndex()
        evaluation = _with_single_objects(cocoeval.COCOeval)(truth, detections, "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    if evaluation.stats[0] < 0:
        raise DataError("There is no object to be found in the scenes to test on, but for hard ones.")
    return {name: 100 * float(value) for name, value in zip(("map", "map50", "map75"), evaluation.stats, strict=False)}


def _with_single_objects(usual: Any) -> Any:
    """pycocotools' evaluation, for which what does not count is a crowd: a box inside it overlaps it wholly.

    VOC's difficult objects do not count either, but are single ones: a box must overlap them as it must any other.
    """

    class Evaluation(usual):  # type: ignore[misc]
        def computeIoU(self, image: int, category: int) -> Any:  # noqa: N802 - theirs
            things = self._gts[image, category]
            for each in things:
                each["iscrowd"] = int(each["crowd"])
            try:
                return super().computeIoU(image, category)
            finally:
                for each in things:
                    each["iscrowd"] = int(each["hard"])

    return Evaluation


def _as_objects(scenes: Sequence[Scene]) -> Iterator[dict[str, Any]]:
    numbers = itertools.count(1)
    for image, scene in enumerate(scenes):
        for box, label, hard in zip(scene.boxes.astype(float), scene.labels, scene.hard, strict=True):
            kind = {"iscrowd": int(hard), "hard": bool(hard), "crowd": bool(hard and scene.crowds)}
            yield {**_as_annotation(next(numbers), image, label, box), **kind}


def _as_found(found: Sequence[Found]) -> Iterator[dict[str, Any]]:
    numbers = itertools.count(1)
    for image, each in enumerate(found):
        for box, label, score in zip(each["boxes"].double().numpy(), each["labels"], each["scores"], strict=True):
            yield {**_as_annotation(next(numbers), image, label, box), "iscrowd": 0, "score": float(score)}


def _as_annotation(number: int, image: int, label: Any, box: Any) -> dict[str, Any]:
    width, height = float(box[2] - box[0]), float(box[3] - box[1])
    place = {"bbox": [float(box[0]), float(box[1]), width, height], "area": width * height}
    return {"id": number, "image_id": image, "category_id": int(label), **place}


def evaluate(module: Detector, scenes: Scenes, device: torch.device) -> dict[str, float]:
    """mAP on the scenes to test on."""
    return measure([detect(module, scene, device) for scene in scenes.test], scenes.test)


def _tools() -> tuple[Any, Any]:
    try:
        return import_module("pycocotools.coco"), import_module("pycocotools.cocoeval")
    except ImportError:
        raise UsageError("Detection needs a package: pip install '.[transfer]' in selfcon's folder.") from None
