"""Train encoder and classifier together, by a one-stage method: ce, ce-sub, sd or selfcon-1stage.

example: selfcon train --data cifar100.npz --method ce --epochs 100 --out runs/ce
The same command again goes on where it was stopped.
"""

from __future__ import annotations

import argparse

from selfcon.cli.fit import run_training
from selfcon.cli.parsing import Parser
from selfcon.cli.settings import add_settings

takes_settings = True


def add_arguments(parser: Parser) -> None:
    add_settings(parser)


def run(options: argparse.Namespace, unknown: list[str]) -> int:
    return run_training(options, unknown, "train")
