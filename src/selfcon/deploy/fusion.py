"""Convolutions that do what the normalisation behind them did: the same answers from fewer layers."""

from __future__ import annotations

from itertools import pairwise

from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval


def fuse_normalisation(module: nn.Module) -> int:
    """Fold plain batch normalisation into the convolution before it, in place; how many were.

    Only where it is certain that one follows the other: two layers of a sequence, or `conv1` with `bn1` right behind it
    among the layers of a block (where normalisation comes first, its layers do, too). Only for evaluation.
    """
    count = 0
    for parent in module.modules():
        children = list(parent.named_children())
        sequence = isinstance(parent, nn.Sequential)
        for (convolution, _), (norm, _) in pairwise(children):
            if not sequence and (convolution, norm) != (f"conv{norm[2:]}", f"bn{convolution[4:]}"):
                continue
            conv, bn = (getattr(parent, name, None) for name in (convolution, norm))
            if type(conv) is nn.Conv2d and type(bn) is nn.BatchNorm2d:
                setattr(parent, convolution, fuse_conv_bn_eval(conv, bn))
                setattr(parent, norm, nn.Identity())
                count += 1
    return count
