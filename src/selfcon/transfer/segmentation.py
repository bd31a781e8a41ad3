"""Semantic segmentation: DeepLabV3+ on an encoder, its training on scenes, and mIoU.

The encoder is used as it is, without dilation, so that its maps are the very ones of the pretrained network; the
decoder joins the last of them with the one that is four times as fine. B images, C classes with the background, S the
side of crops.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as tvf

from selfcon.data.scenes import IGNORED, Mask, Scene, Scenes
from selfcon.errors import UsageError
from selfcon.evaluation.accuracy import evaluating
from selfcon.networks.multi_exit import MultiExitNetwork
from selfcon.training.distributed import ALONE, World
from selfcon.transfer.scene_stage import Plan, SceneStage

_SCALES = (0.5, 2.0)
_COARSER = 4  # how much the last map is coarser than the one it is joined with


class Segmenter(nn.Module):
    """An encoder with a decoder: images [B, 3, H, W] to logits [B, C, H, W]."""

    def __init__(self, net: MultiExitNetwork, classes: int, *, channels: int = 256) -> None:
        super().__init__()
        decoder = _decoder_type()
        net.need_stages(4, "DeepLabV3+")
        self.net = net
        net.keep_maps_only()
        widths = net.stage_widths()
        self.decoder = decoder(
            encoder_channels=[3, widths[0], widths[-3], widths[-2], widths[-1]],
            encoder_depth=4,
            out_channels=channels,
            atrous_rates=(6, 12, 18),
            output_stride=16,
            aspp_separable=True,
            aspp_dropout=0.1,
        )
        self.head = nn.Conv2d(channels, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        maps = self.net.stage_maps(images)
        joined = self.decoder([images, maps[0], maps[-3], maps[-2], maps[-1]])
        return interpolate(self.head(joined), size=images.shape[-2:], mode="bilinear", align_corners=False)

    def check_size(self, size: int) -> None:
        """Refuse crops whose maps would not fit each other."""
        with torch.no_grad():
            maps = self.net.stage_maps(torch.zeros(1, 3, size, size, device=self.head.weight.device))
        if maps[-3].shape[-1] != _COARSER * maps[-1].shape[-1]:
            raise UsageError(
                f"Crops of {size} pixels do not divide evenly through this encoder: a multiple of 32 does."
            )


def _decoder_type() -> Any:
    try:
        decoder: Any = import_module("segmentation_models_pytorch.decoders.deeplabv3.decoder")
    except ImportError:
        raise UsageError("Segmentation needs a package: pip install '.[transfer]' in selfcon's folder.") from None
    return decoder.DeepLabV3PlusDecoder


class Segmenting(SceneStage):
    """Trains a segmenter on crops of scenes, each scaled, cut out and mirrored."""

    name, draws = "segment", 4

    def __init__(
        self,
        module: Segmenter,
        scenes: Sequence[Scene],
        plan: Plan,
        *,
        look: Look,
        device: torch.device,
        world: World = ALONE,
    ) -> None:
        super().__init__(module, scenes, plan, device, world)
        if plan.batch_size < 2 * world.size:
            raise UsageError(f"DeepLabV3+ normalises over a batch: at least {2 * world.size} scenes must be in one.")
        self._look = look

    def make(self, scene: Scene, uniform: Sequence[float]) -> tuple[Tensor, Tensor]:
        return self._look.crop(scene, uniform)

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        sums = cross_entropy(self.module(images).float(), labels, ignore_index=IGNORED, reduction="sum")
        return sums / (labels != IGNORED).sum().clamp(min=1)  # a batch may be of unlabelled pixels alone


class Look:
    """How scenes become what the network sees."""

    def __init__(self, size: int, mean: Tensor, std: Tensor) -> None:
        self.size, self.mean, self.std = size, mean.cpu(), std.cpu()

    def crop(self, scene: Scene, uniform: Sequence[float]) -> tuple[Tensor, Tensor]:
        """An image scaled by half to double, a crop of it filled up where it is too small, perhaps mirrored."""
        image, mask = _as_tensor(scene.read()), torch.from_numpy(scene.mask().astype(np.int64))
        low, high = (math.log(scale) for scale in _SCALES)
        scale = math.exp(low + uniform[0] * (high - low)) * self.size / max(image.shape[1:])
        sides = [max(1, round(side * scale)) for side in image.shape[1:]]
        image = tvf.resize(image, sides, antialias=True)
        mask = tvf.resize(mask[None], sides, InterpolationMode.NEAREST)[0]
        top, left = (int(part * (max(0, side - self.size) + 1)) for part, side in zip(uniform[1:3], sides, strict=True))
        image, mask = (each[..., top : top + self.size, left : left + self.size] for each in (image, mask))
        image, mask = self._fill(self._normalise(image), 0.0), self._fill(mask, IGNORED)
        return (image.flip(2), mask.flip(1)) if uniform[3] < 0.5 else (image, mask)

    def whole(self, image: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """A whole image [3, H, W] with its longer side at the crop's, filled up; and the part that it takes."""
        scale = self.size / max(image.shape[1:])
        sides = [max(1, round(side * scale)) for side in image.shape[1:]]
        return self._fill(self._normalise(tvf.resize(image, sides, antialias=True)), 0.0), (sides[0], sides[1])

    def _normalise(self, image: Tensor) -> Tensor:
        return (image.float() / 255 - self.mean[:, None, None]) / self.std[:, None, None]

    def _fill(self, each: Tensor, value: float) -> Tensor:
        missing = [self.size - side for side in each.shape[-2:]]
        return nn.functional.pad(each, (0, missing[1], 0, missing[0]), value=value)


def predict_mask(module: Segmenter, scene: Scene, look: Look, device: torch.device) -> Tensor:
    """The class of every pixel [H, W] of a scene, at its own size."""
    image = _as_tensor(scene.read())
    seen, (height, width) = look.whole(image)
    with evaluating(module):
        logits = module(seen[None].to(device))[..., :height, :width]
    return interpolate(logits, size=image.shape[1:], mode="bilinear", align_corners=False)[0].argmax(0).cpu()


def count_confusions(predicted: Tensor, mask: Mask, classes: int) -> Tensor:
    """[C, C] pixels by true and predicted class; ignored ones are left out."""
    truth = torch.from_numpy(mask.astype(np.int64))
    counted = truth != IGNORED
    return torch.bincount(truth[counted] * classes + predicted[counted], minlength=classes**2).view(classes, classes)


def intersection_over_union(confusions: Tensor) -> tuple[float, list[float | None]]:
    """Percent: the mean over classes that there are or were predicted, and by class."""
    right = confusions.diag().double()
    either = confusions.sum(0) + confusions.sum(1) - confusions.diag()
    each = [100 * float(right[row] / either[row]) if int(either[row]) else None for row in range(len(right))]
    there = [value for value in each if value is not None]
    return (sum(there) / len(there) if there else 0.0), each


def evaluate(module: Segmenter, scenes: Scenes, look: Look, device: torch.device) -> dict[str, Any]:
    """mIoU on the scenes to test on."""
    names = ("background", *scenes.classes)
    confusions = torch.zeros(len(names), len(names), dtype=torch.long)
    for scene in scenes.test:
        confusions += count_confusions(predict_mask(module, scene, look, device), scene.mask(), len(names))
    mean, each = intersection_over_union(confusions)
    return {"miou": mean, "iou": {name: value for name, value in zip(names, each, strict=True) if value is not None}}


def _as_tensor(pixels: Any) -> Tensor:
    return torch.from_numpy(np.array(pixels)).permute(2, 0, 1)
