"""Normalisation that does not look at the rest of the batch, for training in pieces."""

from __future__ import annotations

import math
from typing import Literal

from timm.layers.norm_act import BatchNormAct2d
from torch import nn

Norm = Literal["batch", "group"]
"""batch: as published. group: every batch normalisation is a group normalisation, of 32 groups or as many as divide;
that of vectors, such as tokens one by one, is over all their channels."""


def use_group_norm(module: nn.Module) -> None:
    """Replace every batch normalisation below a module."""
    for name, child in list(module.named_children()):
        if isinstance(child, nn.BatchNorm1d | nn.BatchNorm2d):
            groups = math.gcd(32, child.num_features) if isinstance(child, nn.BatchNorm2d) else 1
            norm = nn.GroupNorm(groups, child.num_features, eps=child.eps)
            if child.weight is not None:
                norm.weight.data.copy_(child.weight.data)  # a residual branch may start at zero
                norm.bias.data.copy_(child.bias.data)
            rest = (
                [child.get_submodule("drop"), child.get_submodule("act")] if isinstance(child, BatchNormAct2d) else []
            )
            setattr(module, name, nn.Sequential(norm, *rest) if rest else norm)
        else:
            use_group_norm(child)
