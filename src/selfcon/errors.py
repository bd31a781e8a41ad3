"""What can go wrong, in words for a user. Each error is one sentence and carries the exit code of the command line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar


class SelfconError(Exception):
    """Any error this package raises on purpose."""

    exit_code: ClassVar[int] = 70
    of_all = False  # whether every process of a run raises it, so that one of them is enough to tell


class UsageError(SelfconError, ValueError):
    """An argument or setting that cannot be meant: a wrong shape, name or value."""

    exit_code = 64
    of_all = True


class DataError(SelfconError, ValueError):
    """Data that cannot be used: a broken image, classes that differ between splits, labels out of range."""

    exit_code = 65


class BadImageError(DataError):
    """One image that cannot be read."""


class InputMissingError(SelfconError, FileNotFoundError):
    """Something that was to be read is not there."""

    exit_code = 66
    of_all = True


class StorageError(SelfconError, OSError):
    """Something could not be written."""

    exit_code = 74


class StoppedError(SelfconError):
    """A signal ended the work; the same command goes on with it."""

    exit_code = 75
    of_all = True


class MemoryShortageError(SelfconError, MemoryError):
    """Something does not fit; the sentence says what would."""

    exit_code = 78


class UnsafeError(SelfconError, ValueError):
    """A file that would run code, or is built to do harm."""

    exit_code = 77


class NonFiniteError(SelfconError, ArithmeticError):
    """NaN or infinity where a finite number must stand."""

    exit_code = 76


class HungError(SelfconError):
    """Something was waited for too long; a thread that cannot be ended may still be waiting for it."""


class SelfconWarning(UserWarning):
    """Something that is allowed and probably not wanted."""


def is_shortage(error: Exception) -> bool:
    """Whether it is torch's way to say that memory does not suffice, on a GPU or beside it."""
    return type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)


def printable(text: str) -> str:
    """Text that cannot move the cursor or begin a line of its own: what is not printable is written as an escape."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def unknown_name(kind: str, name: object, valid: Iterable[str]) -> UsageError:
    """The error for a name outside `valid`: it gives the nearest valid one, or all of them where they are few."""
    names = sorted(valid)
    near = difflib.get_close_matches(str(name).lower(), names, n=1, cutoff=0.5)
    if near:
        hint = f"did you mean {near[0]!r}?"
    elif len(names) <= 20:
        hint = f"valid: {', '.join(names) or 'none'}."
    else:
        hint = f"there are {len(names)}, none of them similar."
    return UsageError(f"Unknown {kind} {name!r}; {hint}")


def added_elsewhere(kind: str, name: str, where: object) -> InputMissingError:
    """The error for what a run has of a script, where that script is not at work."""
    return InputMissingError(
        f"The {kind} {name} of {where} was added by a script: do this through it (python SCRIPT.py ..., where it ends "
        f"with selfcon.cli.main(); docs/guides/research.md)."
    )


def hint_path(path: Path) -> str:
    """The end of a sentence about a path that is not there: the nearest one beside it, if there is such."""
    try:
        beside = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
    except OSError:  # such as a name that is too long
        return "."
    near = difflib.get_close_matches(path.name, beside, n=1, cutoff=0.8)
    return f"; did you mean {str(path.parent / near[0])!r}?" if near else "."


def name_some(names: Sequence[str], most: int = 5) -> str:
    """A few of the names, and how many more there are."""
    shown = ", ".join(repr(name) for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
