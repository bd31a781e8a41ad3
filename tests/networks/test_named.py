"""The seven networks of the paper: sizes, costs, stems, widths, sub-networks, and the way back to timm."""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import selfcon
from selfcon import Exit
from selfcon.errors import InputMissingError, UsageError
from selfcon.networks.backbones import _BUILDERS, Shape, create_encoder
from selfcon.networks.names import NAMED
from selfcon.networks.weights import load_encoder, read_weights


def test_every_name_has_its_builder() -> None:
    assert list(_BUILDERS) == list(NAMED)


def millions(net: nn.Module) -> float:
    return sum(parameter.numel() for parameter in net.parameters()) / 1e6


def giga_macs(net: nn.Module, size: int, **options: Any) -> float:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        net.eval()(torch.zeros(1, 3, size, size), **options)
    return float(counter.get_total_flops()) / 2e9


@pytest.mark.medium
@pytest.mark.parametrize(
    ("name", "size", "leave", "supcon", "selfcon_", "macs_supcon", "macs_selfcon"),
    [
        ("resnet18", 32, Exit(2, "fc"), "11.50", "11.89", 0.56, 0.56),
        ("resnet50", 32, Exit(2, "fc"), "27.96", "33.47", 1.31, 1.31),
        ("resnet18", 64, Exit(2, "fc"), "11.50", "11.89", 0.56, 0.56),
        ("resnet18", 224, Exit(2, "small"), "11.50", "16.43", 1.82, 2.18),
        ("resnet50", 224, Exit(2, "small"), "27.97", "42.21", 4.14, 5.33),
    ],
)
def test_parameters_and_multiply_adds_are_the_papers(
    name: str, size: int, leave: Exit, supcon: str, selfcon_: str, macs_supcon: float, macs_selfcon: float
) -> None:
    backbone = selfcon.create_model(name, image_size=size)
    both = selfcon.create_model(name, image_size=size, exits=[leave])
    assert f"{millions(backbone):.2f}" == supcon
    assert f"{millions(both):.2f}" == selfcon_
    assert giga_macs(backbone, size) == pytest.approx(macs_supcon, rel=0.015)
    assert giga_macs(both, size) == pytest.approx(macs_selfcon, rel=0.015)


def test_upto_saves_what_stands_behind_the_exit() -> None:
    net = selfcon.create_model("resnet18", stem="small", exits=[Exit(2)], num_classes=10)
    whole, part = giga_macs(net, 32), giga_macs(net, 32, upto="exit2")
    assert part <= 0.55 * whole
    images = torch.randn(2, 3, 32, 32)
    out, early, late = net(images), net(images, upto="exit2"), net(images, upto="backbone")
    assert out.names == ["backbone", "exit2"]
    assert early.names == ["exit2"]
    assert late.names == ["backbone"]
    for kind in ("features", "projections", "logits"):
        assert torch.equal(getattr(early, kind)["exit2"], getattr(out, kind)["exit2"])
        assert torch.equal(getattr(late, kind)["backbone"], getattr(out, kind)["backbone"])


@pytest.mark.medium
@pytest.mark.parametrize(("width", "structure"), [(1.0, "fc"), (0.25, "fc"), (0.25, "small"), (0.25, "same")])
@pytest.mark.parametrize("name", selfcon.list_models())
def test_every_structure_after_every_stage(name: str, width: float, structure: Any) -> None:
    stages = {"wrn16_8": 3, "vgg16_bn": 5, "efficientnet_b0": 7}.get(name, 4)
    exits = [Exit(k, structure) for k in range(1, stages)]
    net = selfcon.create_model(name, width=width, stem="small", exits=exits, projection_dim=16, num_classes=5)
    out = net(torch.randn(2, 3, 32, 32))
    assert out.names == ["backbone", *(f"exit{k}" for k in range(1, stages))]
    shapes = {feature.shape for feature in out.features.values()}
    assert shapes == {(2, net.width)}
    assert out.projections_bved().shape == (2, 1, stages, 16)
    assert {logits.shape for logits in out.logits.values()} == {(2, 5)}
    out.projections_bved().square().sum().backward()
    missing = [key for key, p in net.named_parameters() if p.grad is None and not key.startswith("classifiers")]
    assert missing == []


