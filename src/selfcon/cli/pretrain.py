"""Train an encoder by a contrastive method, without a classifier; `selfcon probe` can follow.

example: selfcon pretrain --data cifar100.npz --method supcon --epochs 100 --out runs/supcon
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
    return run_training(options, unknown, "pretrain")
