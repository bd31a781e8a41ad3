"""Train linear classifiers on every exit of a pretrained run, and report its accuracy.

With --out, in another folder and with other settings of the probe, as often as you like: nothing is pretrained again.

example: selfcon probe runs/supcon
         selfcon probe runs/supcon --out runs/supcon-longer-probe --probe.epochs 200 --probe.lr 1.0
"""

from __future__ import annotations

import argparse
from pathlib import Path

from selfcon.cli.parsing import Parser
from selfcon.cli.results import show_result
from selfcon.cli.settings import add_compile, add_running, parse_value
from selfcon.config import PROBE_NAMES


def add_arguments(parser: Parser) -> None:
    parser.add_argument("run", type=Path, help="the folder of a run that `selfcon pretrain` or `selfcon fit` made")
    parser.add_argument("--out", type=Path, metavar="DIR", help="a new run folder, beside that one (default: the same)")
    parser.add_argument("--overwrite", action="store_true", help="start anew in that folder")
    add_running(parser)
    add_compile(parser)
    for name in PROBE_NAMES:  # `selfcon fit --help-all` tells what they mean
        parser.add_argument(f"--{name}", dest=name, metavar="VALUE", help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> int:
    from selfcon import workflows

    given = {name: parse_value(text) for name in PROBE_NAMES if (text := getattr(options, name)) is not None}
    result = workflows.probe(
        options.run,
        out=options.out,
        overwrite=options.overwrite,
        device=options.device,
        compile=options.compile,
        log=[name for name in options.log.split(",") if name],
        **given,
    )
    show_result(result, options.out or options.run, as_json=options.json)
    return 0
