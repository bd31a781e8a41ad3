"""Measure how fast this machine trains, beside the ways of others, in one run on random images.

example: selfcon bench
         selfcon bench --model resnet50 --methods selfcon,supcon --json > bench.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys

from selfcon.cli.parsing import Parser
from selfcon.cli.settings import add_compile


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--model", default="resnet18", help="a network of the paper (default: resnet18)")
    parser.add_argument("--methods", default="selfcon,supcon,ce", help="default: selfcon,supcon,ce")
    parser.add_argument("--width", type=float, default=1.0, help="share of its channels")
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--images", type=int, default=50_000, help="in an epoch (default: 50,000)")
    parser.add_argument("--image-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=3, help="measured; the best counts (default: 3)")
    parser.add_argument("--workers", type=int, default=16, help="of the comparison's data loader (default: 16)")
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True, help="compare with others")
    parser.add_argument("--device", default="auto", metavar="STR", help="cpu, cuda, ... (default: auto)")
    add_compile(parser)
    parser.add_argument("--json", action="store_true", help="a JSON line for each measurement, the table on stderr")


def run(options: argparse.Namespace) -> int:
    from selfcon.errors import UsageError
    from selfcon.losses.methods import get_method
    from selfcon.networks.registry import list_models
    from selfcon.workflows.bench import Bench, table

    methods = tuple(name for name in options.methods.split(",") if name)
    for name in methods:
        get_method(name)
    if options.model not in list_models():
        raise UsageError(f"--model is one of {', '.join(list_models())}, not {options.model!r}.")
    if min(options.batch_size, options.images, options.image_size, options.epochs) < 1 or options.workers < 0:
        raise UsageError("--batch-size, --images, --image-size and --epochs are at least 1, --workers at least 0.")
    names = ("model", "width", "batch_size", "images", "image_size", "epochs", "workers", "peers", "device", "compile")
    rows = []
    for row in Bench(methods=methods, **{name: getattr(options, name) for name in names}).rows():
        rows.append(row)
        if options.json:
            print(json.dumps(row), flush=True)
    print("\n".join(table(rows)), file=sys.stderr if options.json else sys.stdout)
    return 0
