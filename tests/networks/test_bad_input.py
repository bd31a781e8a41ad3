"""What cannot be built is refused in one sentence, with the nearest valid name or the valid stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import selfcon
from selfcon import Exit
from selfcon.errors import SelfconWarning, UsageError


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "resnet81"}, "Unknown model 'resnet81'; did you mean 'resnet18'"),
        ({"name": "resnet18", "stem": "smal"}, "Unknown stem 'smal'; did you mean 'small'"),
        ({"name": "resnet18", "exits": [Exit(4)]}, "no exit after stage 4; valid stages: 1, 2, 3"),
        ({"name": "wrn16_8", "exits": [Exit(3)]}, "valid stages: 1, 2"),
        ({"name": "vgg16_bn", "exits": [Exit(5)]}, "valid stages: 1, 2, 3, 4"),
        ({"name": "test_vit", "exits": [Exit(99)]}, "no exit after stage 99; valid stages: 1"),
        ({"name": "resnet18", "exits": [Exit(2), Exit(2, "same")]}, r"one exit, and these stand after stages \[2, 2\]"),
        ({"name": "resnet18", "exits": ["2:fc"]}, "exits are selfcon.Exit values"),
        ({"name": "test_vit", "exits": [Exit(1, "same")]}, "takes 'fc' exits only"),
        ({"name": "test_vit", "width": 0.5}, "width scales only resnet18"),
        ({"name": "resnet18", "width": 0.0}, "width must be a number greater than 0"),
        ({"name": "resnet18", "width": float("inf")}, "width must be a number"),
        ({"name": "resnet18", "width": "half"}, "width must be a number"),
        (
            {"name": "resnet18", "pretrained": True, "width": 0.5},
            "no weights for resnet18 in this form: leave out pretr",
        ),
        ({"name": "wrn16_8", "pretrained": True}, "no weights for wrn16_8 in this form"),
        ({"name": "resnet18.nope"}, "Unknown pretrained tag of resnet18 'nope'"),
        ({"name": "wrn16_8.nope"}, "Unknown pretrained tag of wrn16_8"),
        ({"name": None}, "this is a NoneType"),
        ({"name": "resnet18", "num_classes": 0}, "num_classes must be a whole number of at least 1"),
        ({"name": "resnet18", "projection_dim": 1.5}, "projection_dim must be a whole number"),
        ({"name": "resnet18", "image_size": (32, 32)}, "image_size must be a whole number"),
        ({"name": "resnet18", "exits": 2}, "exits are selfcon.Exit values"),
        ({"name": "resnet18", "features_only": True}, "features_only cannot be set"),
        ({"name": "resnet18", "global_pool": ""}, "global_pool=''"),
        ({"name": "resnet18", "width": 0.5, "stem_type": "deep"}, "leave out stem_type"),
        ({"name": "resnet18", "nonsense": 1}, "resnet18 does not take these options"),
        ({"name": "wrn16_8", "nonsense": 1}, "wrn16_8 does not take these options"),
        ({"name": "coat_tiny", "exits": [Exit(1)]}, "coat_tiny does not tell where its stages end"),
        ({"name": "crossvit_9_240", "exits": [Exit(1)]}, "passes several tensors"),
    ],
)
def test_create_model(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        selfcon.create_model(**options)


@pytest.mark.parametrize("after", [0, -1, 1.5, True, "2"])
def test_an_exit_stands_after_a_stage(after: Any) -> None:
    with pytest.raises(UsageError, match="counted from 1"):
        Exit(after)


def test_unknown_structure() -> None:
    with pytest.raises(UsageError, match="Unknown structure of a sub-network 'sme'; did you mean 'same'"):
        Exit(2, "sme")  # type: ignore[arg-type]


def test_forward() -> None:
    net = selfcon.create_model("resnet18", width=0.125, exits=[Exit(2)])
    with pytest.raises(UsageError, match="Unknown exit 'exit3'; did you mean 'exit2'"):
        net(torch.randn(1, 3, 32, 32), upto="exit3")
    with pytest.raises(UsageError, match=r"shape \[B, 3, H, W\], not torch.float32 \[3, 32, 32\]"):
        net(torch.randn(3, 32, 32))
    with pytest.raises(UsageError, match=r"shape \[B, 3, H, W\], not torch.float32 \[2, 1, 32, 32\]"):
        net(torch.randn(2, 1, 32, 32))
    with pytest.raises(UsageError, match="images must be a tensor, not list"):
        net([0])  # type: ignore[arg-type]
    stored = torch.zeros(2, 3, 32, 32, dtype=torch.uint8)
    with pytest.raises(UsageError, match=r"not torch.uint8 .* Convert .*: \(images.float\(\) / 255 - mean\) / std"):
        net(stored)
    net((stored.float() / 255 - torch.full((3, 1, 1), 0.5)) / torch.full((3, 1, 1), 0.25))
    with pytest.raises(UsageError, match="A batch of 3 cannot hold 2 views"):
        net(torch.randn(3, 3, 32, 32)).projections_bved(views=2)
    with pytest.raises(UsageError, match="cannot hold 0 views"):
        net(torch.randn(3, 3, 32, 32)).projections_bved(views=0)


def test_a_network_without_a_small_stem_keeps_its_own_and_says_so() -> None:
    with pytest.warns(SelfconWarning, match="test_convnext has no stem for small images"):
        selfcon.create_model("test_convnext", stem="small")
