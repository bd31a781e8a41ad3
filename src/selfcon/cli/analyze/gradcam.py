"""Where the loss looks: Grad-CAM by exit and by method.

example: selfcon analyze gradcam runs/birds --images 8
"""

from __future__ import annotations

import argparse
from pathlib import Path

from selfcon.cli.analyze.common import add_common, show
from selfcon.cli.parsing import Parser, listed


def add_arguments(parser: Parser) -> None:
    parser.add_argument("run", type=Path, help="the folder of a trained run")
    parser.add_argument(
        "--methods", type=listed, default=["supcon", "selfcon-m"], metavar="A,B", help="(default: supcon,selfcon-m)"
    )
    parser.add_argument("--after", type=int, metavar="STAGE", help="look after it (default: before the first exit)")
    parser.add_argument("--images", type=int, default=8, help="how many are shown (default: 8)")
    add_common(parser)


def run(options: argparse.Namespace) -> int:
    from selfcon.workflows import analyze

    result = analyze.gradcam(
        options.run,
        methods=options.methods,
        after=options.after,
        images=options.images,
        out=options.out,
        device=options.device,
    )
    lines = [f"mean Grad-CAM after stage {result['after']}:"]
    lines += [f"  through {name:12s}{value:10.3g}" for name, value in result["mean_by_exit"].items()]
    if result["correlation_of_exits"] is not None:
        lines.append(f"  the two are alike to {result['correlation_of_exits']:.2f} (correlation)")
    lines += [f"  of {name:17s}{value:10.3g}" for name, value in result["mean_by_method"].items()]
    return show(result, lines, as_json=options.json)
