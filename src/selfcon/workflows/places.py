"""Where the data of a run are, whichever folder it is opened from."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from selfcon.config import Settings, same_path
from selfcon.data.sources import list_sources
from selfcon.errors import SelfconError
from selfcon.training.folder import RunFolder


def noted_place(folder: str | Path) -> str | None:
    """Where the data of a run lay when it was trained, if they were files and this was noted."""
    place = _read_noted(folder).get("place")
    return place if isinstance(place, str) else None


def noted_counts(folder: str | Path) -> dict[str, int]:
    """How many images a run had by split, if this was noted."""
    counts: Any = _read_noted(folder).get("images")
    known = isinstance(counts, dict) and all(isinstance(count, int) for count in counts.values())
    return dict(counts) if known else {}


def _read_noted(folder: str | Path) -> dict[str, Any]:
    """What a run noted of its data; nothing where that is damaged, for it is not needed."""
    with suppress(SelfconError):
        noted = RunFolder.follow(folder).read_json("data.json")
        return noted if isinstance(noted, dict) else {}
    return {}


def with_data(folder: str | Path, settings: Settings) -> Settings:
    """A run's settings with data that are there: what it was told, or where that lay where it leads to nothing here.

    From the folder of the runs, `birds` may be the run of that name.
    """
    if settings.data in list_sources():
        return settings
    try:
        here, place = Path(settings.data), noted_place(folder)
        leads = here.exists() and not (here / "config.yaml").is_file()
        if leads or place is None or not Path(place).exists():
            return settings
    except (OSError, ValueError):  # no path, or one that nobody may look at
        return settings
    return settings.model_copy(update={"data": place})


def same_place(one: str, other: str) -> bool:
    """Whether two words for data mean the same: the same name, or paths to one place."""
    return same_path(one, other, list_sources())
