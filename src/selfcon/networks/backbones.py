"""Encoders without a classifier: the seven of the paper with their stems and widths, and any other timm network.

A builder makes the published network at some width and depth; its stem is then fitted to small images.
Parameter names are timm's, but for WRN, which timm lacks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import timm
from timm.models._efficientnet_builder import decode_arch_def
from timm.models.efficientnet import EfficientNet
from timm.models.resnet import ResNet, downsample_conv
from timm.models.vgg import VGG
from torch import nn

from selfcon.errors import InputMissingError, SelfconWarning, UsageError, unknown_name
from selfcon.networks.added import is_added
from selfcon.networks.names import NAMED
from selfcon.networks.wide_resnet import WideResNet

Stem = Literal["small", "small-pool", "large"]
"""small: 3x3 of stride 1, no max-pool (32 px). small-pool: the same, the max-pool kept (64 px). large: as published.

VGG is small as published, and neither it nor EfficientNet has a max-pool to keep; WRN's large stem is that of ResNet.
"""


@dataclass(frozen=True)
class Shape:
    """How a named network is to differ from the published one."""

    width: float = 1.0
    half_depth: bool = False

    @property
    def published(self) -> bool:
        return self == Shape()

    def channels(self, published: int) -> int:
        """A number of channels scaled and rounded to a multiple of 8; never 0."""
        return published if self.width == 1.0 else max(8, int(published * self.width / 8 + 0.5) * 8)

    def depth(self, published: int) -> int:
        """A number of layers, whole or half (rounded down, at least one)."""
        return max(1, published // 2) if self.half_depth else published


def create_encoder(name: str, *, stem: Stem | None, image_size: int | None, shape: Shape, **options: Any) -> nn.Module:
    """The encoder of that name, from images to pooled features; `options` go to timm (or to WideResNet)."""
    base, _, tag = str(name).partition(".")
    if stem is not None and stem not in get_args(Stem):
        raise unknown_name("stem", stem, get_args(Stem))
    if base not in NAMED and base not in timm.list_models():
        raise unknown_name("model", name, {*NAMED, *timm.list_models()})
    if tag and tag not in (tags := [known.partition(".")[2] for known in timm.list_pretrained(f"{base}.*")]):
        raise unknown_name(f"pretrained tag of {base}", tag, tags)
    if own := sorted(options.keys() & {"features_only", "out_indices"}):
        raise UsageError(f"{', '.join(own)} cannot be set: the features of each stage are what exits are for.")
    if options.get("global_pool") in ("", "catavgmax"):
        raise UsageError(f"global_pool={options['global_pool']!r} does not give features of the encoder's width.")
    if base not in NAMED and shape.width != 1.0:
        raise UsageError(f"width scales only {', '.join(NAMED)}; {name} has the width it was published with.")
    encoder = _build(name, base, image_size, shape, options)
    if isinstance(encoder, VGG):
        _pool_right_after_features(encoder)
    _fit_stem(encoder, stem or default_stem(image_size), name)
    return encoder


def _build(name: str, base: str, image_size: int | None, shape: Shape, options: dict[str, Any]) -> nn.Module:
    try:
        if base in NAMED:
            return _BUILDERS[base](name, shape, options)
        return timm.create_model(name, num_classes=0, **_image_size_option(name, image_size), **options)
    except TypeError as error:
        if "keyword argument" not in str(error):
            raise
        hint = ": a network of your own takes all that timm passes on, as **options" if is_added(name) else ""
        raise UsageError(f"{name} does not take these options ({error}){hint}.") from error
    except OSError as error:  # of a hub that cannot be reached, among others
        if not options.get("pretrained"):
            raise
        what = str(error).partition("\n")[0]
        raise InputMissingError(f"The pretrained weights of {name} cannot be had here ({what}).") from error


def default_stem(image_size: int | None) -> Stem:
    """By the size of the images: up to 48 px small, up to 96 small-pool, above (or unknown) large."""
    if image_size is None or image_size > 96:
        return "large"
    return "small" if image_size <= 48 else "small-pool"


def _build_resnet(layers: tuple[int, int, int, int]) -> Callable[[str, Shape, dict[str, Any]], ResNet]:
    def build(name: str, shape: Shape, options: dict[str, Any]) -> ResNet:
        if shape.published:
            return timm.create_model(name, num_classes=0, **options)  # type: ignore[return-value]
        channels = tuple(shape.channels(width) for width in (64, 128, 256, 512))
        depths = tuple(shape.depth(depth) for depth in layers)
        encoder = timm.create_model(
            name, num_classes=0, channels=channels, layers=depths, **_from_scratch(name, options)
        )
        if channels[0] != 64:
            _scale_resnet_stem(encoder, channels[0])
        return encoder  # type: ignore[return-value]

    return build


def _scale_resnet_stem(encoder: Any, width: int) -> None:
    """timm's stem is 64 wide whatever the stages are; make it, and what reads it, `width` wide."""
    if not isinstance(encoder.conv1, nn.Conv2d):
        raise UsageError("width scales the plain stem only: leave out stem_type.")
    encoder.conv1 = _conv_like(encoder.conv1, out_channels=width)
    encoder.bn1 = type(encoder.bn1)(width)
    encoder.feature_info[0]["num_chs"] = width
    first = encoder.layer1[0]
    first.conv1 = _conv_like(first.conv1, in_channels=width)
    first.downsample = None
    width_out = encoder.feature_info[1]["num_chs"]
    if width_out != width:
        first.downsample = downsample_conv(width, width_out, kernel_size=1, norm_layer=type(encoder.bn1))
        nn.init.kaiming_normal_(first.downsample[0].weight, mode="fan_out", nonlinearity="relu")


