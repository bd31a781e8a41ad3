"""Train a network, probe every exit and their ensemble, and write a report. The main job.

example: selfcon fit                                     (handwritten digits, about a minute)
         selfcon fit --data birds --image-size 64 --epochs 100 --val-fraction 0.1 --out runs/birds
The same command again goes on where it was stopped.
"""

from __future__ import annotations

import argparse

from selfcon.cli.parsing import Parser
from selfcon.cli.results import show_result
from selfcon.cli.settings import add_settings, default_folder, read_settings
from selfcon.progress import say

VERB = "fit"
takes_settings = True


def add_arguments(parser: Parser) -> None:
    add_settings(parser)


def run(options: argparse.Namespace, unknown: list[str]) -> int:
    return run_training(options, unknown, VERB)


def run_training(options: argparse.Namespace, unknown: list[str], verb: str) -> int:
    """Shared by the verbs that train: fit, pretrain, train."""
    given, wrong = read_settings(options, unknown)
    from selfcon import workflows
    from selfcon.losses.methods import get_method
    from selfcon.workflows.settings import collect_settings

    settings = collect_settings(options.recipe, given, wrong, tell=False)
    if get_method(settings.method).stages == 1 and (unused := [name for name in given if name.startswith("probe.")]):
        say(f"note: {settings.method} trains in one stage, so --{unused[0]} does nothing")
    out = options.out or default_folder(settings)
    result = getattr(workflows, verb)(
        out=out,
        recipe=options.recipe,
        device=options.device,
        compile=options.compile,
        overwrite=options.overwrite,
        log=[name for name in options.log.split(",") if name],
        deterministic=options.deterministic,
        trust=options.trust,
        **given,
    )
    show_result(result, out, as_json=options.json)
    return 0
