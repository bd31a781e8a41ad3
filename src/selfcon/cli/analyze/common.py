"""What the verbs of `selfcon analyze` share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from selfcon.cli.parsing import Parser, print_json


def add_common(parser: Parser, *, device: bool = True, out: str = "RUN/analysis") -> None:
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"where the JSON and the pictures go (default: {out})")
    if device:
        parser.add_argument("--device", default="auto", metavar="STR", help="cpu, cuda, ... (default: auto)")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON document")


def show(result: dict[str, Any], lines: list[str], *, as_json: bool) -> int:
    """The result for a program, or lines for a reader and where the pictures are."""
    if as_json:
        print_json(result)
        return 0
    print("\n".join(lines))
    for file in result["files"]:
        print(f"drawn in {file} (and .png)")
    return 0
