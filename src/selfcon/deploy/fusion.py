"""Convolutions that do what the normalisation behind them did: the same answers from fewer layers."""

from __future__ import annotations

from itertools import pairwise

from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval


def fuse_normalisation(module: nn.Module) -> int:
    """Fold plain batch normalisation into the convolution before it, in place; how many were.

    Only where the names of neighbours say that one follows the other: `conv1` and `bn1` of a block, or two layers of a
    sequence. Only for evaluation.
    """
    count = 0
    for parent in module.modules():
        children = list(parent.named_children())
        pairs = [(f"conv{name[2:]}", name) for name, _ in children if name.startswith("bn")]
        if isinstance(parent, nn.Sequential):
            pairs = [(first, second) for (first, _), (second, _) in pairwise(children)]
        for convolution, norm in pairs:
            conv, bn = (getattr(parent, name, None) for name in (convolution, norm))
            if type(conv) is nn.Conv2d and type(bn) is nn.BatchNorm2d:
                setattr(parent, convolution, fuse_conv_bn_eval(conv, bn))
                setattr(parent, norm, nn.Identity())
                count += 1
    return count
