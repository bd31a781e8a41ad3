"""Views of stored images: draws applied and normalised, by whichever implementation suits the device.

B samples, V views, S output side; H x W stored images.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from selfcon.data.augment import augment, normalise, randaugment, take_own_step
from selfcon.data.draws import draw, draw_choices
from selfcon.data.policies import Policy
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
    if look.policy.then is not None:
        # Whichever implementation makes the views, the step sees them before they are normalised.
        policy, mean, std = replace(look.policy, then=None), torch.zeros_like(look.mean), torch.ones_like(look.std)
        pixels = make_views(stored, rows, samples, replace(look, policy=policy, mean=mean, std=std), implementation)
        changed = take_own_step(pixels, look.policy, samples, seed=look.seed, epoch=look.epoch, views=look.views)
        return normalise(changed, look.mean, look.std)
    chosen = _choose(stored.device, look) if implementation == "auto" else implementation
    if chosen == "triton":
        return _by_kernel(stored, rows, samples, look)
    if chosen == "compiled":
        return _compiled()(stored, rows, samples, look)
    if chosen == "plain":
        return _plain(stored, rows, samples, look)
    raise unknown_name("implementation of the augmentation", chosen, ["auto", *IMPLEMENTATIONS])


def _choose(device: torch.device, look: Look) -> str:
    """The kernel where it can be used; RandAugment's tables are made on the host, which cannot be compiled."""
    if device.type != "cuda" or find_spec("triton") is None:
        return "plain"
    from selfcon.data.augment_triton import LARGEST_SIDE

    if look.size <= LARGEST_SIDE:
        return "triton"
    return "plain" if look.policy.randaugment else "compiled"


def _by_kernel(stored: Tensor, rows: Tensor, samples: Tensor, look: Look) -> Tensor:
    """RandAugment comes first in a policy, and is not in the kernel, which then gets other images for each view."""
    from selfcon.data.augment_triton import augment_views

    if not look.policy.randaugment:
        return augment_views(stored, rows, samples, look)
    images, seen, rest = stored[rows], [], replace(look, views=1)
    for view in range(look.views):
        choices = draw_choices(samples, seed=look.seed, epoch=look.epoch, view=view)
        changed = randaugment(images, choices, look.policy.magnitude)
        seen.append(augment_views(changed, torch.arange(len(rows), device=rows.device), samples, rest, first=view))
    return torch.cat(seen)


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
