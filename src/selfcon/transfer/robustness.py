"""Corrupted images: 15 corruptions at 5 severities, and what a classifier loses by them.

Corruptions are those of ImageNet-C, made by the package imagecorruptions; the mean corruption error divides the errors
of each corruption by AlexNet's, which is for ImageNet alone. An error is in percent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cache, partial
from multiprocessing import get_context
from typing import Any

import numpy as np

from selfcon.data.images import Pixels
from selfcon.errors import UsageError, unknown_name
from selfcon.memory import count_cores
from selfcon.progress import say

ALEXNET = {
    "gaussian_noise": 88.6428,
    "shot_noise": 89.4468,
    "impulse_noise": 92.2640,
    "defocus_blur": 81.9880,
    "glass_blur": 82.6268,
    "motion_blur": 78.5948,
    "zoom_blur": 79.8360,
    "snow": 86.6816,
    "frost": 82.6572,
    "fog": 81.9324,
    "brightness": 56.4592,
    "contrast": 85.3204,
    "elastic_transform": 64.6056,
    "pixelate": 71.7840,
    "jpeg_compression": 60.6500,
}
"""AlexNet's error for each corruption, the mean over severities (Hendrycks and Dietterich, 2019)."""
ALEXNET_CLEAN = 43.48
CORRUPTIONS = tuple(ALEXNET)
SEVERITIES = (1, 2, 3, 4, 5)
_SMALLEST = 32  # pixels, below which the corruptions cannot be made
_SEEDED = ("impulse_noise", "glass_blur")  # which draw from generators of their own
_WORTH_PROCESSES = 500  # images


def corrupt(image: Pixels, corruption: str, severity: int, *, seed: int) -> Pixels:
    """An image [H, W, 3] corrupted; the same seed gives the same result."""
    if corruption not in ALEXNET:
        raise unknown_name("corruption", corruption, CORRUPTIONS)
    if severity not in SEVERITIES:
        raise UsageError(f"A severity is 1 to 5, not {severity}.")
    if min(image.shape[:2]) < _SMALLEST:
        raise UsageError(
            f"Corruptions need images of at least {_SMALLEST} pixels a side, not {image.shape[0]} x {image.shape[1]}."
        )
    tool = _tool()
    image, seed = np.ascontiguousarray(image), seed % 2**32
    if corruption in _SEEDED:
        corrupted = getattr(tool.corruptions, corruption)(image, severity, seed=seed)
        return np.asarray(corrupted, dtype=np.uint8)
    # The others draw from numpy's global generator, which is given back as it was.
    state = np.random.get_state()  # noqa: NPY002
    try:
        np.random.seed(seed)  # noqa: NPY002
        corrupted = tool.corrupt(image, corruption_name=corruption, severity=severity)
    finally:
        np.random.set_state(state)  # noqa: NPY002
    return np.asarray(corrupted, dtype=np.uint8)


def corrupt_all(images: Pixels, corruption: str, severity: int, *, seed: int, workers: int | None = None) -> Pixels:
    """Images [N, H, W, 3], each corrupted with a seed of its own, in several processes where there are many."""
    work = partial(_corrupt_some, corruption=corruption, severity=severity, seed=seed)
    count = min(workers or count_cores(), max(1, len(images)))
    if count == 1 or len(images) < _WORTH_PROCESSES:
        return work((0, images))
    parts = np.array_split(np.arange(len(images)), count)
    try:
        return np.concatenate(list(_pool(count).map(work, [(int(part[0]), images[part]) for part in parts])))
    except BrokenProcessPool:  # which stays broken, so that the next call is here at once
        _tell_alone()
        return work((0, images))


def _corrupt_some(part: tuple[int, Pixels], *, corruption: str, severity: int, seed: int) -> Pixels:
    first, images = part
    kind = CORRUPTIONS.index(corruption) if corruption in ALEXNET else 0
    return np.stack(
        [
            corrupt(image, corruption, severity, seed=hash((seed, kind, severity, first + row)))
            for row, image in enumerate(images)
        ]
    )


@cache
def _pool(workers: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(workers, mp_context=get_context("spawn"))


@cache
def _tell_alone() -> None:
    """Once."""
    say(
        "note: images are corrupted in this process alone, since others ended before their work was done; a script "
        'must keep what it does below `if __name__ == "__main__":`'
    )


def mean_corruption_error(errors: Mapping[str, Sequence[float]], clean: float, *, imagenet: bool) -> dict[str, float]:
    """Of errors by corruption and severity: their mean, and how much it is above the error on clean images.

    For ImageNet, both are by corruption divided by AlexNet's and given in percent of it, as published (mCE and relative
    mCE); elsewhere they are plain means.
    """
    means = {name: float(np.mean(each)) for name, each in errors.items()}
    if not imagenet:
        mean = float(np.mean(list(means.values())))
        return {"mean_error": mean, "relative_error": mean - clean}
    return {
        "mce": float(np.mean([100 * means[name] / ALEXNET[name] for name in means])),
        "relative_mce": float(
            np.mean([100 * (means[name] - clean) / (ALEXNET[name] - ALEXNET_CLEAN) for name in means])
        ),
    }


def _tool() -> Any:
    try:
        import imagecorruptions  # type: ignore[import-untyped, import-not-found, unused-ignore]
    except ImportError:
        raise UsageError("Corruptions need a package: pip install '.[transfer]' in selfcon's folder.") from None
    return imagecorruptions
