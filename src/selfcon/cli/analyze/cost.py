"""Parameters, multiply-adds, memory and time a step on this machine, beside the paper's ratios.

example: selfcon analyze cost --models resnet18,resnet50 --image-sizes 32,224 --batch-sizes 256,512
         selfcon analyze cost runs/birds
"""

from __future__ import annotations

import argparse
from pathlib import Path

from selfcon.cli.analyze.common import add_common, show
from selfcon.cli.parsing import Parser, listed, numbers


def add_arguments(parser: Parser) -> None:
    parser.add_argument("run", type=Path, nargs="?", help="a trained run, whose network and batch are taken")
    parser.add_argument(
        "--methods", type=listed, default=["supcon", "selfcon"], metavar="LIST", help="(supcon,selfcon)"
    )
    parser.add_argument("--models", type=listed, default=[], metavar="LIST", help="(default: resnet18)")
    parser.add_argument("--image-sizes", type=numbers, default=[], metavar="LIST", help="(default: 32)")
    parser.add_argument("--batch-sizes", type=numbers, default=[], metavar="LIST", help="(default: 256)")
    parser.add_argument("--exits", metavar="LIST", help="(default: 2:fc, above 96 pixels 2:small)")
    parser.add_argument("--width", type=float, help="(default: 1)")
    parser.add_argument("--steps", type=int, default=10, help="timed, the median counts (default: 10)")
    add_common(parser, out="RUN/analysis, or analysis")


def run(options: argparse.Namespace) -> int:
    from selfcon.workflows import analyze

    result = analyze.cost(
        options.run,
        methods=options.methods,
        models=options.models,
        image_sizes=options.image_sizes,
        batch_sizes=options.batch_sizes,
        exits=options.exits,
        width=options.width,
        steps=options.steps,
        out=options.out,
        device=options.device,
    )
    lines = [f"{result['device']}: {'':30s}parameters  multiply-adds   ms a step      GiB"]
    for row in result["rows"]:
        name = f"{row['model']} {row['image_size']} px {row['method']} batch {row['batch_size']}"
        time = f"{1000 * row['seconds']:12.1f}" if row["seconds"] is not None else f"{'-':>12s}"
        memory = f"{row['memory_bytes'] / 2**30:9.2f}" if row["memory_bytes"] is not None else f"{'-':>9s}"
        size = f"{row['parameters'] / 1e6:10.2f} M{row['multiply_adds'] / 1e9:12.3f} G"
        lines.append(f"  {name:40s}{size}{time}{memory}")
    for ratio in result["ratios"]:
        parts = [
            f"{what} {ratio[key]:.2f}" + (f" (paper: {ratio['paper_' + key]:.2f})" if "paper_" + key in ratio else "")
            for key, what in (("seconds", "time"), ("memory_bytes", "memory"))
            if key in ratio
        ]
        where = f"{ratio['model']} {ratio['image_size']} px batch {ratio['batch_size']}"
        lines.append(f"selfcon / supcon, {where}: {', '.join(parts)}")
    return show(result, lines, as_json=options.json)
