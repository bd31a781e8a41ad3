"""What corrupted images cost: 15 corruptions at 5 severities, by exit and for the ensemble.

example: selfcon transfer corruption runs/imagenette --samples 1000
         selfcon transfer corruption runs/imagenet --imagenet-c /data/imagenet-c
"""

from __future__ import annotations

import argparse
from pathlib import Path

from selfcon.cli.parsing import Parser, listed, numbers, print_json
from selfcon.cli.transfer.common import WHERE, add_output, told


def add_arguments(parser: Parser) -> None:
    parser.add_argument("run", type=Path, help="the folder of a trained run with classifiers")
    parser.add_argument("--corruptions", type=listed, metavar="LIST", help="some of the fifteen (default: all)")
    parser.add_argument("--severities", type=numbers, metavar="LIST", help="of 1 to 5 (default: all)")
    parser.add_argument("--samples", type=int, metavar="INT", help="test images at most (default: all)")
    parser.add_argument("--imagenet-c", type=Path, metavar="DIR", help="ImageNet-C on disk, and mCE as published")
    parser.add_argument("--seed", type=int, default=0, help="of the corruptions (default: 0)")
    add_output(parser, "RUN/transfer")


def run(options: argparse.Namespace) -> int:
    from selfcon.workflows import transfer

    result = transfer.corruption(
        options.run,
        **({"corruptions": options.corruptions} if options.corruptions else {}),
        **({"severities": options.severities} if options.severities else {}),
        **told(options, "samples", "imagenet_c", "seed", *WHERE),
    )
    if options.json:
        print_json(result)
        return 0
    print(f"{result['run']} ({result['method']}), errors in % on {result['images']:,} images of {result['data']}:")
    for name, summary in result["summary"].items():
        numbers_ = ", ".join(f"{key.replace('_', ' ')} {value:.1f}" for key, value in summary.items())
        print(f"  {name:12s}clean {result['clean_error'][name]:.1f}, {numbers_}")
    print(f"written to {result['out']}")
    return 0
