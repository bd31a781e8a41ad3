"""Joined layers give the same answers, in every network."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import selfcon
from selfcon.deploy.fusion import fuse_normalisation


@pytest.mark.parametrize("name", [*selfcon.list_models(), "mobilenetv3_small_050", "regnety_002", "resnext26ts"])
def test_joined_layers_change_nothing(name: str) -> None:
    torch.manual_seed(0)
    width = {"width": 0.125} if name in selfcon.list_models() else {}
    exits = [selfcon.Exit(3 if name == "vgg16_bn" else 2)] if width else []
    net = selfcon.create_model(name, exits=exits, image_size=32 if width else None, num_classes=3, **width)  # type: ignore[arg-type]
    images = torch.randn(4, 3, 64, 64)
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight.uniform_(0.5, 1.5)
                module.bias.normal_()
        net.train()(images)  # statistics that are not 0 and 1
        joined = copy.deepcopy(net.eval())
        count = fuse_normalisation(joined)
        before, after = net(images).logits, joined(images).logits
    for leave in before:
        assert torch.allclose(before[leave], after[leave], atol=1e-4, rtol=1e-4)
    if name.startswith(("resnet1", "resnet34", "vgg")):
        assert count > 10


class NormFirst(nn.Module):
    """Names of a block that has its convolution first, in the other order."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.conv1(self.bn1(x))
        return out


class Skipping(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        between = self[0](x)
        out: torch.Tensor = self[1](between) + between
        return out


@pytest.mark.parametrize("block", [NormFirst(), Skipping(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))], ids=["block", "sum"])
def test_layers_of_a_script_are_left_alone(block: nn.Module) -> None:
    images = torch.randn(4, 3, 8, 8)
    block.train()(images)
    before = block.eval()(images)
    fuse_normalisation(block)
    torch.testing.assert_close(block(images), before)
