"""Networks by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, get_args

import timm as _timm
from torch import nn

from selfcon.errors import UsageError, unknown_name
from selfcon.networks.backbones import Shape, Stem, create_encoder
from selfcon.networks.exits import Exit, parse_exits
from selfcon.networks.multi_exit import MultiExitNetwork
from selfcon.networks.names import NAMED
from selfcon.networks.norms import Norm, use_group_norm
from selfcon.networks.stages import feature_width, split
from selfcon.networks.subnetworks import Linear, repeat_stages
from selfcon.networks.timm_config import tell_size

_WIDEST = 64


def list_models(*, timm: bool = False) -> list[str]:
    """The networks that take every stem, width and sub-network; `timm=True` adds all others of timm."""
    return sorted({*NAMED, *_timm.list_models()}) if timm else list(NAMED)


def create_model(
    name: str | nn.Module,
    *,
    exits: Sequence[Exit] | str = (),
    stem: Stem | None = None,
    image_size: int | None = None,
    projection_dim: int | None = 128,
    num_classes: int | None = None,
    width: float = 1.0,
    norm: Norm = "batch",
    **timm_kwargs: Any,
) -> MultiExitNetwork:
    """A network of that name with sub-networks at `exits`, and heads on the backbone and each of them.

    The stem follows `image_size` unless it is given (up to 48 px "small", up to 96 "small-pool", above or unknown
    "large"). `exits` may be written as settings have them, `"1:fc,2:same"`. `projection_dim` and `num_classes` build
    projection heads and classifiers; None builds none. `width` scales the networks of `list_models()`. `norm="group"`
    puts group normalisation in place of batch normalisation. Other arguments go to timm. Under
    DistributedDataParallel build no head that the loss leaves out: `projection_dim=None` for `ce`, `ce-sub` and `sd`.

    In place of a name, a module of your own: images to features [B, C] or maps [B, C, H, W]. It becomes the encoder as
    it is; for `selfcon.fit` it needs a name (docs/guides/research.md).
    """
    given = name if isinstance(name, nn.Module) else None
    if given is not None:
        name = type(given).__name__
        if own := [*timm_kwargs, *(["stem"] if stem else []), *(["width"] if width != 1.0 else [])]:
            raise UsageError(f"{', '.join(own)} cannot be set: this {name} is a network already.")
    if not isinstance(name, str):
        raise UsageError(
            f"A network goes by its name, and this is a {type(name).__name__}: timm.models.register_model gives it one "
            f"(docs/guides/research.md)."
        )
    exits = _check_exits(name, exits)
    _check_sizes(image_size=image_size, projection_dim=projection_dim, num_classes=num_classes)
    if isinstance(width, bool) or not isinstance(width, int | float) or not 0 < width <= _WIDEST:
        raise UsageError(f"width must be a number greater than 0 and up to {_WIDEST}, not {width!r}.")
    encoder = (
        given
        if given is not None
        else create_encoder(name, stem=stem, image_size=image_size, shape=Shape(width), **timm_kwargs)
    )
    splitter = split(encoder, name, exits=bool(exits))
    size = timm_kwargs.get("img_size", image_size)
    widths = splitter.widths(encoder, size) if exits else []
    features = feature_width(encoder, name, size)
    subnetworks: dict[Exit, nn.Module] = {}
    for leave in exits:
        if leave.after >= len(widths):
            valid = ", ".join(str(number) for number in range(1, len(widths)))
            raise UsageError(f"{name} has no exit after stage {leave.after}; valid stages: {valid}.")
        if leave.structure == "fc":
            subnetworks[leave] = Linear(widths[leave.after - 1], features)
        else:
            half = leave.structure == "small"
            subnetworks[leave] = repeat_stages(
                name, after=leave.after, width=width, half_depth=half, options=timm_kwargs
            )
    net = MultiExitNetwork(
        encoder,
        splitter,
        subnetworks,
        width=features,
        projection_dim=projection_dim,
        num_classes=num_classes,
    )
    if norm == "group":
        use_group_norm(net)
    elif norm != "batch":
        raise unknown_name("norm", norm, get_args(Norm))
    if image_size is not None:
        tell_size(net.encoder, image_size)
    return net


def _check_exits(name: str, given: Sequence[Exit] | str) -> list[Exit]:
    exits: Any = parse_exits(given) if isinstance(given, str) else given
    if isinstance(exits, Exit) or not isinstance(exits, Iterable):
        exits = [exits]
    for leave in exits:
        if not isinstance(leave, Exit):
            raise UsageError(f"exits are selfcon.Exit values, such as Exit(after=2, structure='fc'), not {leave!r}.")
        if leave.structure != "fc" and name.partition(".")[0] not in NAMED:
            raise UsageError(f"{name} takes 'fc' exits only; {leave.structure!r} is built for {', '.join(NAMED)}.")
    stages = [leave.after for leave in exits]
    if len(set(stages)) < len(stages):
        raise UsageError(f"Each stage takes one exit, and these stand after stages {sorted(stages)}.")
    return list(exits)


def _check_sizes(**sizes: int | None) -> None:
    for what, size in sizes.items():
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise UsageError(f"{what} must be a whole number of at least 1, or None, not {size!r}.")
