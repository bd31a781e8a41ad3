"""The paper as data: its experiments by name."""

from selfcon.paper.recipes import Recipe, list_recipes, load_recipe

__all__ = ["Recipe", "list_recipes", "load_recipe"]
