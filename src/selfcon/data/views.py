"""Views of stored images: draws applied and normalised, by whichever implementation suits the device.

B samples, V views, S output side; H x W stored images.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from selfcon.data.augment import augment, normalise
from selfcon.data.policies import Policy, draw
from selfcon.errors import UsageError, unknown_name

IMPLEMENTATIONS = ("plain", "compiled", "triton")


@dataclass(frozen=True, kw_only=True)
class Look:
    """How stored images become what a network sees, but for the sample's own draw."""

    policy: Policy
    mean: Tensor  # [3]
    std: Tensor
    size: int
    seed: int
    epoch: int
    views: int = 1


def make_views(stored: Tensor, rows: Tensor, samples: Tensor, look: Look, implementation: str = "auto") -> Tensor:
    """Views [V·B, 3, S, S], all of view 1 first, of the images in these rows [B] of stored [N, 3, H, W], uint8.

    `samples` [B] are the keys of their draws: their indices in the data set.
    """
    if look.views < 1:
        raise UsageError(f"A sample has at least one view, not {look.views}.")
    chosen = _choose(stored.device, look) if implementation == "auto" else implementation
    if chosen == "triton":
        from selfcon.data.augment_triton import augment_views

        return augment_views(stored, rows, samples, look)
    if chosen == "compiled":
        return _compiled()(stored, rows, samples, look)
    if chosen == "plain":
        return _plain(stored, rows, samples, look)
    raise unknown_name("implementation of the augmentation", chosen, ["auto", *IMPLEMENTATIONS])


def _choose(device: torch.device, look: Look) -> str:
    """The kernel where it can be used; RandAugment looks at each draw from the host, and gains nothing by compiling."""
    if device.type != "cuda" or look.policy.randaugment or find_spec("triton") is None:
        return "plain"
    from selfcon.data.augment_triton import LARGEST_SIDE

    return "triton" if look.size <= LARGEST_SIDE else "compiled"


def _plain(stored: Tensor, rows: Tensor, samples: Tensor, look: Look) -> Tensor:
    images = stored[rows]
    height, width = images.shape[2:]
    seen = []
    for view in range(look.views):
        draws = draw(look.policy, samples, height=height, width=width, seed=look.seed, epoch=look.epoch, view=view)
        seen.append(normalise(augment(images, look.policy, draws, look.size), look.mean, look.std))
    return torch.cat(seen)


@cache
def _compiled() -> Callable[[Tensor, Tensor, Tensor, Look], Tensor]:
    return torch.compile(_plain)
