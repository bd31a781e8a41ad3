"""A run's features at every exit: on a plane, how classes lie in them, the nearest neighbours of an image.

example: selfcon analyze embedding runs/birds --neighbours-of 17
"""

from __future__ import annotations

import argparse
from pathlib import Path

from selfcon.cli.analyze.common import add_common, show
from selfcon.cli.parsing import Parser, seed


def add_arguments(parser: Parser) -> None:
    parser.add_argument("run", type=Path, help="the folder of a trained run")
    parser.add_argument("--split", default="test", metavar="NAME", help="images of that split (default: test)")
    parser.add_argument("--samples", type=int, default=1000, help="images on the map at most (default: 1000)")
    parser.add_argument("--map", dest="by", default="tsne", metavar="STR", help="tsne or umap (default: tsne)")
    parser.add_argument("--neighbours-of", type=int, metavar="IMAGE", help="number in the split (default: 0)")
    parser.add_argument("--count", type=int, default=6, help="neighbours (default: 6)")
    parser.add_argument("--seed", type=seed, default=0, help="of the map (default: 0)")
    add_common(parser)


def run(options: argparse.Namespace) -> int:
    from selfcon.workflows import analyze

    result = analyze.embedding(
        options.run,
        split=options.split,
        samples=options.samples,
        by=options.by,
        neighbours_of=options.neighbours_of,
        count=options.count,
        seed=options.seed,
        out=options.out,
        device=options.device,
    )
    lines = [f"  {'exit':12s}{'alignment':>12s}{'uniformity':>12s}{'class separation':>18s}"]
    for name, each in result["exits"].items():
        numbers = f"{each['alignment']:12.3f}{each['uniformity']:12.3f}{each['class_separation']:18.3f}"
        lines.append(f"  {name:12s}{numbers}")
    asked = result["neighbours"]
    lines.append(f"nearest to image {asked['of']} ({asked['class']}):")
    lines += [
        f"  {name:12s}" + ", ".join(f"{each['image']} ({each['class']})" for each in nearest)
        for name, nearest in asked["nearest"].items()
    ]
    return show(result, lines, as_json=options.json)
