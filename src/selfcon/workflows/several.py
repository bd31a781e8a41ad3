"""One thing where several may be given."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

Thing = TypeVar("Thing", str, str | Path)


def several(given: Thing | Iterable[Thing]) -> list[Thing]:
    """A list of what was given; a name or a path by itself is one, and not its letters."""
    return [given] if isinstance(given, str | Path) else list(given)
