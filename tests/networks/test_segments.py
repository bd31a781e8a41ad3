"""A network cut at its exits is the network."""

from __future__ import annotations

import pytest
import torch

import selfcon
from selfcon.errors import UsageError
from selfcon.networks.segments import cut_at_exits

EXITS = {"efficientnet_b0": (2, 4), "vgg16_bn": (2, 3), "wrn16_8": (1, 2)}


@pytest.mark.parametrize("name", selfcon.list_models())
def test_segments_one_after_the_other(name: str) -> None:
    torch.manual_seed(0)
    exits = [selfcon.Exit(after) for after in EXITS.get(name, (1, 2))]
    net = selfcon.create_model(name, exits=exits, image_size=32, width=0.125, num_classes=3).eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        whole, x = net(images), images
        for segment in cut_at_exits(net):
            x, feature, logits = segment(x)
            assert torch.equal(feature, whole.features[segment.name])
            assert torch.equal(logits, whole.logits[segment.name])
    assert [segment.name for segment in cut_at_exits(net)] == [*net.names[1:], "backbone"]


def test_what_cannot_be_cut() -> None:
    with pytest.raises(UsageError, match="no classifiers"):
        cut_at_exits(selfcon.create_model("resnet18", image_size=32, width=0.125))
    with pytest.raises(UsageError, match="stage by stage"):
        cut_at_exits(selfcon.create_model("vit_tiny_patch16_224", num_classes=2))
