"""The samples of a split as training sees them: batches on a device, wherever the images are kept.

`Resident` keeps all of them decoded; `Streamed` reads them while the device works. N samples, B in a batch, V views,
S output side.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from selfcon.data.parts import WHOLE, Part
from selfcon.data.policies import Policy
from selfcon.errors import UsageError


@dataclass(frozen=True)
class Batch:
    """Augmented and normalised images [V·B, 3, S, S], all of view 1 first; labels [B]; samples [B] in the data set."""

    images: Tensor
    labels: Tensor
    samples: Tensor


class Split(ABC):
    """What every kind of split can do; the order and every draw follow from (seed, epoch, sample, view)."""

    labels: Tensor  # [N] int64, on the device where batches are made
    mean: Tensor  # [3], of pixels in [0, 1]
    std: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def device(self) -> torch.device:
        """Where batches are made."""
        return self.labels.device

    @property
    @abstractmethod
    def stored_bytes(self) -> int:
        """What its images take of the memory of this process."""

    @abstractmethod
    def batches(
        self,
        policy: Policy,
        *,
        batch_size: int,
        seed: int,
        epoch: int,
        views: int = 1,
        size: int | None = None,
        first: int = 0,
        part: Part = WHOLE,
        balanced: bool = False,
    ) -> Iterator[Batch]:
        """The batches of one epoch in its own order, from number `first` on; the last one may be smaller.

        Of each batch, the samples that are this process's part of it. `balanced`: every class equally often.
        """

    @abstractmethod
    def plain_batches(self, *, batch_size: int, size: int | None = None, part: Part = WHOLE) -> Iterator[Batch]:
        """This process's part of all samples, in their stored order, normalised only."""

    @abstractmethod
    def batch(
        self, samples: Tensor, policy: Policy, *, seed: int, epoch: int, views: int = 1, size: int | None = None
    ) -> Batch:
        """The batch of any samples [B]."""

    @abstractmethod
    def take(self, samples: Tensor) -> Self:
        """Those samples [B] alone."""

    @abstractmethod
    def pictures(self, samples: Tensor) -> Tensor:
        """Those samples [B] to look at: uint8 [B, 3, S, S], on the CPU."""

    @abstractmethod
    def fingerprint(self) -> str:
        """SHA-256 of what tells these data from others."""

    @abstractmethod
    def describe_place(self) -> str:
        """Where the images are, in words; nothing where there is nothing to say."""


def cut(samples: Tensor, batch_size: int) -> Sequence[Tensor]:
    """Samples [N] in batches."""
    if batch_size < 1:
        raise UsageError(f"A batch holds at least one sample, not {batch_size}.")
    return torch.split(samples, batch_size)
