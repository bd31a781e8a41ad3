"""Grad-CAM of the loss, held against captum and against itself."""

from __future__ import annotations

import importlib

import pytest
import torch

import selfcon
from selfcon.analysis.gradcam import WHOLE, enlarge, grad_cam, loss_maps, normalise_together
from selfcon.errors import UsageError


@pytest.fixture
def net() -> selfcon.MultiExitNetwork:
    torch.manual_seed(0)
    return selfcon.create_model(
        "resnet18",
        exits=[selfcon.Exit(2), selfcon.Exit(3)],
        image_size=32,
        width=0.125,
        projection_dim=16,
        num_classes=5,
        zero_init_last=False,
    ).eval()


@pytest.mark.slow  # needs captum
def test_it_is_captums_where_captum_knows_it(net: selfcon.MultiExitNetwork) -> None:
    captum = importlib.import_module("captum.attr")
    images = torch.randn(3, 3, 32, 32)
    layer = net.encoder.layer2
    theirs = captum.LayerGradCam(lambda x: net(x).logits["backbone"], layer).attribute(
        images, target=4, relu_attributions=True
    )
    inside, out = net.look_inside(images, 2)
    gradient = torch.autograd.grad(out.logits["backbone"][:, 4].sum(), inside)[0]
    torch.testing.assert_close(grad_cam(inside, gradient), theirs[:, 0].detach())


def test_ways_add_up_to_the_whole_gradient(net: selfcon.MultiExitNetwork) -> None:
    images, labels = torch.randn(12, 3, 32, 32), torch.arange(6) % 2
    method = selfcon.get_method("selfcon-m")
    maps = loss_maps(net, images, labels, method)
    assert list(maps) == ["backbone", "exit2", "exit3", WHOLE]
    assert all(each.shape == (6, 16, 16) for each in maps.values())
    inside, out = net.look_inside(images, 2)
    gradient = torch.autograd.grad(-method.loss_from_output(out, labels), inside)[0]
    torch.testing.assert_close(maps[WHOLE], grad_cam(inside, gradient)[:6], rtol=1e-4, atol=1e-9)


def test_an_exit_before_the_stage_has_no_way_to_it(net: selfcon.MultiExitNetwork) -> None:
    maps = loss_maps(net, torch.randn(4, 3, 32, 32), torch.arange(4) % 2, selfcon.get_method("selfcon"), after=3)
    assert list(maps) == ["backbone", "exit3", WHOLE]


def test_a_method_of_the_backbone_has_one_way(net: selfcon.MultiExitNetwork) -> None:
    maps = loss_maps(net, torch.randn(8, 3, 32, 32), torch.arange(4) % 2, selfcon.get_method("supcon"))
    assert list(maps) == ["backbone", WHOLE]
    torch.testing.assert_close(maps["backbone"], maps[WHOLE])


def test_common_normalisation_keeps_who_is_larger() -> None:
    weak, strong = torch.rand(2, 4, 4), 1 + torch.rand(2, 4, 4)
    together = normalise_together({"weak": weak, "strong": strong})
    assert float(together["strong"].amax()) == 1
    assert float(together["weak"].amin()) == 0
    assert bool((together["strong"].amax((1, 2)) > together["weak"].amax((1, 2))).all())
    assert enlarge(together["weak"], (8, 8)).shape == (2, 8, 8)
    flat = normalise_together({"flat": torch.zeros(1, 2, 2)})["flat"]
    assert bool((flat == 0).all())


def test_bad_input(net: selfcon.MultiExitNetwork) -> None:
    images, labels = torch.randn(4, 3, 32, 32), torch.arange(4) % 2
    bare = selfcon.create_model("resnet18", image_size=32, width=0.125, projection_dim=16)
    with pytest.raises(UsageError, match="not contrastive"):
        loss_maps(net, images, labels, selfcon.get_method("ce"))
    with pytest.raises(UsageError, match="2 views"):
        loss_maps(net, images, labels, selfcon.get_method("supcon"))
    with pytest.raises(UsageError, match="no exit"):
        loss_maps(bare, images, labels, selfcon.get_method("supcon-s"))
    with pytest.raises(UsageError, match="needs a sub-network"):
        loss_maps(bare, images, labels, selfcon.get_method("selfcon"), after=2)
    with pytest.raises(UsageError, match="stages 1 to 4, not after 7"):
        loss_maps(bare, images, labels, selfcon.get_method("supcon-s"), after=7)
