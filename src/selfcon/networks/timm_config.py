"""What timm is told of an encoder: which images it is for, where `timm.data.resolve_model_data_config` looks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import nn

from selfcon.networks.stages import input_channels

_OF_THE_NETWORK = ("architecture", "fixed_input_size", "first_conv", "classifier")  # whatever its weights are


def tell_size(encoder: nn.Module, size: int) -> None:
    """Note the side of the images alone: the rest stays as it was published, for weights that were."""
    _note(encoder, {**_noted(encoder), "input_size": (input_channels(encoder), size, size)})


def tell_images(
    encoder: nn.Module, *, size: int, mean: Sequence[float], std: Sequence[float], part: float = 1.0
) -> None:
    """Note how the images of a training are seen in its evaluation, in place of what was published for other weights.

    `part` is how much is seen of the shorter side, whose middle is cut out.
    """
    kept = {key: value for key, value in _noted(encoder).items() if key in _OF_THE_NETWORK}
    seen = {
        "input_size": (input_channels(encoder), size, size),
        "interpolation": "bilinear",
        "crop_pct": part if part == 1.0 else math.nextafter(part, 0.0),  # timm rounds the side before the cut down
        "crop_mode": "center",
        "mean": tuple(mean),
        "std": tuple(std),
        "num_classes": 0,
    }
    _note(encoder, {**kept, **seen})


def _noted(encoder: Any) -> dict[str, Any]:
    return dict(getattr(encoder, "pretrained_cfg", None) or {})


def _note(encoder: Any, config: dict[str, Any]) -> None:
    encoder.pretrained_cfg = encoder.default_cfg = config
