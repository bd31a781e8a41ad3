"""Advice about a run's settings, for `doctor` and for the start of training."""

from __future__ import annotations

from pathlib import Path

from selfcon.data.folders import describe_val
from selfcon.data.shards import is_sharded
from selfcon.data.sources import is_path
from selfcon.workflows.settings import DEFAULT_RECIPE
from selfcon.workflows.task import Task

FEW_IMAGES = 5000
_FEW_STEPS = 3000


def describe_data(task: Task) -> list[str]:
    """Return what to know about the test images."""
    folder = Path(task.settings.data)
    note = describe_val(folder, advise=not task.settings.val_fraction) if is_path(task.settings.data) else None
    return [] if note is None or is_sharded(folder) else [note]


def advise_pretraining(task: Task) -> list[str]:
    """Return what to change where pretraining is too short for its method, or two stages do not suit the data."""
    settings, images = task.settings, len(task.train)
    steps = -(-images // settings.batch_size) * settings.epochs
    learns_soon = settings.data == DEFAULT_RECIPE or settings.limit_batches is not None  # digits, or a dry run
    if task.method.stages == 1 or steps >= _FEW_STEPS or learns_soon:
        return []
    epochs = -(-settings.epochs * _FEW_STEPS // steps)
    few = "1 step is" if steps == 1 else f"{steps:,} steps are"
    advice = [f"{few} few for a contrastive loss. Use --epochs {epochs}, or a smaller --batch-size."]
    if task.method.uses_labels and images < FEW_IMAGES and settings.weights is None:
        advice.append(
            f"{images:,} training images are few for pretraining and a linear probe. Use --method selfcon-1stage, "
            f"which trains the encoder and its classifiers together, with exits, too."
        )
    return advice
