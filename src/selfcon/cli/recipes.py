"""The paper's experiments and a few of ours by name, with what to expect; one by its full name with all that it sets.

example: selfcon recipes cifar100-resnet18
         selfcon recipes cifar100-resnet18-selfcon
"""

from __future__ import annotations

import argparse

from selfcon.cli.parsing import Parser, print_json
from selfcon.errors import unknown_name


def add_arguments(parser: Parser) -> None:
    parser.add_argument("name", nargs="?", default="", help="a recipe, or a part of the names to list")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON document")


def run(options: argparse.Namespace) -> int:
    from selfcon.paper.recipes import list_recipes, load_recipe

    names = list_recipes()
    wanted = [options.name] if options.name in names else [name for name in names if options.name in name]
    if not wanted:
        raise unknown_name("recipe", options.name, names)
    recipes = [load_recipe(name) for name in wanted]
    if options.json:
        print_json(
            {
                recipe.name: {"expected": recipe.expected, "cost": recipe.cost, "settings": recipe.settings}
                for recipe in recipes
            }
        )
    elif len(recipes) == 1:
        print(recipes[0].describe(), end="")
    else:
        width = max(len(recipe.name) for recipe in recipes) + 2
        print("\n".join(f"{recipe.name:{width}s}{recipe.expected}" for recipe in recipes))
    return 0
