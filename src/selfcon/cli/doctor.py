"""What this machine has; and of given data and settings, what to expect before any time is spent.

example: selfcon doctor
         selfcon doctor --data my-birds --image-size 64 --batch-size 256
"""

from __future__ import annotations

import argparse

from selfcon.cli.parsing import Parser, print_json
from selfcon.cli.settings import add_settings, read_settings

takes_settings = True


def add_arguments(parser: Parser) -> None:
    add_settings(parser)


def run(options: argparse.Namespace, unknown: list[str]) -> int:
    given, wrong = read_settings(options, unknown)
    from selfcon.workflows.doctor import examine
    from selfcon.workflows.settings import collect_settings

    collect_settings(options.recipe, given, wrong, tell=False)

    findings = examine(recipe=options.recipe, device=options.device, **given)
    if options.json:
        print_json(findings.to_dict())
    else:
        print("\n".join(findings.lines()))
    return 0
