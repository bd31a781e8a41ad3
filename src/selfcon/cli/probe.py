"""Train linear classifiers on every exit of a pretrained run, and report its accuracy.

example: selfcon probe runs/supcon
"""

from __future__ import annotations

import argparse
from pathlib import Path

from selfcon.cli.parsing import Parser
from selfcon.cli.results import show_result
from selfcon.cli.settings import add_compile, add_running


def add_arguments(parser: Parser) -> None:
    parser.add_argument("run", type=Path, help="the folder of a run that `selfcon pretrain` made")
    add_running(parser)
    add_compile(parser)


def run(options: argparse.Namespace) -> int:
    from selfcon import workflows

    log = [name for name in options.log.split(",") if name]
    result = workflows.probe(options.run, device=options.device, compile=options.compile, log=log)
    show_result(result, options.run, as_json=options.json)
    return 0