@pytest.mark.parametrize("stem", ["small", "small-pool", "large"])
@pytest.mark.parametrize("name", selfcon.list_models())
def test_to_timm_gives_the_same_outputs(name: str, stem: Any) -> None:
    net = selfcon.create_model(name, width=0.25, stem=stem, exits=[Exit(1)]).eval()
    images = torch.randn(2, 3, 64, 64)
    plain = net.to_timm()
    torch.testing.assert_close(plain(images), net(images).features["backbone"])
    assert plain is not net.encoder
    if name != "wrn16_8":
        assert type(plain).__module__.startswith("timm.")


@pytest.mark.medium
@pytest.mark.parametrize("name", [name for name in selfcon.list_models() if name != "wrn16_8"])
def test_weights_go_to_timm_and_back(name: str) -> None:
    encoder = selfcon.create_model(name, exits=[Exit(2)]).to_timm()
    theirs = timm.create_model(name, num_classes=0)
    names = {key: value.shape for key, value in theirs.state_dict().items() if not key.startswith("pre_logits")}
    assert {key: value.shape for key, value in encoder.state_dict().items()} == names
    theirs.load_state_dict(encoder.state_dict(), strict=name != "vgg16_bn")


def test_stems_follow_the_image_size() -> None:
    def map_size(size: int) -> int:
        net = selfcon.create_model("resnet18", image_size=size, width=0.125)
        return int(net.encoder.forward_features(torch.zeros(1, 3, size, size)).shape[-1])  # type: ignore[operator]

    # small: /8 in all; small-pool: /16; large: /32
    assert [map_size(size) for size in (32, 48, 64, 96, 128, 224)] == [4, 6, 4, 6, 4, 7]


def test_width_scales_the_stem_too_and_rounds_to_eight() -> None:
    for name in ("resnet18", "resnet50", "wrn16_8"):
        net = selfcon.create_model(name, width=0.3, stem="small")
        widths = [p.shape[0] for p in net.encoder.parameters() if p.ndim == 4]
        assert all(width % 8 == 0 for width in widths)
        assert widths[0] == (8 if name == "wrn16_8" else 16)
    # A basic block as wide as the stem has no projection, as in the published network; a bottleneck has one.
    narrow = selfcon.create_model("resnet18", width=0.25).encoder
    assert narrow.layer1[0].downsample is None  # type: ignore[index, union-attr]
    narrow = selfcon.create_model("resnet50", width=0.25).encoder
    assert narrow.layer1[0].downsample[0].in_channels == 16  # type: ignore[index, union-attr]


@pytest.mark.medium
def test_scaled_builders_agree_with_the_published_networks() -> None:
    for name in ("resnet18", "resnet50", "efficientnet_b0"):
        ours = create_encoder(name, stem="large", image_size=None, shape=Shape(width=1.0001))
        theirs = timm.create_model(name, num_classes=0)
        assert {k: v.shape for k, v in ours.state_dict().items()} == {
            k: v.shape for k, v in theirs.state_dict().items()
        }
        ours.load_state_dict(theirs.state_dict())
        images = torch.randn(1, 3, 64, 64)
        assert torch.equal(ours.eval()(images), theirs.eval()(images))


def test_small_has_half_the_layers_of_same() -> None:
    def depth(structure: Any, name: str, after: int) -> int:
        net = selfcon.create_model(name, width=0.125, exits=[Exit(after, structure)])
        layers = net.subnetworks[f"exit{after}"].modules()
        return sum(isinstance(layer, nn.Conv2d) and layer.kernel_size == (3, 3) for layer in layers)

    assert (depth("same", "resnet34", 2), depth("small", "resnet34", 2)) == (2 * (6 + 3), 2 * (3 + 1))
    assert (depth("same", "vgg16_bn", 2), depth("small", "vgg16_bn", 2)) == (9, 3)
    assert (depth("same", "wrn16_8", 1), depth("small", "wrn16_8", 1)) == (8, 4)


