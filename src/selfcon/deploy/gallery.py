"""Images of the run's own data to show beside an answer: neighbours of the training set, samples of the test set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import normalize

from selfcon.errors import UsageError


@dataclass(frozen=True)
class Gallery:
    """Features [N, D] of some training images by exit, and how to see an image of a split."""

    features: dict[str, Tensor]  # unit length
    rows: list[int]  # which training images they are of
    labels: list[str]  # their classes
    samples: list[dict[str, Any]]  # some test images: number and class
    picture: Callable[[str, int], Tensor]  # split and number -> uint8 [3, S, S]
    counts: dict[str, int]  # images of each split

    def neighbours(self, feature: Tensor, exit_name: str, count: int) -> list[dict[str, Any]]:
        """The nearest training images of a feature [D], by cosine."""
        if not 1 <= count <= len(self.rows):
            raise UsageError(f"There are 1 to {len(self.rows)} neighbours to be had, not {count}.")
        cosines = self.features[exit_name] @ normalize(feature.float().cpu(), dim=0)
        best = cosines.topk(count)
        return [
            {"image": self.rows[place], "class": self.labels[place], "cosine": cosine}
            for cosine, place in zip(best.values.tolist(), best.indices.tolist(), strict=True)
        ]

    def png(self, split: str, number: int) -> bytes | None:
        """An image as a file; None where there is no such."""
        if split not in self.counts or not 0 <= number < self.counts[split]:
            return None
        data = BytesIO()
        pixels = self.picture(split, number).permute(1, 2, 0).contiguous()
        Image.fromarray(pixels.to(torch.uint8).numpy()).save(data, "PNG")
        return data.getvalue()
