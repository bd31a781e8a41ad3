"""A trained run as a service with a page to look at it, on this machine unless told otherwise.

example: selfcon serve runs/birds
         curl --data-binary @image.jpg -H "Content-Type: image/jpeg" "http://127.0.0.1:8000/v1/predict?top=3"
"""

from __future__ import annotations

import argparse
from pathlib import Path

from selfcon.cli.parsing import Parser


def add_arguments(parser: Parser) -> None:
    parser.add_argument("run", type=Path, help="the folder of a trained run with classifiers")
    parser.add_argument("--host", default="127.0.0.1", metavar="STR", help="where to listen (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, metavar="INT", help="(default: 8000)")
    parser.add_argument("--rate", type=float, default=200.0, help="requests a second of one client (default: 200)")
    parser.add_argument(
        "--gallery", action=argparse.BooleanOptionalAction, default=True, help="show neighbours and test images"
    )
    parser.add_argument("--device", default="auto", metavar="STR", help="cpu, cuda, ... (default: auto)")


def run(options: argparse.Namespace) -> int:
    from selfcon.workflows import serving

    serving.serve(
        options.run,
        host=options.host,
        port=options.port,
        rate=options.rate,
        gallery=options.gallery,
        device=options.device,
    )
    return 0
