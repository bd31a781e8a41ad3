"""Convolutions that do what the normalisation behind them did: the same answers from fewer layers."""

from __future__ import annotations

from itertools import pairwise

from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from selfcon.described import package_of

_IN_ORDER = ("selfcon", "timm", "torchvision")


def fuse_normalisation(module: nn.Module) -> int:
    """Fold plain batch normalisation into the convolution before it, in place; how many were.

    Only for evaluation, and only where one follows the other: two layers of a plain sequence, or in a block of ours,
    timm's or torchvision's `conv1` with `bn1` right behind it among its layers (where normalisation comes first, its
    layers do, too). A block of somebody's script may run its layers in any order.
    """
    count = 0
    for parent in module.modules():
        children = list(parent.named_children())
        sequence = isinstance(parent, nn.Sequential) and type(parent).forward is nn.Sequential.forward
        if not sequence and package_of(type(parent)) not in _IN_ORDER:
            continue
        for (convolution, _), (norm, _) in pairwise(children):
            if not sequence and (convolution, norm) != (f"conv{norm[2:]}", f"bn{convolution[4:]}"):
                continue
            conv, bn = (getattr(parent, name, None) for name in (convolution, norm))
            if type(conv) is nn.Conv2d and type(bn) is nn.BatchNorm2d:
                setattr(parent, convolution, fuse_conv_bn_eval(conv, bn))
                setattr(parent, norm, nn.Identity())
                count += 1
    return count
