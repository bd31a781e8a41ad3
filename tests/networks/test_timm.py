"""Exits on other networks of timm: many families, convolutional and transformer."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import timm
import torch
from timm.data.config import resolve_model_data_config
from timm.data.constants import IMAGENET_DEFAULT_MEAN
from torch import nn

import selfcon
from selfcon import Exit
from selfcon.data.cutting import part_seen, resize_to
from selfcon.errors import SelfconWarning
from selfcon.networks.timm_config import tell_images
from tests.networks.test_named import giga_macs

FAMILIES = {
    # how timm lets us in: forward_intermediates
    "convnext_atto": 64,
    "mobilenetv3_small_050": 64,
    "regnetx_002": 64,
    "repvgg_a0": 64,
    "ghostnet_050": 64,
    "edgenext_xx_small": 64,
    "mobilevit_xxs": 64,
    "poolformerv2_s12": 64,
    "efficientvit_b0": 64,
    "hgnetv2_b0": 64,
    "vit_tiny_patch16_224": 224,
    "deit_tiny_distilled_patch16_224": 224,
    "cait_xxs24_224": 224,
    "xcit_nano_12_p16_224": 224,
    "mixer_s32_224": 224,
    "swin_tiny_patch4_window7_224": 224,
    "pvt_v2_b0": 64,
    "levit_128s": 224,
    "hiera_tiny_224": 224,
    # stage by stage
    "seresnext26t_32x4d": 64,
    "mobilenetv2_050": 64,
    # hooks
    "densenet121": 64,
    "cs3darknet_focus_s": 64,
    "dla46_c": 64,
    "convit_tiny": 224,
    "dpn48b": 64,
    "sequencer2d_s": 224,
    "volo_d1_224": 224,
    "tresnet_m": 64,  # whose first convolution takes more channels than images have
}


@pytest.mark.medium
@pytest.mark.parametrize("name", FAMILIES)
def test_fc_exits(name: str) -> None:
    size = FAMILIES[name]
    stages = len(selfcon.networks.stages.split(probe := timm.create_model(name, num_classes=0), name).widths(probe))
    places = sorted({1, stages // 2, stages - 1})
    net = selfcon.create_model(name, exits=[Exit(place) for place in places], projection_dim=16)
    images = torch.randn(2, 3, size, size)

    net.eval()
    out = net(images)
    assert out.names == ["backbone", *(f"exit{place}" for place in places)]
    torch.testing.assert_close(net.to_timm()(images), out.features["backbone"])
    early = net(images, upto=f"exit{places[0]}")
    assert early.names == [f"exit{places[0]}"]
    torch.testing.assert_close(early.features[early.names[0]], out.features[early.names[0]])

    net.train()
    net(images).projections_bved().square().mean().backward()
    for exit_name in net.names:
        for parameter in net.projections[exit_name].parameters():
            assert parameter.grad is not None
    assert any(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in net.encoder.parameters())


@pytest.mark.parametrize("name", ["convnext_atto", "vit_tiny_patch16_224", "densenet121", "mobilenetv2_050"])
def test_every_splitter_stops_where_it_is_told(name: str) -> None:
    net = selfcon.create_model(name, exits=[Exit(1)])
    size = FAMILIES[name]
    assert giga_macs(net, size, upto="exit1") < 0.5 * giga_macs(net, size)


def test_two_threads_may_share_a_hooked_network() -> None:
    net = selfcon.create_model("densenet121", exits=[Exit(1)]).eval()
    inputs = [torch.randn(1, 3, 64, 64) for _ in range(2)]

    @torch.no_grad()
    def run(which: int) -> list[torch.Tensor]:
        return [net(inputs[which]).features["exit1"] for _ in range(6)]

    alone = [run(which)[0] for which in range(2)]
    with ThreadPoolExecutor(2) as pool:
        for which, results in enumerate(pool.map(run, range(2))):
            for result in results:
                torch.testing.assert_close(result, alone[which])


def test_networks_that_take_no_exit_can_be_built_without() -> None:
    net = selfcon.create_model("crossvit_9_240").eval()
    images = torch.randn(1, 3, 240, 240)
    torch.testing.assert_close(net(images).features["backbone"], net.to_timm()(images))


def test_options_of_timm_reach_hooked_and_other_networks() -> None:
    grey = selfcon.create_model("convit_tiny", in_chans=1, img_size=64, exits=[Exit(2)])
    assert grey(torch.randn(1, 1, 64, 64)).features["exit2"].shape == (1, grey.width)
    groups = selfcon.create_model("test_efficientnet_gn", exits=[Exit(2)])
    assert groups(torch.randn(1, 3, 64, 64)).features["exit2"].shape == (1, groups.width)


def test_an_exit_pools_the_tokens_of_its_block_without_prefix_tokens() -> None:
    with pytest.warns(SelfconWarning, match="no stem for small images"):
        net = selfcon.create_model("vit_tiny_patch16_224", image_size=32, exits=[Exit(5)]).eval()
    seen: list[torch.Tensor] = []
    net.encoder.blocks[4].register_forward_hook(lambda _module, _args, output: seen.append(output))  # type: ignore[index, union-attr]
    feature = net(torch.randn(2, 3, 32, 32)).features["exit5"]
    assert seen[0].shape == (2, 1 + 4, 192)  # 32 px in patches of 16, and the class token
    linear = net.subnetworks["exit5"].fc
    assert isinstance(linear, nn.Linear)
    torch.testing.assert_close(feature, linear(seen[0][:, 1:].mean(1)))


def test_stages_of_a_residual_network_are_its_layers() -> None:
    net = selfcon.create_model("resnetv2_18", exits=[Exit(2)]).eval()
    seen: list[torch.Tensor] = []
    net.encoder.stages[1].register_forward_hook(lambda _module, _args, output: seen.append(output))  # type: ignore[index, union-attr]
    feature = net(torch.randn(1, 3, 64, 64)).features["exit2"]
    torch.testing.assert_close(feature, net.subnetworks["exit2"](seen[0]))


def test_list_models() -> None:
    named = selfcon.list_models()
    assert named == ["resnet18", "resnet34", "resnet50", "resnet101", "wrn16_8", "vgg16_bn", "efficientnet_b0"]
    everything = selfcon.list_models(timm=True)
    assert set(named) < set(everything)
    assert len(everything) > 1000


def test_timm_is_told_of_the_images() -> None:
    net = selfcon.create_model("resnet18", width=0.125, image_size=32)
    known = resolve_model_data_config(net.to_timm())
    assert (known["input_size"], known["mean"]) == ((3, 32, 32), IMAGENET_DEFAULT_MEAN)
    assert timm.get_pretrained_cfg("resnet18").input_size == (3, 224, 224)  # type: ignore[union-attr]
    for encoder in (net.encoder, selfcon.create_model("wrn16_8", width=0.125).encoder):
        tell_images(encoder, size=16, mean=[0.1, 0.2, 0.3], std=[0.4, 0.5, 0.6])
        assert resolve_model_data_config(encoder) == {
            "input_size": (3, 16, 16),
            "mean": (0.1, 0.2, 0.3),
            "std": (0.4, 0.5, 0.6),
            "crop_pct": 1.0,
            "crop_mode": "center",
            "interpolation": "bilinear",
        }
    assert not {"url", "hf_hub_id", "tag"} & net.encoder.pretrained_cfg.keys()  # type: ignore[operator, union-attr]


def test_timm_cuts_out_what_we_do() -> None:
    encoder = nn.Conv2d(3, 3, 1)
    for size in range(1, 600):
        tell_images(encoder, size=size, mean=[0.0] * 3, std=[1.0] * 3, part=part_seen(size, streamed=True))
        assert math.floor(size / encoder.pretrained_cfg["crop_pct"]) == resize_to(size)  # type: ignore[index]
