"""Where a backbone can be left: every encoder as a stem, stages counted from 1, and a head that pools.

Families whose forward we know run stage by stage. Of other timm networks we take what timm itself says of them: their
`forward_intermediates`, or else the modules of their `feature_info`, caught by hooks.
"""

from __future__ import annotations

import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from timm.models.efficientnet import EfficientNet
from timm.models.mobilenetv5 import MobileNetV5
from timm.models.resnet import ResNet
from timm.models.vgg import VGG
from timm.models.volo import VOLO
from torch import Tensor, nn
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint

from selfcon.errors import UsageError
from selfcon.networks.wide_resnet import WideResNet


class Splitter(ABC):
    """How the encoders of one family are split. It holds no modules, so encoders can be copied and moved freely."""

    @abstractmethod
    def widths(self, encoder: Any, image_size: int | None = None) -> list[int]:
        """Channels after each stage; `image_size` is for networks that must be run to know."""

    @abstractmethod
    def walk(
        self, encoder: Any, images: Tensor, taps: Sequence[int], *, whole: bool
    ) -> tuple[dict[int, Tensor], Tensor | None]:
        """Maps [B, C, H, W] after the stages in `taps` (sorted), and the feature [B, D] of the `whole` encoder."""


def split(encoder: nn.Module, name: str, *, exits: bool = True) -> Splitter:
    """The splitter for an encoder; `name` is for the error where there is none. Without exits any encoder will do."""
    for kind, splitter in _STAGED.items():
        if isinstance(encoder, kind):
            return splitter
    if not exits:
        return _WHOLE
    tells = hasattr(encoder, "forward_intermediates") and _has_head(encoder) and bool(_feature_info(encoder))
    if tells and not isinstance(encoder, MobileNetV5 | VOLO):
        return _INTERMEDIATES
    if _hooked_stages(encoder):
        return _HOOKS
    raise UsageError(
        f"{name} does not tell where its stages end (feature_info), so it takes no exit: methods such as supcon and ce "
        f"need none."
    )


class Staged(Splitter):
    """Encoders that are a chain of modules: nothing behind the last tap is run."""

    @abstractmethod
    def stem(self, encoder: Any, images: Tensor) -> Tensor:
        """What stage 1 is given."""

    @abstractmethod
    def stages(self, encoder: Any) -> list[list[nn.Module]]:
        """The modules of each stage, in order."""

    @abstractmethod
    def end(self, encoder: Any) -> list[nn.Module]:
        """The modules behind the last stage, up to the pooled feature."""

    def tail(self, encoder: Any, after: int) -> nn.Sequential:
        """All that stands behind a stage as one module: from its map to the pooled feature."""
        behind = [module for stage in self.stages(encoder)[after:] for module in stage]
        return nn.Sequential(*behind, *self.end(encoder))

    def walk(
        self, encoder: Any, images: Tensor, taps: Sequence[int], *, whole: bool
    ) -> tuple[dict[int, Tensor], Tensor | None]:
        maps: dict[int, Tensor] = {}
        x = self.stem(encoder, images)
        stages = self.stages(encoder)
        for number, stage in enumerate(stages if whole else stages[: max(taps)], start=1):
            if getattr(encoder, "grad_checkpointing", False) and torch.is_grad_enabled():
                x = checkpoint(_run, stage, x, use_reentrant=False)
            else:
                x = _run(stage, x)
            if number in taps:
                maps[number] = x
        if not whole:
            return maps, None
        x = _run(self.end(encoder), x)
        rate = getattr(encoder, "drop_rate", 0.0)
        return maps, dropout(x, rate, encoder.training) if rate else x


def _run(modules: Sequence[nn.Module], x: Tensor) -> Tensor:
    for module in modules:
        x = module(x)
    return x