def _build_wide_resnet(name: str, shape: Shape, options: dict[str, Any]) -> WideResNet:
    return WideResNet(
        depths=(shape.depth(2), shape.depth(2), shape.depth(2)),
        widths=(shape.channels(128), shape.channels(256), shape.channels(512)),
        stem_width=shape.channels(16),
        **_from_scratch(name, options),
    )


def _build_vgg(name: str, shape: Shape, options: dict[str, Any]) -> VGG:
    # The 4096-wide layers are dropped afterwards; a tiny ratio keeps them from being filled with 100 M numbers first.
    ratio: dict[str, Any] = (
        {} if options.get("pretrained") or options.get("checkpoint_path") else {"mlp_ratio": 1 / 4096}
    )
    if shape.published:
        return timm.create_model(name, num_classes=0, **ratio, **options)  # type: ignore[return-value]
    config: list[int | str] = []
    for convolutions, width in ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)):
        config += [shape.channels(width)] * shape.depth(convolutions) + ["M"]
    return VGG(config, num_classes=0, **ratio, **{"norm_layer": nn.BatchNorm2d, **_from_scratch(name, options)})


def _pool_right_after_features(encoder: Any) -> None:
    encoder.pre_logits = nn.Identity()
    encoder.head_hidden_size = encoder.head.in_features = encoder.num_features


_EFFICIENTNET_B0 = (
    # repeats, and the block in timm's notation
    (1, "ds_r{}_k3_s1_e1_c16_se0.25"),
    (2, "ir_r{}_k3_s2_e6_c24_se0.25"),
    (2, "ir_r{}_k5_s2_e6_c40_se0.25"),
    (3, "ir_r{}_k3_s2_e6_c80_se0.25"),
    (3, "ir_r{}_k5_s1_e6_c112_se0.25"),
    (4, "ir_r{}_k5_s2_e6_c192_se0.25"),
    (1, "ir_r{}_k3_s1_e6_c320_se0.25"),
)


def _build_efficientnet(name: str, shape: Shape, options: dict[str, Any]) -> EfficientNet:
    if shape.published:
        return timm.create_model(name, num_classes=0, **options)  # type: ignore[return-value]
    blocks = decode_arch_def([[block.format(shape.depth(repeats))] for repeats, block in _EFFICIENTNET_B0])
    return EfficientNet(
        blocks,
        num_classes=0,
        num_features=shape.channels(1280),
        round_chs_fn=shape.channels,
        **{"act_layer": nn.SiLU, **_from_scratch(name, options)},
    )


