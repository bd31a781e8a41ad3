"""Images that are measured on and were learnt from: in this run, or in one that it begins with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from selfcon.config import Settings, make_settings, read_yaml
from selfcon.data.copies import count_copies
from selfcon.data.folders import is_to_be_split
from selfcon.data.source import Source
from selfcon.data.split import Split
from selfcon.errors import SelfconError
from selfcon.workflows.places import noted_counts, noted_place, same_place

_LONGEST = 20  # how many runs are looked at
_BELOW = ("encoders", "export", "timm", "hub")  # where a run keeps weights besides its own


def find_known(settings: Settings, weights: Path, source: Source) -> list[str]:
    """What to tell of runs to begin with, or that those began with, which learnt from what is measured on here."""
    for folder, theirs in _find_runs(weights):
        if not same_place(noted_place(folder) or theirs.data, settings.data):
            continue
        known = ["test"] if is_to_be_split(Path(settings.data)) and _split_otherwise(folder, theirs, source) else []
        # With the same seed a larger held-out part holds a smaller one, but for an image or two by rounding.
        less = theirs.seed != settings.seed or theirs.val_fraction < settings.val_fraction
        if settings.val_fraction and (less or known):
            known.append("held-out")
        if known:
            advice = f" --seed {theirs.seed} --val-fraction {theirs.val_fraction:g} holds out as there." if less else ""
            return [
                f"The run in {folder} learnt from some of the {' and '.join(known)} images here: accuracy will look "
                f"better than it is.{advice if known == ['held-out'] else ''}"
            ]
    return []


def _split_otherwise(folder: Path, theirs: Settings, source: Source) -> bool:
    """Whether a folder has other images than when a run was trained on it, or was split by the seed, as once it was."""
    counts = noted_counts(folder)
    return counts["test"] != len(source.test) if "test" in counts else theirs.seed != 0


def _find_runs(weights: Path) -> Iterator[tuple[Path, Settings]]:
    """The run that weights are of, the one that it began with, and so on, as far as they are there."""
    seen: set[Path] = set()
    while weights not in seen and len(seen) < _LONGEST:
        seen.add(weights)
        folder = weights.parent
        while folder.name in _BELOW:
            folder = folder.parent
        try:
            settings = make_settings(read_yaml(folder / "config.yaml"))
        except SelfconError:
            return  # no run of ours
        yield folder, settings
        if settings.weights in (None, "timm"):
            return
        weights = Path(str(settings.weights))
        weights = weights / "model.safetensors" if weights.is_dir() else weights


def find_copies(train: Split, val: Split | None, test: Split) -> list[str]:
    """What to tell of images that are measured on and learnt from; where they stream, `data check` looks for them."""
    found = []
    for name, split in (("held-out", val), ("test", test)):
        if split is not None and (count := count_copies(split, train)):
            are = "is a training image" if count == 1 else "are training images"
            found.append(
                f"{count:,} of the {len(split):,} {name} images {are}, too: accuracy will look better than it is. "
                f"`selfcon data check` names them."
            )
    return found
