"""How much gradient reaches each layer, two methods from the same weights on the same batch.

example: selfcon analyze gradients runs/birds --methods supcon,selfcon-m
"""

from __future__ import annotations

import argparse
from pathlib import Path

from selfcon.cli.analyze.common import add_common, show
from selfcon.cli.parsing import Parser, listed


def add_arguments(parser: Parser) -> None:
    parser.add_argument("run", type=Path, help="the folder of a trained run: its network, data and settings")
    parser.add_argument(
        "--methods", type=listed, default=["supcon", "selfcon-m"], metavar="A,B", help="(default: supcon,selfcon-m)"
    )
    parser.add_argument("--trained", action="store_true", help="the run's weights (default: fresh ones)")
    parser.add_argument("--batch-size", type=int, metavar="INT", help="(default: the run's)")
    add_common(parser)


def run(options: argparse.Namespace) -> int:
    from selfcon.workflows import analyze

    result = analyze.gradients(
        options.run,
        methods=options.methods,
        trained=options.trained,
        batch_size=options.batch_size,
        out=options.out,
        device=options.device,
    )
    first, second = result["methods"]
    lines = [f"gradient norm by block, {result['weights']} weights, batch {result['batch_size']}:"]
    lines.append(f"  {'block':10s}{first:>14s}{second:>14s}   {second} / {first}")
    blocks = {name: each["blocks"] for name, each in result["methods"].items()}
    for block in blocks[first]:
        factor = f"{result['factors'][block]:.2f}" if block in result["factors"] else ""
        name = "stem" if block == "0" else block
        lines.append(f"  {name:10s}{blocks[first][block]:14.4g}{blocks[second][block]:14.4g}   {factor}")
    return show(result, lines, as_json=options.json)