_BUILDERS: dict[str, Callable[[str, Shape, dict[str, Any]], nn.Module]] = {
    "resnet18": _build_resnet((2, 2, 2, 2)),
    "resnet34": _build_resnet((3, 4, 6, 3)),
    "resnet50": _build_resnet((3, 4, 6, 3)),
    "resnet101": _build_resnet((3, 4, 23, 3)),
    "wrn16_8": _build_wide_resnet,
    "vgg16_bn": _build_vgg,
    "efficientnet_b0": _build_efficientnet,
}


WEIGHTS = frozenset(("pretrained", "checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"))
"""Options of timm that say which weights to load."""


def _from_scratch(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options without those that load weights, which are refused where no published ones can fit."""
    if wanted := sorted(key for key in options.keys() & WEIGHTS if options[key]):
        raise UsageError(f"There are no weights for {name} in this form: leave out {', '.join(wanted)}.")
    return without_weights(options)


def without_weights(options: dict[str, Any]) -> dict[str, Any]:
    """The options, so that a network starts from fresh weights."""
    return {key: value for key, value in options.items() if key not in WEIGHTS}


def _fit_stem(encoder: Any, stem: Stem, name: str) -> None:
    """Change the stem of a published encoder in place; VGG's is small as published, without a max-pool."""
    if stem == "large" or isinstance(encoder, VGG):
        return
    if not _has_other_stems(encoder):
        warnings.warn(f"{name} has no stem for small images; it keeps its own.", SelfconWarning, stacklevel=4)
    elif isinstance(encoder, EfficientNet):
        encoder.conv_stem.stride = (1, 1)
    else:
        encoder.conv1 = _conv_like(encoder.conv1, kernel_size=3, stride=1, padding=1)
        if stem == "small":
            encoder.maxpool = nn.Identity()


def _has_other_stems(encoder: Any) -> bool:
    if isinstance(encoder, EfficientNet):
        return bool(encoder.conv_stem.kernel_size == (3, 3))
    return isinstance(encoder, ResNet | WideResNet) and isinstance(encoder.conv1, nn.Conv2d)


def stem_of(encoder: nn.Module, asked: Stem | None, image_size: int | None) -> Stem:
    """The stem of an encoder that was made with these: large, as published, where it has no other."""
    return (asked or default_stem(image_size)) if _has_other_stems(encoder) else "large"


def is_built_by_timm(encoder: nn.Module, name: str, image_size: int | None, options: dict[str, Any]) -> bool:
    """Whether timm itself makes the same encoder from its name and options."""
    base = name.partition(".")[0]
    if not timm.is_model(base) or is_added(base):
        return False
    plain = timm.create_model(base, num_classes=0, **_image_size_option(base, image_size), **without_weights(options))
    return repr(plain) == repr(encoder)


def _conv_like(conv: nn.Conv2d, **changes: Any) -> nn.Conv2d:
    """A convolution as `conv` but for the changes, initialised as residual networks are."""
    settings = {
        "in_channels": conv.in_channels,
        "out_channels": conv.out_channels,
        "kernel_size": conv.kernel_size,
        "stride": conv.stride,
        "padding": conv.padding,
        "groups": conv.groups,
        "bias": conv.bias is not None,
        "device": conv.weight.device,
        "dtype": conv.weight.dtype,
        **changes,
    }
    fresh = nn.Conv2d(**settings)
    nn.init.kaiming_normal_(fresh.weight, mode="fan_out", nonlinearity="relu")
    return fresh


def _image_size_option(name: str, image_size: int | None) -> dict[str, Any]:
    """timm's `img_size` for networks that are built for one size, such as vision transformers."""
    if image_size is None:
        return {}
    published = timm.get_pretrained_cfg(name)
    fixed = published is not None and published.fixed_input_size
    return {"img_size": image_size} if fixed else {}