def test_views_come_back_view_by_view() -> None:
    net = selfcon.create_model("resnet18", width=0.125, stem="small", exits=[Exit(2)], projection_dim=8).eval()
    images_V = torch.randn(2, 3, 3, 16, 16)  # [V, B, C, H, W]
    joint = net(images_V.flatten(0, 1)).projections_bved(views=2)
    assert joint.shape == (3, 2, 2, 8)
    for view in range(2):
        alone = net(images_V[view]).projections_bved()[:, 0]
        torch.testing.assert_close(joint[:, view], alone)


@pytest.mark.medium
@pytest.mark.parametrize("name", ["vgg16_bn", "levit_128s"])
def test_a_network_can_be_copied(name: str) -> None:
    net = selfcon.create_model(name, exits=[Exit(1)]).eval()
    images = torch.randn(1, 3, 224, 224)
    before = net(images).features["exit1"]
    clone = copy.deepcopy(net)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    assert torch.equal(clone(images).features["exit1"], before)


def test_sub_networks_start_from_fresh_weights(tmp_path: Path) -> None:
    plain = timm.create_model("resnet18", num_classes=0)
    torch.save(plain.state_dict(), tmp_path / "weights.pth")
    exits = [Exit(1, "small"), Exit(2, "same")]
    net = selfcon.create_model("resnet18", exits=exits, checkpoint_path=str(tmp_path / "weights.pth"))
    loaded, fresh = net.encoder.layer4[1].conv2.weight, net.subnetworks["exit2"][1][1].conv2.weight  # type: ignore[index, union-attr]
    assert torch.equal(loaded, plain.layer4[1].conv2.weight)  # type: ignore[index, union-attr]
    assert fresh.shape == loaded.shape
    assert not torch.equal(fresh, loaded)


def test_gradient_checkpointing_and_dropout_are_timms() -> None:
    net = selfcon.create_model("resnet18", width=0.125, stem="small", exits=[Exit(2)], drop_rate=0.5)
    images = torch.randn(2, 3, 32, 32)
    zeros = (net(images).features["backbone"] == 0).float().mean()
    assert 0.2 < zeros < 0.8
    net.encoder.drop_rate = 0.0  # type: ignore[assignment]
    seen = []
    net.encoder.layer2.register_forward_pre_hook(lambda *_: seen.append(1))  # type: ignore[union-attr]
    net.encoder.set_grad_checkpointing(True)  # type: ignore[operator]
    net(images).projections_bved().sum().backward()
    assert len(seen) == 2  # run again in the backward


def test_without_heads() -> None:
    out = selfcon.create_model("resnet18", width=0.125, projection_dim=None)(torch.randn(2, 3, 32, 32))
    assert (out.projections, out.logits, list(out.features)) == ({}, {}, ["backbone"])


@pytest.mark.parametrize("prefix", ["encoder.module.", "module.encoder_q.", "backbone."])
def test_weights_as_other_scripts_save_them(prefix: str, tmp_path: Path) -> None:
    """SupContrast calls its short cuts so, and puts the options of the training beside the weights."""
    theirs, ours = (selfcon.create_model("resnet18", width=0.125, image_size=32).encoder for _ in range(2))
    named = {
        f"{prefix}{key}".replace(".downsample.", ".shortcut."): value for key, value in theirs.state_dict().items()
    }
    assert any(".shortcut.0.weight" in key for key in named)
    options = argparse.Namespace(model="resnet18", temp=0.1, betas=[0.9, 0.95])
    torch.save({"opt": options, "model": {**named, "head.0.weight": torch.ones(3)}, "epoch": 7}, tmp_path / "last.pth")
    load_encoder(ours, read_weights(tmp_path / "last.pth", trust=True), "last.pth")
    for key, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[key], value), key


