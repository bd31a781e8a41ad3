"""A network cut at its exits: what lies between one exit and the next, as a module of its own.

The segments one after the other are the network; whoever is content with an exit's answer does not run the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from selfcon.errors import UsageError
from selfcon.networks.exits import BACKBONE
from selfcon.networks.multi_exit import MultiExitNetwork
from selfcon.networks.stages import Staged


class Segment(nn.Module):
    """From what the segment before left (or images) to what the next one needs, the feature and the logits here."""

    def __init__(
        self, name: str, before: Sequence[nn.Module], behind: Sequence[nn.Module], classifier: nn.Module
    ) -> None:
        super().__init__()
        self.name = name
        self.before, self.behind = nn.Sequential(*before), nn.Sequential(*behind)
        self.classifier = classifier

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.before(x)
        feature = self.behind(x)
        return x, feature, self.classifier(feature)


class _Stem(nn.Module):
    """What comes before the first stage, as one module."""

    def __init__(self, splitter: Staged, encoder: Any) -> None:
        super().__init__()
        self.splitter, self.encoder = splitter, encoder

    def forward(self, images: Tensor) -> Tensor:
        return self.splitter.stem(self.encoder, images)


def cut_at_exits(net: MultiExitNetwork) -> list[Segment]:
    """The segments of a network with classifiers, sharing its weights; the last one ends with the backbone."""
    if not net.classifiers:
        raise UsageError("A network is cut at its exits to be answered by them, and this one has no classifiers.")
    splitter = net.splitter
    if not isinstance(splitter, Staged):
        raise UsageError("This encoder does not run stage by stage, so it cannot be cut at its exits.")
    stages, begin = splitter.stages(net.encoder), 0
    before: list[nn.Module] = [_Stem(splitter, net.encoder)]
    segments = []
    for leave in net.exits:
        before += [module for stage in stages[begin : leave.after] for module in stage]
        segments.append(Segment(leave.name, before, [net.subnetworks[leave.name]], net.classifiers[leave.name]))
        before, begin = [], leave.after
    before += [module for stage in stages[begin:] for module in stage]
    segments.append(Segment(BACKBONE, before, splitter.end(net.encoder), net.classifiers[BACKBONE]))
    return segments
