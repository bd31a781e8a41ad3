"""What a shell needs to complete verbs, options, methods, networks and recipes.

example: selfcon completion bash >> ~/.bash_completion
         selfcon completion zsh > ~/.zfunc/_selfcon
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import shtab

from selfcon.cli.parsing import Parser


def add_arguments(parser: Parser) -> None:
    parser.add_argument("shell", choices=shtab.SUPPORTED_SHELLS, help="whose completion is printed")


def run(options: argparse.Namespace) -> int:
    from selfcon.cli.main import GROUPS, VERBS

    parser = argparse.ArgumentParser(prog="selfcon")
    verbs = parser.add_subparsers()
    groups = {name: verbs.add_parser(name, help=text).add_subparsers() for name, text in GROUPS.items()}
    names = _names()
    for verb, (module, summary) in VERBS.items():
        first, _, second = verb.partition(" ")
        own = Parser(prog=f"selfcon {verb}", description=summary)
        import_module(module).add_arguments(own)
        for action in own._actions:
            _tell(action, names)
        place = groups[first] if second else verbs
        place.add_parser(second or first, parents=[own], add_help=False, help=summary.replace("%", "%%"))
    sys.stdout.write(shtab.complete(parser, shell=options.shell) + "\n")
    return 0


def _names() -> dict[str, Callable[[], Sequence[str]]]:
    """What the values of some options are called."""
    from selfcon.losses.methods import list_methods
    from selfcon.networks.registry import list_models
    from selfcon.paper.recipes import list_recipes

    return {
        "method": list_methods,
        "model": list_models,
        "recipe": list_recipes,
        "sampler": lambda: ["plain", "balanced"],
    }


def _tell(action: Any, names: dict[str, Callable[[], Sequence[str]]]) -> None:
    """What completes an option's value: a name, or a file."""
    if action.dest in names and action.option_strings:
        action.choices = names[action.dest]()
    elif action.type is Path or action.dest in ("data", "weights", "data_root"):
        action.complete = shtab.FILE  # folders, too
