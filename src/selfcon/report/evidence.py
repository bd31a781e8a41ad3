"""What a report shows of the test set besides numbers, kept in the run folder so that no data are needed later."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from selfcon.analysis.embedding import FEWEST_MAPPED, find_principal_plane, is_one_point, project
from selfcon.evaluation.accuracy import Predictions
from selfcon.evaluation.answers import ENSEMBLE
from selfcon.report.plots import draw_map, spread, thumbnail

_MOST_MAPPED, _MOST_CONFUSED, _MOST_WRONG = 1000, 10, 24
_SAMPLES_FOR_TSNE = 30_000  # epochs x training images, for which t-SNE takes about a tenth of a run on the digits


def gather(
    predictions: Predictions,
    features: Mapping[str, Tensor],
    *,
    pictures: Callable[[Tensor], Tensor],
    describe: Callable[[int], str],
    classes: tuple[str, ...],
    seed: int,
    samples: int,
) -> dict[str, Any]:
    """Return what evidence.json holds.

    Of features [N, D] by exit, a way to get images [B] as uint8 [B, 3, H, W], and one to say where an image is from. An
    exit whose features all point one way has no map. The map is a t-SNE map, or after training on few `samples` (epochs
    x training images) a PCA map, which takes no time. It never depends on measured time, so equal runs have equal maps.
    """
    logits, labels = predictions.logits[ENSEMBLE], predictions.labels
    some = spread(len(labels), _MOST_MAPPED)
    maps, by = {}, "tsne" if samples >= _SAMPLES_FOR_TSNE else "pca"
    if len(some) >= FEWEST_MAPPED:
        mapped = {name: normalize(each[some].float(), dim=1) for name, each in features.items()}
        maps = {
            name: draw_map(
                project(each, seed=seed) if by == "tsne" else find_principal_plane(each), labels[some], classes
            )
            for name, each in mapped.items()
            if not is_one_point(each)
        }
    return {
        "tested": len(labels),
        "mapped": len(some),
        "map": by,
        "maps": maps,
        "confusions": find_confusions(logits, labels, classes),
        "wrong": _find_wrong(logits, labels, pictures, describe, classes),
    }


def find_confusions(logits: Tensor, labels: Tensor, classes: tuple[str, ...]) -> list[dict[str, Any]]:
    """The pairs of classes that are mixed up most often, with how many and the share of the true class."""
    guesses = logits.argmax(1)
    wrong = guesses != labels
    pairs, counts = torch.unique(torch.stack([labels[wrong], guesses[wrong]], dim=1), dim=0, return_counts=True)
    sizes = torch.bincount(labels, minlength=len(classes))
    worst = counts.argsort(descending=True, stable=True)[:_MOST_CONFUSED]
    return [
        {
            "true": classes[int(pairs[row, 0])],
            "taken_for": classes[int(pairs[row, 1])],
            "count": int(counts[row]),
            "share": 100 * float(counts[row] / sizes[pairs[row, 0]]),
        }
        for row in worst.tolist()
    ]


def _find_wrong(
    logits: Tensor,
    labels: Tensor,
    pictures: Callable[[Tensor], Tensor],
    describe: Callable[[int], str],
    classes: tuple[str, ...],
) -> list[dict[str, Any]]:
    """The images that the ensemble gets wrong and is surest about."""
    sure, guesses = logits.softmax(1).max(1)
    wrong = (guesses != labels).nonzero()[:, 0]
    worst = wrong[sure[wrong].argsort(descending=True, stable=True)][:_MOST_WRONG]
    return [
        {
            "image": thumbnail(picture),
            "where": describe(row),
            "true": classes[int(labels[row])],
            "taken_for": classes[int(guesses[row])],
            "sure": 100 * float(sure[row]),
        }
        for row, picture in zip(worst.tolist(), pictures(worst), strict=True)
    ]
