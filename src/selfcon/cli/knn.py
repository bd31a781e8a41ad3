"""Accuracy of the nearest neighbours in the features of a run: what they are worth without a classifier.

example: selfcon knn runs/birds --k 20
"""

from __future__ import annotations

import argparse
from pathlib import Path

from selfcon.cli.parsing import Parser, print_json


def add_arguments(parser: Parser) -> None:
    parser.add_argument("run", type=Path, help="the folder of a trained run")
    parser.add_argument("--k", type=int, default=20, help="neighbours (default: 20)")
    parser.add_argument("--temperature", type=float, default=0.07, help="of their votes (default: 0.07)")
    parser.add_argument("--device", default="auto", metavar="STR", help="cpu, cuda, ... (default: auto)")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON document")


def run(options: argparse.Namespace) -> int:
    from selfcon import workflows

    result = workflows.knn(options.run, k=options.k, temperature=options.temperature, device=options.device)
    if options.json:
        print_json(result)
    else:
        for name, value in result["accuracy"].items():
            print(f"  {name:12s}{value:6.1f} %")
    return 0
