"""Features of images at every exit of a trained run, into a file.

example: selfcon embed runs/birds holiday/ --out holiday.npz
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from selfcon.cli.parsing import Parser
from selfcon.errors import DataError, printable


def add_arguments(parser: Parser) -> None:
    parser.add_argument("run", type=Path, help="the folder of a trained run")
    parser.add_argument("paths", nargs="+", metavar="PATH", help="images, folders, patterns, or - for a list on stdin")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="an .npz or .parquet file")
    parser.add_argument("--batch-size", type=int, default=64, help="(default: 64)")
    parser.add_argument("--device", default="auto", metavar="STR", help="cpu, cuda, ... (default: auto)")


def run(options: argparse.Namespace) -> int:
    from selfcon.workflows import inference

    failed = inference.embed(
        options.run, options.paths, out=options.out, batch_size=options.batch_size, device=options.device
    )
    print(f"features written to {options.out}")
    if failed:
        for error in failed:
            sys.stderr.write(f"selfcon: {printable(str(error))}\n")
        count = "1 image" if len(failed) == 1 else f"{len(failed)} images"
        raise DataError(f"{count} could not be read.")
    return 0
