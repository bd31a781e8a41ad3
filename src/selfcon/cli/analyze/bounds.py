"""The paper's propositions in random worlds whose information is known, and where they do not hold.

example: selfcon analyze bounds --draws 1000
"""

from __future__ import annotations

import argparse
from pathlib import Path

from selfcon.cli.analyze.common import add_common, show
from selfcon.cli.parsing import Parser, seed


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--draws", type=int, default=1000, help="random worlds (default: 1000)")
    parser.add_argument("--samples", type=int, default=2, metavar="K", help="in a batch, 2 or 3 (default: 2)")
    parser.add_argument("--temperature", type=float, default=1.0, help="of the loss (default: 1)")
    parser.add_argument("--seed", type=seed, default=0, help="of the draws (default: 0)")
    add_common(parser, device=False, out="analysis")


def run(options: argparse.Namespace) -> int:
    from selfcon.workflows import analyze

    result = analyze.bounds(
        draws=options.draws,
        samples=options.samples,
        temperature=options.temperature,
        seed=options.seed,
        out=options.out or Path("analysis"),
    )
    lines = ["negatives from the class itself, as the proofs have them:"]
    for name, each in result["bounds"].items():
        lines.append(
            f"  {name:15s}holds in {each['holds']:,} of {each['of']:,}, least margin {each['least_margin']:.2g}"
        )
    lines.append(f"  equation 6     holds to {result['equation_6']['largest_difference']:.1g}")
    broken = result["counterexample"]
    lines.append(
        f"negatives from other classes, as in training: a class of one point is promised {broken['bound']:.2f} nats "
        f"and has {broken['truth']:.0f}"
    )
    return show(result, lines, as_json=options.json)
