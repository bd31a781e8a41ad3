"""Where the loss looks: Grad-CAM of a contrastive loss, by the exit that the gradient comes through.

At a map A the weight of a channel is the mean over places of the gradient of -L, and the picture is the positive part
of the weighted sum of channels: what is warm there makes the loss smaller. The gradient reaches a map after which a
sub-network leaves on several ways, and each of them has a picture (Figure 5); the whole of it compares losses
(Figure 7), where both are normalised by the least and the largest value of the two, so that lengths can be compared.

captum's LayerGradCam computes the same for one output of a network (a test holds both equal), but knows neither a loss
over a batch nor ways.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from selfcon.errors import UsageError
from selfcon.losses.methods import Method
from selfcon.networks.multi_exit import MultiExitNetwork

WHOLE = "all"
"""The gradient on all ways together."""


def loss_maps(
    net: MultiExitNetwork, images: Tensor, labels: Tensor, method: Method, *, after: int | None = None, **options: Any
) -> dict[str, Tensor]:
    """Maps [B, h, w] by exit, and of all together, on what the network has `after` a stage (its first exit's).

    `images` hold the method's views one below the other; maps are those of the first view.
    """
    if method.stages == 1:
        raise UsageError(f"{method.name} is not contrastive: Grad-CAM of the loss needs a method that contrasts.")
    if len(images) != method.views * len(labels):
        raise UsageError(f"{method.name} takes {method.views} views of each of {len(labels)} samples.")
    if after is None:
        if not net.exits:
            raise UsageError("This network has no exit: say after which stage to look.")
        after = net.exits[0].after
    if method.uses_exits and len(net.names) < 2:
        raise UsageError(f"{method.name} needs a sub-network, and this network has none.")
    was_training = net.training
    net.eval()
    try:
        with torch.enable_grad():
            inside, out = net.look_inside(images.detach().requires_grad_(), after)
            used = [out.projections[name] for name in (out.names if method.uses_exits else out.names[:1])]
            loss = method.loss_from_output(out, labels, **options)
            pulls = torch.autograd.grad(-loss, used, retain_graph=True)
            maps = {}
            whole = torch.zeros_like(inside)
            for name, projection, pull in zip(out.names, used, pulls, strict=False):
                way = torch.autograd.grad(projection, inside, pull, retain_graph=True, allow_unused=True)[0]
                if way is not None:  # an exit before this stage says nothing of it
                    whole = whole + way
                    maps[name] = grad_cam(inside, way)[: len(labels)]
            maps[WHOLE] = grad_cam(inside, whole)[: len(labels)]
    finally:
        net.train(was_training)
    return maps


def grad_cam(inside: Tensor, gradient: Tensor) -> Tensor:
    """Maps [B, h, w] from a layer's output [B, C, h, w] and a gradient in it."""
    weights = gradient.mean((2, 3), keepdim=True)
    return (weights * inside).sum(1).relu().detach()


def normalise_together(maps: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Maps [B, h, w] in [0, 1], for every image by the least and the largest value in any of them."""
    stacked = torch.stack(list(maps.values()))
    least, largest = stacked.amin((0, 2, 3)), stacked.amax((0, 2, 3))
    span = (largest - least).clamp_min(torch.finfo(stacked.dtype).tiny)
    return {name: (each - least[:, None, None]) / span[:, None, None] for name, each in maps.items()}


def enlarge(maps: Tensor, size: Sequence[int]) -> Tensor:
    """Maps [B, h, w] at the size of the images."""
    return interpolate(maps[:, None], size=list(size), mode="bilinear", align_corners=False)[:, 0].clamp(0, 1)
