"""Arguments of a verb: argparse, with our errors and the nearest name for a misspelt option."""

from __future__ import annotations

import argparse
import io
import json
import sys
from pathlib import Path
from typing import Any, NoReturn

from selfcon.errors import UsageError, unknown_name
from selfcon.progress import speaks


class Parser(argparse.ArgumentParser):
    """Raises UsageError instead of leaving the process, and never guesses what a shortened option means."""

    def __init__(self, *, prog: str, description: str | None) -> None:
        super().__init__(
            prog=prog,
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def parse(self, arguments: list[str]) -> argparse.Namespace:
        """The options of these arguments."""
        options, unknown = self.parse_known_args(arguments)
        if unknown:
            known = [option for action in self._actions for option in action.option_strings]
            if unknown[0].startswith("-"):
                raise unknown_name("option", unknown[0].partition("=")[0], known)
            places = [action.dest for action in self._actions if not action.option_strings and action.nargs is None]
            takes = f": it takes one {places[0]}" if len(places) == 1 else ""
            raise UsageError(f"{self.prog} does not know what to do with {unknown[0]!r}{takes}.")
        return options

    def error(self, message: str) -> NoReturn:
        """argparse's own complaints, as ours."""
        raise UsageError(f"{self.prog.removeprefix('selfcon ')}: {message}.")


def add_data_arguments(parser: Parser) -> None:
    """The options that say where data comes from."""
    parser.add_argument("--data-root", type=Path, default=Path("data"), metavar="DIR", help="where named data sets lie")
    parser.add_argument("--class-list", type=Path, metavar="FILE", help="for imagenet100: a file with one class a line")
    parser.add_argument("--download", action="store_true", help="let a named data set be downloaded")
    parser.add_argument(
        "--seed", type=seed, default=0, help="another splits a single folder otherwise (default: 0, as training does)"
    )


def seed(text: str) -> int:
    """A whole number from 0 on, as every generator of random numbers takes it."""
    if not (text.isascii() and text.isdigit() and int(text) < 2**32 - 1):
        raise argparse.ArgumentTypeError(f"wants a whole number from 0 on, not {text!r}")
    return int(text)


def listed(text: str) -> list[str]:
    """The words of `a,b,c`."""
    return [word.strip() for word in text.split(",") if word.strip()]


def numbers(text: str) -> list[int]:
    """The whole numbers of `1,2,3`."""
    try:
        return [int(word) for word in listed(text)]
    except ValueError:
        raise argparse.ArgumentTypeError(f"wants whole numbers such as 256,512, not {text!r}") from None


def print_json(result: dict[str, Any]) -> None:
    """One JSON document on stdout, from one of the processes."""
    if not speaks():
        return
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names may be no text, or not that of this terminal
    sys.stdout.write(json.dumps(result, indent=2, ensure_ascii=False) + "\n")