class _ResNetStages(Staged):
    def widths(self, encoder: ResNet, image_size: int | None = None) -> list[int]:
        return [info["num_chs"] for info in _feature_info(encoder)[1:]]

    def stem(self, encoder: ResNet, images: Tensor) -> Tensor:
        x: Tensor = encoder.maxpool(encoder.act1(encoder.bn1(encoder.conv1(images))))
        return x

    def stages(self, encoder: ResNet) -> list[list[nn.Module]]:
        return [[encoder.get_submodule(info["module"])] for info in _feature_info(encoder)[1:]]

    def end(self, encoder: ResNet) -> list[nn.Module]:
        return [encoder.global_pool]


class _VGGStages(Staged):
    """A stage ends with its pooling. The feature is pooled right after the last one; the 4096-wide layers are gone."""

    def widths(self, encoder: VGG, image_size: int | None = None) -> list[int]:
        return [info["num_chs"] for info in _feature_info(encoder)[:-1]]

    def stem(self, encoder: VGG, images: Tensor) -> Tensor:
        return images

    def stages(self, encoder: VGG) -> list[list[nn.Module]]:
        stages: list[list[nn.Module]] = [[]]
        for layer in encoder.features:
            stages[-1].append(layer)
            if isinstance(layer, nn.MaxPool2d):
                stages.append([])
        return stages[:-1]

    def end(self, encoder: VGG) -> list[nn.Module]:
        return [encoder.head.global_pool]


class _EfficientNetStages(Staged):
    def widths(self, encoder: EfficientNet, image_size: int | None = None) -> list[int]:
        return [_output_width(list(stage.children())[-1]) for stage in encoder.blocks]

    def stem(self, encoder: EfficientNet, images: Tensor) -> Tensor:
        x: Tensor = encoder.bn1(encoder.conv_stem(images))
        return x

    def stages(self, encoder: EfficientNet) -> list[list[nn.Module]]:
        return [[stage] for stage in encoder.blocks]

    def end(self, encoder: EfficientNet) -> list[nn.Module]:
        return [encoder.conv_head, encoder.bn2, encoder.global_pool]


class _WideResNetStages(Staged):
    def widths(self, encoder: WideResNet, image_size: int | None = None) -> list[int]:
        return encoder.widths

    def stem(self, encoder: WideResNet, images: Tensor) -> Tensor:
        x: Tensor = encoder.maxpool(encoder.conv1(images))
        return x

    def stages(self, encoder: WideResNet) -> list[list[nn.Module]]:
        return [[encoder.group1], [encoder.group2], [encoder.group3]]

    def end(self, encoder: WideResNet) -> list[nn.Module]:
        return [encoder.norm, encoder.global_pool]


_STAGED: dict[type[nn.Module], Splitter] = {
    ResNet: _ResNetStages(),
    VGG: _VGGStages(),
    EfficientNet: _EfficientNetStages(),
    WideResNet: _WideResNetStages(),
}


class _Whole(Splitter):
    """Any encoder, run from end to end."""

    def widths(self, encoder: Any, image_size: int | None = None) -> list[int]:
        return []

    def walk(
        self, encoder: Any, images: Tensor, taps: Sequence[int], *, whole: bool
    ) -> tuple[dict[int, Tensor], Tensor | None]:
        if _has_head(encoder):
            return {}, encoder.forward_head(encoder.forward_features(images), pre_logits=True)
        return {}, _pooled(encoder(images), encoder)


class _Intermediates(Splitter):
    """Networks with timm's `forward_intermediates`, which also turns tokens into maps and leaves out prefix tokens.

    Not those of MobileNetV5 and VOLO, which leave out layers behind the stages: these two are hooked.
    """

    def widths(self, encoder: Any, image_size: int | None = None) -> list[int]:
        return [info["num_chs"] for info in _without_stem(encoder)]

    def walk(
        self, encoder: Any, images: Tensor, taps: Sequence[int], *, whole: bool
    ) -> tuple[dict[int, Tensor], Tensor | None]:
        if not taps:
            return _WHOLE.walk(encoder, images, taps, whole=whole)
        every, counted = len(_feature_info(encoder)), len(_without_stem(encoder))
        indices = [every - counted + tap - 1 for tap in taps]
        if not whole:
            found = encoder.forward_intermediates(images, indices=indices, stop_early=True, intermediates_only=True)
            return dict(zip(taps, found, strict=True)), None
        # Some networks stop after the last stage that is asked for, so the last one always is.
        last, found = encoder.forward_intermediates(images, indices=[*indices, every - 1])
        return dict(zip(taps, found[:-1], strict=True)), encoder.forward_head(last, pre_logits=True)


