"""Sub-networks: from the map after a stage to a feature as wide as the encoder's."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from selfcon.networks.backbones import Shape, create_encoder, without_weights
from selfcon.networks.stages import Staged, split


class Linear(nn.Module):
    """`fc`: the mean over the map [B, C, H, W] and one linear layer to [B, D]."""

    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        self.fc = nn.Linear(width_in, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(x.mean((2, 3)))
        return out


def repeat_stages(name: str, *, after: int, width: float, half_depth: bool, options: dict[str, Any]) -> nn.Sequential:
    """`same` and `small`: the stages behind the exit once more, with fresh weights, at whole or half depth."""
    shape = Shape(width, half_depth)
    sibling = create_encoder(name, stem="large", image_size=None, shape=shape, **without_weights(options))
    splitter = split(sibling, name)
    assert isinstance(splitter, Staged)
    return splitter.tail(sibling, after)
