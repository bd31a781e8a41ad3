"""Accuracy on training and on test images, by run, and over the epochs that --keep-epochs kept.

example: selfcon analyze generalization runs/supcon runs/selfcon
"""

from __future__ import annotations

import argparse
from pathlib import Path

from selfcon.cli.analyze.common import add_common, show
from selfcon.cli.parsing import Parser


def add_arguments(parser: Parser) -> None:
    parser.add_argument("runs", type=Path, nargs="+", help="folders of finished runs")
    parser.add_argument("--samples", type=int, default=50_000, help="training images at most, over epochs")
    add_common(parser)


def run(options: argparse.Namespace) -> int:
    from selfcon.workflows import analyze

    result = analyze.generalization(options.runs, samples=options.samples, out=options.out, device=options.device)
    lines = [f"{'accuracy of the backbone, %':40s}{'train':>8s}{'test':>8s}{'gap':>8s}"]
    for each in result["runs"]:
        name = f"{each['run']} ({each['method']})"
        lines.append(f"  {name:38s}{each['train']:8.1f}{each['test']:8.1f}{each['gap']:8.1f}")
        lines += [f"    epoch {at['epoch']:<30d}{at['train']:8.1f}{at['test']:8.1f}" for at in each["epochs"]]
    return show(result, lines, as_json=options.json)