class _Hooks(Splitter):
    """Older networks: the outputs of the modules that end their stages."""

    def widths(self, encoder: Any, image_size: int | None = None) -> list[int]:
        stages = _hooked_stages(encoder)
        if all(width is not None for width in stages.values()):
            return [width for width in stages.values() if width is not None]
        maps, _ = _try(self, encoder, image_size, range(1, len(stages) + 1))
        return [maps[number].shape[1] for number in sorted(maps)]

    def walk(
        self, encoder: Any, images: Tensor, taps: Sequence[int], *, whole: bool
    ) -> tuple[dict[int, Tensor], Tensor | None]:
        modules = list(_hooked_stages(encoder).items())
        maps: dict[int, Tensor] = {}
        thread = threading.get_ident()

        def catch(number: int, width: int | None) -> Any:
            def hook(_module: nn.Module, _args: Any, output: Any) -> None:
                if threading.get_ident() != thread:  # another thread runs the same encoder
                    return
                maps[number] = _as_map(output, encoder, width)
                if not whole and len(maps) == len(taps):
                    raise _EnoughError

            return hook

        with ExitStack() as hooks:
            for number in taps:
                name, width = modules[number - 1]
                handle = encoder.get_submodule(name).register_forward_hook(catch(number, width))
                hooks.callback(handle.remove)
            try:
                feature = _pooled(encoder(images), encoder)
            except _EnoughError:
                return maps, None
        return maps, feature


class _EnoughError(Exception):
    """Raised in a hook to leave a forward that nobody needs the rest of."""


_WHOLE = _Whole()
_INTERMEDIATES = _Intermediates()
_HOOKS = _Hooks()

_PUBLISHED_SIZE = 224
_STEMS_NAMED_LIKE_STAGES = {"layer0", "features.conv1_1"}


def _feature_info(encoder: Any) -> list[dict[str, Any]]:
    info = getattr(encoder, "feature_info", None) or []
    return list(getattr(info, "info", info))


def _without_stem(encoder: Any) -> list[dict[str, Any]]:
    """timm's list of stages; where it opens with the stem, that entry's module is not named like the next one's."""
    info = _feature_info(encoder)
    if any(not {"module", "num_chs"} <= entry.keys() for entry in info):
        raise UsageError(
            f"feature_info of {type(encoder).__name__} says of each stage the module that ends it and its channels: "
            f"{{'module': 'stages.0', 'num_chs': 64}}."
        )
    if len(info) < 2:
        return info
    first, second = (re.sub(r"\d+", "", entry["module"]) for entry in info[:2])
    return info[1:] if first != second or info[0]["module"] in _STEMS_NAMED_LIKE_STAGES else info


def _hooked_stages(encoder: Any) -> dict[str, int | None]:
    """The modules that end the stages, and their widths where timm tells them."""
    info = _without_stem(encoder)
    modules = dict(encoder.named_modules())
    if len(info) > 1 and all(entry["module"] in modules for entry in info):
        return {entry["module"]: entry["num_chs"] for entry in info}
    for container in ("stages", "blocks"):
        children = getattr(encoder, container, None)
        if isinstance(children, nn.Sequential | nn.ModuleList) and len(children) > 1:
            return {f"{container}.{number}": None for number in range(len(children))}
    return {name: None for name, _ in encoder.named_children() if re.fullmatch(r"stage\d+", name)}


