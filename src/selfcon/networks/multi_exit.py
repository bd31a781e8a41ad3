"""A backbone with sub-networks: one forward gives a feature of each image at every exit.

Shapes: B samples, V views, E exits (0 is the backbone), D feature dimension.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from selfcon.errors import UsageError, unknown_name
from selfcon.networks.exits import BACKBONE, Exit
from selfcon.networks.heads import Projection
from selfcon.networks.stages import Splitter, Staged, input_channels


@dataclass(frozen=True)
class Output:
    """What a network gives at each exit, by its name; projections and logits are empty where none were built."""

    names: list[str]
    features: dict[str, Tensor]
    projections: dict[str, Tensor] = field(default_factory=dict)
    logits: dict[str, Tensor] = field(default_factory=dict)

    def projections_bved(self, views: int = 1) -> Tensor:
        """Return the projections as [B, V, E, D] of a batch with all first views and then all second views."""
        if not self.projections:
            raise UsageError("This network has no projection heads: create it with projection_dim.")
        stacked = torch.stack([self.projections[name] for name in self.names], dim=1)
        if views < 1 or len(stacked) % views:
            raise UsageError(
                f"A batch of {len(stacked)} cannot hold {views} views per image, "
                f"all first views and then all second views."
            )
        return stacked.view(views, len(stacked) // views, *stacked.shape[1:]).transpose(0, 1)


class MultiExitNetwork(nn.Module):
    """An encoder, sub-networks after some of its stages, and heads on each. `selfcon.create_model` makes one."""

    def __init__(
        self,
        encoder: nn.Module,
        splitter: Splitter,
        subnetworks: Mapping[Exit, nn.Module],
        *,
        width: int,
        projection_dim: int | None,
        num_classes: int | None,
    ) -> None:
        super().__init__()
        self.exits: Sequence[Exit] = sorted(subnetworks)
        self.names = [BACKBONE, *(leave.name for leave in self.exits)]
        self.width = width
        self.in_channels = input_channels(encoder)
        self.encoder = encoder
        self.splitter = splitter
        self.subnetworks = nn.ModuleDict({leave.name: subnetworks[leave] for leave in self.exits})
        self.projections = nn.ModuleDict()
        if projection_dim is not None:
            self.projections.update({name: Projection(width, projection_dim) for name in self.names})
        self.classifiers = nn.ModuleDict()
        if num_classes is not None:
            self.classifiers.update({name: nn.Linear(width, num_classes) for name in self.names})

    if TYPE_CHECKING:  # nn.Module's own returns Any

        def __call__(self, images: Tensor, upto: str | None = None) -> Output: ...

    def forward(self, images: Tensor, upto: str | None = None) -> Output:
        """All exits, or with `upto` that one alone, without what stands behind it."""
        if upto is not None and upto not in self.names:
            raise unknown_name("exit", upto, self.names)
        if not isinstance(images, Tensor):
            raise UsageError(f"images must be a tensor, not {type(images).__name__}.")
        if images.ndim != 4 or images.shape[1] != self.in_channels or not images.is_floating_point():
            advice = (
                " Convert and normalize them first: (images.float() / 255 - mean) / std, with the mean and standard "
                f"deviation of each channel as tensors of the shape [{self.in_channels}, 1, 1]."
            )
            raise UsageError(
                f"images must be floating point of the shape [B, {self.in_channels}, H, W], "
                f"not {images.dtype} {list(images.shape)}.{'' if images.is_floating_point() else advice}"
            )
        wanted = [leave for leave in self.exits if upto in (None, leave.name)]
        whole = upto in (None, BACKBONE)
        maps, feature = self.splitter.walk(self.encoder, images, [leave.after for leave in wanted], whole=whole)
        return self._leave(wanted, maps, feature)

    def look_inside(self, images: Tensor, after: int) -> tuple[Tensor, Output]:
        """The map [B, C, H, W] after a stage, counted from 1, and all exits, computed from that very map."""
        stages = self.stages
        known = [leave.after for leave in self.exits]
        if after not in known and not 1 <= after <= stages:
            there = f"stages 1 to {stages}" if stages else f"the stages {known}" if known else "none of its stages"
            raise UsageError(f"This network can be looked at after {there}, not after {after}.")
        maps, feature = self.splitter.walk(self.encoder, images, sorted({*known, after}), whole=True)
        return maps[after], self._leave(self.exits, maps, feature)

    @property
    def stages(self) -> int:
        """How many stages the encoder has, where it runs stage by stage; else 0."""
        return len(self.splitter.stages(self.encoder)) if isinstance(self.splitter, Staged) else 0

    def need_stages(self, count: int, what: str) -> None:
        """UsageError where a task needs the maps of so many stages, and they cannot be had."""
        if not self.stages:
            raise UsageError(f"{what} needs an encoder that runs stage by stage, and this one does not.")
        if self.stages < count:
            raise UsageError(f"{what} needs an encoder of {count} stages or more, and this one has {self.stages}.")

    def stage_maps(self, images: Tensor) -> list[Tensor]:
        """The maps [B, C, H, W] after every stage, for tasks that need more than one of them."""
        if not self.stages:
            raise UsageError("This encoder does not run stage by stage, so its maps cannot be had.")
        maps, _ = self.splitter.walk(self.encoder, images, list(range(1, self.stages + 1)), whole=False)
        return [maps[number] for number in sorted(maps)]

    def keep_maps_only(self) -> None:
        """Train nothing but what these maps are made of: no sub-network, no head, nothing behind the last stage."""
        self.requires_grad_(False)
        self.encoder.requires_grad_(True)
        if isinstance(self.splitter, Staged):
            for module in self.splitter.end(self.encoder):
                module.requires_grad_(False)

    def stage_widths(self) -> list[int]:
        """The channels of these maps."""
        return self.splitter.widths(self.encoder)

    def stage_of_modules(self) -> dict[str, int]:
        """The stage of every module of the encoder: the stem is 0, what stands behind the last stage is left out.

        Of encoders that do not run stage by stage, nothing is known.
        """
        if not isinstance(self.splitter, Staged):
            return {}
        names = {id(module): name for name, module in self.encoder.named_modules()}
        found: dict[str, int] = {}
        for number, stage in enumerate(self.splitter.stages(self.encoder), start=1):
            found |= {names[id(inner)]: number for module in stage for inner in module.modules()}
        behind = {names[id(inner)] for module in self.splitter.end(self.encoder) for inner in module.modules()}
        return {name: found.get(name, 0) for name in names.values() if name and name not in behind}

    def _leave(self, wanted: Sequence[Exit], maps: Mapping[int, Tensor], feature: Tensor | None) -> Output:
        features = {} if feature is None else {BACKBONE: feature}
        for leave in wanted:
            features[leave.name] = self.subnetworks[leave.name](maps[leave.after])
        return Output(
            names=list(features),
            features=features,
            projections={name: self.projections[name](features[name]) for name in features if name in self.projections},
            logits={name: self.classifiers[name](features[name]) for name in features if name in self.classifiers},
        )

    @property
    def dtype(self) -> torch.dtype:
        """Of its weights, and of the images that it wants."""
        return next(self.parameters()).dtype

    def to_timm(self) -> nn.Module:
        """A copy of the encoder as the plain timm module it is: images to the backbone's features.

        That of a trained run says how to prepare images: `timm.data.resolve_model_data_config` reads it.
        """
        _clear_caches(self.encoder)
        return copy.deepcopy(self.encoder)

    def __deepcopy__(self, memo: dict[int, Any]) -> MultiExitNetwork:
        _clear_caches(self.encoder)
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        clone.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return clone


def _clear_caches(encoder: nn.Module) -> None:
    """Some attention layers of timm keep, in evaluation, tensors that cannot be copied and are easily made again."""
    for module in encoder.modules():
        cache = getattr(module, "attention_bias_cache", None)
        if isinstance(cache, dict):
            cache.clear()
