"""What stands on a feature in training: the projection for contrastive losses (classifiers are plain linear layers)."""

from __future__ import annotations

from torch import Tensor, nn


class Projection(nn.Module):
    """[B, width] -> [B, dim] through one hidden layer; its output is not normalised, since losses do that."""

    def __init__(self, width: int, dim: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(width, width)
        self.out = nn.Linear(width, dim)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.hidden(x).relu())
        return out
