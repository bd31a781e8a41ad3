"""Gradient norms by layer."""

from __future__ import annotations

import pytest
import torch

import selfcon
from selfcon.analysis.gradients import LayerGradient, block_norms, compare_blocks, gradient_norms
from selfcon.errors import UsageError


def network() -> selfcon.MultiExitNetwork:
    leaves = [selfcon.Exit(2)]
    return selfcon.create_model(
        "resnet18", exits=leaves, image_size=32, width=0.125, projection_dim=16, zero_init_last=False
    )


def test_norms_are_those_of_the_gradient_and_leave_no_trace() -> None:
    net = network()
    images, labels = torch.randn(16, 3, 32, 32), torch.arange(8) % 3
    before = {name: value.clone() for name, value in net.state_dict().items()}
    method = selfcon.get_method("selfcon-m")
    layers = gradient_norms(net, images, labels, method, temperature=0.2)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(each.grad is None for each in net.parameters())
    net.train()
    method.loss_from_output(net(images), labels, temperature=0.2).backward()
    weights = {name: module.weight for name, module in net.encoder.named_modules() if hasattr(module, "weight")}
    for layer in layers:
        assert layer.norm == pytest.approx(float(weights[layer.layer].grad.norm()), rel=1e-4)
    assert [layer.layer for layer in layers if layer.block == "0"] == ["conv1"]
    assert {layer.block for layer in layers} == {"0", "1", "2", "3", "4"}
    assert len([layer for layer in layers if layer.block == "2"]) == 5


def test_networks_without_convolutions() -> None:
    net = selfcon.create_model(
        "vit_tiny_patch16_224", exits=[selfcon.Exit(2)], img_size=32, patch_size=8, depth=3, projection_dim=8
    )
    layers = gradient_norms(net, torch.randn(4, 3, 32, 32), torch.tensor([0, 0, 1, 1]), selfcon.get_method("selfcon"))
    assert {"patch_embed.proj", "blocks.0", "blocks.2"} <= {layer.block for layer in layers}


def test_blocks_are_joined_as_lengths() -> None:
    layers = [LayerGradient("1", "a", 3.0), LayerGradient("1", "b", 4.0), LayerGradient("2", "c", 0.0)]
    assert block_norms(layers) == {"1": 5.0, "2": 0.0}
    assert compare_blocks({"first": layers, "second": layers}) == {"1": 1.0}


def test_bad_input() -> None:
    net = selfcon.create_model("resnet18", image_size=32, width=0.125, projection_dim=16)
    with pytest.raises(UsageError, match="needs a sub-network"):
        gradient_norms(net, torch.randn(4, 3, 32, 32), torch.arange(4), selfcon.get_method("selfcon"))
    with pytest.raises(UsageError, match="takes 2 views"):
        gradient_norms(net, torch.randn(4, 3, 32, 32), torch.arange(4), selfcon.get_method("supcon"))
