"""Accuracy of a trained run on test images: of every exit and of the ensemble.

example: selfcon evaluate runs/birds
         selfcon evaluate runs/birds --data other-birds
"""

from __future__ import annotations

import argparse
from pathlib import Path

from selfcon.cli.parsing import Parser, print_json
from selfcon.cli.results import accuracy_lines, never_lines


def add_arguments(parser: Parser) -> None:
    parser.add_argument("run", type=Path, help="the folder of a trained run")
    parser.add_argument("--data", help="other data of the same classes (default: those of the run)")
    parser.add_argument("--split", default="test", choices=("train", "val", "test"), help="which part (default: test)")
    parser.add_argument("--device", default="auto", metavar="STR", help="cpu, cuda, ... (default: auto)")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON document")


def run(options: argparse.Namespace) -> int:
    from selfcon import workflows

    result = workflows.evaluate(options.run, data=options.data, split=options.split, device=options.device)
    if options.json:
        print_json(result)
    else:
        print(f"{result['images']:,} images of {result['data']}, {result['split']}")
        print("\n".join([*accuracy_lines(result["accuracy"]), *never_lines(result)]))
    return 0
