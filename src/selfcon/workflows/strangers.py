"""Which images are strange to a run: told by its features, with a threshold from held-out images."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from selfcon.data.source import FileImages
from selfcon.data.split import Split
from selfcon.evaluation.accuracy import embed
from selfcon.evaluation.outliers import KINDS, auroc
from selfcon.report.plots import spread
from selfcon.workflows.inference import find_images
from selfcon.workflows.trained import TrainedRun

_KNOWN = 10_000  # training images that strange ones are told by
_KEPT = 0.95  # of held-out images that are not to be called strange


@dataclass(frozen=True)
class Strangers:
    """By exit the score above which an image is strange, what scores are computed from, and how well that works."""

    thresholds: dict[str, float]
    strange: dict[str, dict[str, Tensor]]  # by part (held, told, outside) and exit, which images are [N]
    tensors: dict[str, Tensor]
    found: dict[str, Any]


def fit_strangers(run: TrainedRun, held: Split, told: Split, *, kind: str, outside: Split | None) -> Strangers:
    """Thresholds from `held`, shares and AUROC of `told` and of images from outside."""
    train = run.split("train")
    known = train.take(spread(len(train), _KNOWN).to(train.device))
    parts = {"known": known, "held": held, "told": told}
    if outside is not None:
        parts["outside"] = outside
    features = {name: embed(run.net, each, size=run.size) for name, each in parts.items()}
    thresholds: dict[str, float] = {}
    found: dict[str, dict[str, float]] = {}
    tensors: dict[str, Tensor] = {}
    strange: dict[str, dict[str, Tensor]] = {part: {} for part in parts if part != "known"}
    for name in run.net.names:
        stranger = KINDS[kind].fit(features["known"][name], known.labels.cpu())
        scores = {part: stranger.score(features[part][name]) for part in strange}
        thresholds[name] = float(torch.quantile(scores["held"].double(), _KEPT))
        for part, each in scores.items():
            strange[part][name] = each > thresholds[name]
        found[name] = {"called_strange": 100 * float(strange["told"][name].double().mean())}
        if outside is not None:
            found[name] |= {
                "auroc": auroc(scores["told"], scores["outside"]),
                "outside_called_strange": 100 * float(strange["outside"][name].double().mean()),
            }
        tensors |= {f"{name}.{part}": value.cpu().contiguous() for part, value in stranger.state().items()}
    return Strangers(thresholds, strange, tensors, {"exits": found})


def open_outside(run: TrainedRun, outside: str) -> Split:
    """Images of something else: of a folder whatever its layout, or of a data set."""
    if Path(outside).is_dir():
        paths = find_images([outside])
        return run.as_seen(FileImages(paths, np.zeros(len(paths), np.int64)))
    return run.as_seen(run.other_source(outside).test)
