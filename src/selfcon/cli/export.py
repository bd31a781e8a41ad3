"""A trained run as files for other programs: ONNX whole and in stages, torch.export, timm's weights, a model hub.

example: selfcon export runs/birds
         selfcon export runs/birds --formats onnx,stages --out birds-onnx
"""

from __future__ import annotations

import argparse
from pathlib import Path

from selfcon.cli.parsing import Parser, listed, print_json


def add_arguments(parser: Parser) -> None:
    parser.add_argument("run", type=Path, help="the folder of a trained run")
    parser.add_argument("--formats", type=listed, metavar="LIST", help="of onnx, stages, torch, timm, hub (all)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="(default: RUN/export)")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON document")


def run(options: argparse.Namespace) -> int:
    from selfcon.workflows import exporting

    result = exporting.export(options.run, out=options.out, formats=options.formats)
    if options.json:
        print_json(result)
        return 0
    print(f"written to {result['out']}: {', '.join(result['files'])}")
    return 0