def _as_map(output: Any, encoder: Any, width: int | None) -> Tensor:
    """What a stage returned as one map [B, C, H, W]; `width` is C where it is known."""
    if isinstance(output, tuple) and all(part.ndim == 4 for part in output):
        return torch.cat(output, dim=1)  # dual path networks
    if not isinstance(output, Tensor):
        raise UsageError(f"{type(encoder).__name__} passes several tensors from stage to stage, so it takes no exit.")
    if output.ndim == 4:
        channels_last = width is not None and output.shape[1] != width
        return output.permute(0, 3, 1, 2) if channels_last else output
    # Tokens [B, T, C], without those that stand before the patches'.
    return output[:, -encoder.patch_embed.num_patches :].transpose(1, 2).unsqueeze(-1)


def _output_width(block: nn.Module) -> int:
    """Channels that a block of EfficientNet gives: those of its last convolution, of whatever kind."""
    widths: list[Any] = [child.out_channels for child in block.children() if hasattr(child, "out_channels")]
    return int(widths[-1])


def input_channels(encoder: nn.Module) -> int:
    """Channels of the images that an encoder takes: what it says, those of its first convolution, or else 3.

    Some networks of timm bring pixels into channels before they convolve.
    """
    if isinstance(told := getattr(encoder, "in_chans", None), int):
        return told
    return next((int(module.in_channels) for module in encoder.modules() if isinstance(module, nn.Conv2d)), 3)


def feature_width(encoder: nn.Module, name: str, image_size: int | None) -> int:
    """The width of an encoder's features: what it says of it, or what comes of an image."""
    if told := _width_told(encoder):
        return told
    size = _size_to_try(encoder, image_size)
    try:
        _, feature = _try(_WHOLE, encoder, image_size, ())
    except UsageError:
        raise
    except Exception as error:  # whatever a network of somebody else makes of an image that it is not for
        if isinstance(error, RuntimeError) and next(encoder.parameters(), torch.empty(0)).is_meta:
            raise  # it may be the device that is not for it
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UsageError(
            f"{name} has no num_features, which says how wide its features are, and an image of {size} pixels does not "
            f"show it ({reason}): set it where the network is made."
        ) from error
    assert feature is not None
    return feature.shape[1]


def _width_told(encoder: Any) -> int | None:
    return getattr(encoder, "head_hidden_size", None) or getattr(encoder, "num_features", None)


def _has_head(encoder: Any) -> bool:
    """Whether it is taken apart as timm's networks are; others are run as a whole."""
    return hasattr(encoder, "forward_features") and hasattr(encoder, "forward_head")


def _pooled(feature: Any, encoder: Any) -> Tensor:
    """What an encoder returned as features [B, D]."""
    kind = type(encoder).__name__
    if isinstance(feature, Tensor) and feature.ndim == 4:
        feature = feature.mean((2, 3))
    if not isinstance(feature, Tensor) or feature.ndim != 2:
        what = f"the shape {list(feature.shape)}" if isinstance(feature, Tensor) else f"a {type(feature).__name__}"
        raise UsageError(f"{kind} gives {what}, where features [B, C] are wanted, or maps [B, C, H, W] to be pooled.")
    if (told := _width_told(encoder)) and feature.shape[1] != told:
        raise UsageError(
            f"{kind} gives {feature.shape[1]} numbers for an image, and its num_features says {told}: "
            f"with num_classes=0 it must leave out its classifier."
        )
    return feature


def _size_to_try(encoder: Any, image_size: int | None) -> int:
    published = getattr(encoder, "pretrained_cfg", None) or {}
    return image_size or published.get("input_size", (_PUBLISHED_SIZE,))[-1]


def _try(
    splitter: Splitter, encoder: nn.Module, image_size: int | None, taps: Sequence[int]
) -> tuple[dict[int, Tensor], Tensor | None]:
    """What comes of a black image; the encoder is left as it was."""
    size, like = _size_to_try(encoder, image_size), next(encoder.parameters(), torch.empty(0))
    images = torch.zeros(1, input_channels(encoder), size, size, device=like.device, dtype=like.dtype)
    was_training = encoder.training
    try:
        with torch.no_grad():
            return splitter.walk(encoder.eval(), images, taps, whole=True)
    finally:
        encoder.train(was_training)
