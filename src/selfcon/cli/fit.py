"""Train a network, probe every exit and their ensemble, and write a report. The main job.

example: selfcon fit                                     (handwritten digits, about a minute)
         selfcon fit --data birds --image-size 64 --epochs 100 --val-fraction 0.1 --out runs/birds
The same command again goes on where it was stopped.
"""

from __future__ import annotations

import argparse
from functools import partial

from selfcon.cli import report
from selfcon.cli.parsing import Parser
from selfcon.cli.results import show_result
from selfcon.cli.settings import add_settings, read_settings
from selfcon.errors import UsageError
from selfcon.progress import say, speaks

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
    from selfcon.workflows.settings import collect_settings, default_folder

    seed = given.get("seed")
    several = seed if isinstance(seed, list) else []
    asked = [{**given, "seed": seed} for seed in dict.fromkeys(several)] or [given]
    every = [collect_settings(options.recipe, each, wrong, tell=False) for each in asked]  # wrong ones before any work
    settings = every[0]
    if get_method(settings.method).stages == 1 and (unused := [name for name in given if name.startswith("probe.")]):
        say(f"note: {settings.method} trains in one stage, so --{unused[0]} does nothing")
    out = options.out or default_folder(settings)
    work = partial(
        getattr(workflows, verb),
        recipe=options.recipe,
        device=options.device,
        compile=options.compile,
        overwrite=options.overwrite,
        log=[name for name in options.log.split(",") if name],
        deterministic=options.deterministic,
        trust=options.trust,
    )
    if not several:
        show_result(work(out=out, **given), out, as_json=options.json)
        return 0
    folders = [out / f"seed-{each.seed}" for each in every]
    if (out / "config.yaml").exists():
        raise UsageError(
            f"{out} contains a run with one seed, but runs with several seeds are stored in subdirectories such as "
            f"{folders[0]}. Choose another --out, for example --out {out}-seeds."
        )
    for folder, each in zip(folders, asked, strict=True):
        result = work(out=folder, **each)
        if not options.json:
            show_result(result, folder, as_json=False)
    if speaks():
        report.run(argparse.Namespace(runs=folders, out=out / "report.html", watch=None, json=options.json))
    return 0