@pytest.mark.parametrize("prefix", ["backbone.", "", "module.backbone."])
@pytest.mark.parametrize("whole", [False, True])
def test_weights_of_a_network_that_was_cut_into_a_sequence(prefix: str, whole: bool) -> None:
    """lightly and its tutorials make encoders so of torchvision's networks."""
    theirs, ours = torchvision.models.resnet18(), selfcon.create_model("resnet18", stem="large").encoder
    sequence = nn.Sequential(*list(theirs.children())[: None if whole else -1])
    named = {f"{prefix}{key}": value for key, value in sequence.state_dict().items()}
    head = {"projection_head.layers.0.weight": torch.ones(3)} if prefix else {}
    load_encoder(ours, {**named, **head}, "file")
    for key, value in theirs.state_dict().items():
        assert key.startswith("fc.") or torch.equal(ours.state_dict()[key], value), key


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        (
            {"stem": "large"},
            r"conv1.weight of \[64, 3, 7, 7\], where this network wants \[64, 3, 3, 3\]: --stem large would",
        ),
        ({"width": 0.5}, r"conv1.weight of \[32, 3, 3, 3\], .*, and so on \(\d+ more\): a --width 0.5 times this one"),
        (
            {"width": 2.0, "stem": "large"},
            r"conv1.weight of \[128, 3, 7, 7\], .*: --stem large and a --width 2 times this one would",
        ),
        ({"in_chans": 1}, r"conv1.weight of \[64, 1, 3, 3\], where this network wants \[64, 3, 3, 3\]\.$"),
    ],
)
def test_weights_that_do_not_fit_say_what_would(theirs: dict[str, Any], words: str) -> None:
    ours = selfcon.create_model("resnet18", stem="small").encoder
    other = selfcon.create_model("resnet18", **{"stem": "small", **theirs}).encoder
    with pytest.raises(UsageError, match=f"file holds {words}"):
        load_encoder(ours, other.state_dict(), "file")


def test_weights_of_another_network_are_named() -> None:
    encoder = selfcon.create_model("resnet18", width=0.125).encoder
    with pytest.raises(
        UsageError,
        match=r"no weights for 'conv1.weight', .* and \d+ more of this network; what it has instead: 'blocks.0.weight'",
    ):
        load_encoder(encoder, {"blocks.0.weight": torch.ones(1)}, "file")


def test_parts_that_are_called_short_cuts_keep_their_names() -> None:
    ours, theirs = (selfcon.create_model("wrn16_8", width=0.125, image_size=32).encoder for _ in range(2))
    assert any(".shortcut." in key for key in ours.state_dict())
    load_encoder(ours, {f"encoder.{key}": value for key, value in theirs.state_dict().items()}, "file")
    assert all(torch.equal(value, theirs.state_dict()[key]) for key, value in ours.state_dict().items())


def test_a_hub_that_cannot_be_reached_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("Name or service not known\nand more")

    monkeypatch.setattr("timm.create_model", refuse)
    with pytest.raises(
        InputMissingError, match=r"weights of resnet18 cannot be had here \(Name or service not known\)"
    ):
        selfcon.create_model("resnet18", pretrained=True)


def test_networks_go_by_their_names() -> None:
    with pytest.raises(UsageError, match=r"this is a type: timm\.models\.register_model gives it one"):
        selfcon.create_model(torch.nn.Linear)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"data is a name, not a object: .*; model is a name, not a Linear"):
        selfcon.fit(data=object(), model=torch.nn.Linear(1, 1), out="never")


def test_weights_of_another_network_are_refused_whatever_they_are_called() -> None:
    small, large = (selfcon.create_model(name, width=0.125, stem="small").encoder for name in ("resnet18", "resnet34"))
    for prefix in ("", "encoder.", "module."):
        weights = {f"{prefix}{name}": value for name, value in large.state_dict().items()}
        with pytest.raises(UsageError, match="no place for"):
            load_encoder(small, weights, "file")
        weights = {f"{prefix}{name}": value for name, value in small.state_dict().items()}
        load_encoder(small, {**weights, f"{prefix}fc.weight": torch.zeros(3, 3)}, "file")
