"""Images that are measured on and were learnt from: in this run, or in one that it begins with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from selfcon.config import Settings, make_settings, read_yaml
from selfcon.data.copies import count_copies
from selfcon.data.split import Split
from selfcon.errors import SelfconError

_LONGEST = 20  # how many runs are looked at


def find_known(settings: Settings, weights: Path) -> list[str]:
    """What to tell of runs to begin with, or that those began with, which learnt from what is held out here."""
    for folder, theirs in _find_runs(weights):
        same = theirs.data == settings.data or Path(theirs.data).resolve() == Path(settings.data).resolve()
        # With the same seed a larger held-out part holds a smaller one, but for an image or two by rounding.
        less = theirs.seed != settings.seed or theirs.val_fraction < settings.val_fraction
        if same and less and settings.val_fraction:
            return [
                f"The run in {folder} learnt from some of the held-out images here: accuracy will look better than it "
                f"is. --seed {theirs.seed} --val-fraction {theirs.val_fraction:g} holds out as there."
            ]
    return []


def _find_runs(weights: Path) -> Iterator[tuple[Path, Settings]]:
    """The run that weights are of, the one that it began with, and so on, as far as they are there."""
    seen: set[Path] = set()
    while weights not in seen and len(seen) < _LONGEST:
        seen.add(weights)
        # Beside the weights of a run, or above those that it kept or exported.
        folder = next((each for each in list(weights.parents)[:3] if (each / "config.yaml").is_file()), None)
        if folder is None:
            return
        try:
            settings = make_settings(read_yaml(folder / "config.yaml"))
        except SelfconError:
            return  # no run of ours
        yield folder, settings
        if settings.weights is None:
            return
        weights = Path(settings.weights)
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
