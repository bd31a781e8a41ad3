"""Advice about a run's settings, for `doctor` and for the start of training."""

from __future__ import annotations

from pathlib import Path

from selfcon.data.folders import describe_val
from selfcon.data.shards import is_sharded
from selfcon.data.sources import is_path
from selfcon.workflows.settings import DEFAULT_RECIPE
from selfcon.workflows.task import Task

FEW_IMAGES = 5000
_FEW_STEPS, _FEW_STEPS_WITH_LABELS = 3000, 500  # of pretraining, and of training a classifier at once


def describe_data(task: Task) -> list[str]:
    """Return what to know about the test images."""
    folder = Path(task.settings.data)
    note = describe_val(folder, advise=not task.settings.val_fraction) if is_path(task.settings.data) else None
    return [] if note is None or is_sharded(folder) else [note]


def advise_training(task: Task) -> list[str]:
    """Return what to change where training is too short for its method, or too few images for its stages."""
    settings, images = task.settings, len(task.train)
    if settings.data == DEFAULT_RECIPE or settings.limit_batches is not None:  # digits learn soon; a dry run
        return []
    advice = []
    if images < FEW_IMAGES and settings.weights is None:
        advice.append(
            f"{images:,} training images are few to train from scratch. Pretrained weights help most: --init timm "
            f"--image-size 224 --lr 2e-4, or --init FILE."
        )
    if 3 * settings.batch_size > images:
        advice.append(f"A batch has {settings.batch_size} of {images:,} images. Use a smaller --batch-size.")
    steps = -(-images // settings.batch_size) * settings.epochs
    two_stages = task.method.stages == 2
    enough = _FEW_STEPS if two_stages else _FEW_STEPS_WITH_LABELS
    if steps >= enough:
        return advice
    epochs = -(-settings.epochs * enough // steps)
    few = "1 step is" if steps == 1 else f"{steps:,} steps are"
    what = "for a contrastive loss" if two_stages else "to train a network"
    advice.append(f"{few} few {what}. Use --epochs {epochs}, or a smaller --batch-size.")
    if two_stages and task.method.uses_labels and images < FEW_IMAGES and settings.weights is None:
        advice.append(
            f"{images:,} training images are few for pretraining and a linear probe. Use --method selfcon-1stage, "
            f"which trains the encoder and its classifiers together, with exits, too."
        )
    return advice
