"""Mutual information between a run's input x, label y, intermediate feature T and last feature F.

example: selfcon analyze information runs/birds
         selfcon analyze information runs/ce runs/supcon runs/selfcon --pairs "F, T" --estimators nwj --seeds 5
"""

from __future__ import annotations

import argparse
from pathlib import Path

from selfcon.cli.analyze.common import add_common, show
from selfcon.cli.parsing import Parser, listed


def add_arguments(parser: Parser) -> None:
    parser.add_argument("runs", type=Path, nargs="+", help="folders of trained runs")
    parser.add_argument(
        "--pairs", nargs="+", default=None, metavar="A,B", help="two of x, y, T, F each (default: x,T y,T F,T)"
    )
    parser.add_argument("--estimators", type=listed, metavar="LIST", help="of infonce, mine, nwj (default: all)")
    parser.add_argument("--after", type=int, metavar="STAGE", help="T is the map after it (default: the first exit's)")
    parser.add_argument("--split", metavar="NAME", help="images of that split (default: test, or train if it is small)")
    parser.add_argument("--samples", type=int, default=10_000, help="images at most (default: 10000)")
    parser.add_argument("--seeds", type=int, default=3, help="critics trained for each number (default: 3)")
    parser.add_argument("--steps", type=int, help="of a critic at most (default: 2000 on a GPU, 100 on a CPU)")
    parser.add_argument("--batch-size", type=int, help="of a critic: InfoNCE shows at most its log (GPU: 128)")
    add_common(parser)


def run(options: argparse.Namespace) -> int:
    from selfcon.workflows import analyze

    pairs = [", ".join(listed(pair)) for pair in options.pairs] if options.pairs else analyze.PAIRS
    result = analyze.information(
        options.runs,
        pairs=pairs,
        **({"estimators": options.estimators} if options.estimators else {}),
        after=options.after,
        split=options.split,
        samples=options.samples,
        seeds=options.seeds,
        steps=options.steps,
        batch_size=options.batch_size,
        out=options.out,
        device=options.device,
    )
    lines = []
    for each in result["runs"]:
        lines.append(
            f"{each['run']} ({each['method']}), {each['split']} images, T after stage {each['after']}, in nats:"
        )
        theirs = result["paper"].get(each["method"], {})
        for found in each["estimates"]:
            what = f"I({found['between'].replace(', ', '; ')})"
            paper = theirs.get(f"{found['estimator']}, {what}")
            note = "" if found["resolved"] else "  (more than it can resolve)"
            beside = f"  paper {paper:.3f}" if paper is not None else ""
            apart = "" if found["spread"] is None else f" ± {found['spread']:.3f}"
            lines.append(f"  {what:9s}{found['estimator']:9s}{found['nats']:8.3f}{apart}{beside}{note}")
    return show(result, lines, as_json=options.json)
