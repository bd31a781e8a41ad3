"""CutMix: a box of every image of a batch is another image's, and their labels share the loss as they share the area.

One box for the whole batch, so that a loss of the batch is a mixture of two: with the labels of the images, and with
those of the images that the boxes are from. B samples, V views, S output side.
"""

from __future__ import annotations

import torch
from torch import Tensor

from selfcon.data.random import Stream, draw_words, to_uniform


def cut_mix(
    images: Tensor, labels: Tensor, step: Tensor, *, probability: float, seed: int, views: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Mixed images [V·B, 3, S, S], the labels [B] of their boxes, and the share of the area that is not box.

    Of every four samples the first is mixed with the third and the second with the fourth, in every view: shares of
    several processes that are multiples of four are mixed as one process would, and the balanced sampler's pairs of a
    class are not mixed with themselves. Without a partner a sample stays as it is. Whether the batch is mixed and where
    the box is follows from the seed and the number of the update, an integer tensor of no dimension: nothing here makes
    the host wait. The box takes a uniform share of the area, as far as it does not leave the image.
    """
    words = draw_words(step[None], seed=seed, epoch=0, stream=Stream.MIX, words=4)
    gate, share, *centre = to_uniform(words)[0].unbind()
    length = share.sqrt() * (gate < probability)
    rows, columns = (
        _covered(side, middle, length, images.device) for side, middle in zip(images.shape[2:], centre, strict=True)
    )
    box = rows[:, None] & columns
    own = torch.arange(len(labels), device=labels.device)
    partner = torch.where(own ^ 2 < len(labels), own ^ 2, own)
    others = images.unflatten(0, (views, -1))[:, partner].flatten(0, 1)
    return torch.where(box, others, images), labels[partner], 1 - box.float().mean()


def _covered(side: int, middle: Tensor, length: Tensor, device: torch.device) -> Tensor:
    """[side]: which pixels a stretch covers, whose middle and length are shares of the side."""
    pixels = torch.arange(side, device=device)
    first, last = ((middle - length / 2) * side).round(), ((middle + length / 2) * side).round()
    return (pixels >= first) & (pixels < last)
