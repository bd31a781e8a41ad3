"""What the verbs of `selfcon analyze` share."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from selfcon.cli.parsing import Parser, print_json


def add_common(parser: Parser, *, device: bool = True, out: str = "RUN/analysis") -> None:
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"where the JSON and the pictures go (default: {out})")
    if device:
        parser.add_argument("--device", default="auto", metavar="STR", help="cpu, cuda, ... (default: auto)")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON document")


def listed(text: str) -> list[str]:
    """The words of `a,b,c`."""
    return [word.strip() for word in text.split(",") if word.strip()]


def numbers(text: str) -> list[int]:
    """The whole numbers of `1,2,3`."""
    try:
        return [int(word) for word in listed(text)]
    except ValueError:
        raise argparse.ArgumentTypeError(f"wants whole numbers such as 256,512, not {text!r}") from None


def show(result: dict[str, Any], lines: list[str], *, as_json: bool) -> int:
    """The result for a program, or lines for a reader and where the pictures are."""
    if as_json:
        print_json(result)
        return 0
    print("\n".join(lines))
    for file in result["files"]:
        print(f"drawn in {file} (and .png)")
    return 0
