"""Images that are measured on and were learnt from: in this run, or in one that it begins with."""

from __future__ import annotations

import warnings
from pathlib import Path

from selfcon.config import Settings, make_settings, read_yaml
from selfcon.data.copies import count_copies
from selfcon.data.folders import is_to_be_split
from selfcon.data.split import Split
from selfcon.errors import SelfconError, SelfconWarning


def warn_of_known(settings: Settings, weights: Path) -> None:
    """Of a run to begin with that learnt from what is held out here: the seed splits a folder, and holds out."""
    folder = weights.parent
    folder = folder.parent if folder.name == "encoders" else folder
    try:
        theirs = make_settings(read_yaml(folder / "config.yaml"))
    except SelfconError:
        return  # no run of ours
    same = theirs.data == settings.data or Path(theirs.data).resolve() == Path(settings.data).resolve()
    seeds = theirs.seed != settings.seed
    known = ["test"] if seeds and is_to_be_split(Path(settings.data)) else []
    # With the same seed, a larger held-out part holds a smaller one.
    if settings.val_fraction and (seeds or theirs.val_fraction < settings.val_fraction):
        known.append("held-out")
    if same and known:
        warnings.warn(
            f"The run in {folder} learnt from some of the {' and '.join(known)} images here: accuracy will look better "
            f"than it is. --seed {theirs.seed} --val-fraction {theirs.val_fraction:g} splits the data as there.",
            SelfconWarning,
            stacklevel=3,
        )


def warn_of_copies(train: Split, val: Split | None, test: Split) -> None:
    """Of images that are measured on and learnt from; where they stream, `selfcon data check` looks for them."""
    for name, split in (("held-out", val), ("test", test)):
        if split is not None and (count := count_copies(split, train)):
            are = "is a training image" if count == 1 else "are training images"
            warnings.warn(
                f"{count:,} of the {len(split):,} {name} images {are}, too: accuracy will look better than it is. "
                f"`selfcon data check` names them.",
                SelfconWarning,
                stacklevel=3,
            )
