"""Recipes: the settings of the paper's experiments by name, DATA-NETWORK-METHOD, put together from `recipes.yaml`.

A recipe of one's own is a YAML file of settings; `recipe: NAME` in it builds on another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from selfcon.config import flatten, make_settings, read_yaml
from selfcon.errors import UsageError, unknown_name


@dataclass(frozen=True)
class Recipe:
    """Settings by dotted name, and what to expect of them."""

    name: str
    settings: Mapping[str, Any]
    expected: str = "not reported in the paper"
    cost: str = ""

    @property
    def command(self) -> str:
        return f"selfcon fit --recipe {self.name}"

    def describe(self) -> str:
        """As a YAML file that opens with what to expect."""
        head = [f"# expected: {self.expected}", f"# cost: {self.cost}", f"# command: {self.command}"]
        return "\n".join(head) + "\n" + yaml.safe_dump(dict(self.settings), sort_keys=False)


def list_recipes() -> list[str]:
    """Every recipe by name."""
    book = _book()
    paper = [
        f"{data}-{network}-{method}"
        for data, entry in book["data"].items()
        for network in entry["networks"]
        for method in book["methods"]
        if method in entry.get("methods", book["methods"])
    ]
    return sorted([*book["own"], *paper])


def load_recipe(name: str, above: tuple[str, ...] = ()) -> Recipe:
    """The recipe of that name, or in that YAML file; `above` are the files that led to it."""
    if name.endswith((".yaml", ".yml")):
        if name in above:
            raise UsageError(f"The recipe {name} builds on itself.")
        tree = read_yaml(Path(name))
        base = tree.pop("recipe", None)
        below = load_recipe(str(base), (*above, name)).settings if base is not None else {}
        below = exchange_network(below, str(tree.get("model", below.get("model"))))
        try:
            rate = exchange_rate(below, tree)
        except UsageError:
            rate = {}  # what is wrong in it is told to whoever makes settings of it
        return Recipe(name, {**below, **flatten(tree), **rate})
    if name not in list_recipes():
        raise unknown_name("recipe", name, list_recipes())
    book = _book()
    if name in book["own"]:
        own = book["own"][name]
        below = load_recipe(own["base"]).settings if "base" in own else {}
        return Recipe(name, {**below, **flatten(own["settings"])}, own["expected"], own["cost"])
    data = max((key for key in book["data"] if name.startswith(f"{key}-")), key=len)
    network = max(
        (key for key in book["data"][data]["networks"] if name[len(data) + 1 :].startswith(f"{key}-")), key=len
    )
    method = name[len(data) + len(network) + 2 :]
    return _compose(name, data, network, method)


def _compose(name: str, data: str, network: str, method: str) -> Recipe:
    book = _book()
    settings = _lay(data, network, method)
    accuracy = book["expected"].get(f"{data}-{network}", {}).get(method)
    return Recipe(
        name,
        settings,
        expected="not reported in the paper" if accuracy is None else f"{accuracy} % (backbone)",
        cost=f"{settings['epochs']} epochs of {book['data'][data]['images']:,} images",
    )


def _lay(data: str, network: str, method: str) -> dict[str, Any]:
    """Later parts over earlier ones: all, the data set, its network, the method's kind, the method, exceptions.

    A network that the paper does not have adds nothing.
    """
    book = _book()
    kind = next(kind for kind, members in book["kinds"].items() if method in members)
    scale = book["data"][data]["scale"]
    parts = [
        book["all"],
        book["scales"][scale]["settings"],
        {"data": data},
        book["data"][data].get("settings", {}),
        book["networks"].get(network, {}),
        book["data"][data]["networks"].get(network) or {},
        book["scales"][scale]["kinds"].get(kind, {}),
        book["methods"][method] or {},
        {"model": network, "method": method},
        *(entry["settings"] for entry in book["exceptions"] if _matches(entry["where"], data, network, method)),
    ]
    settings: dict[str, Any] = {}
    for part in parts:
        settings |= flatten(part)
    # The paper's learning rates are for a batch of its own; --batch-size scales them.
    reference = settings.pop("lr_batch", settings["batch_size"])
    settings["lr"] = settings["lr"] * settings["batch_size"] / reference
    return settings


def exchange_network(settings: Mapping[str, Any], network: str) -> dict[str, Any]:
    """A recipe's settings for another network: what belongs to its own gives way to what the paper has for the other.

    What a recipe changed for itself stays, but for options that only its own network may know.
    """
    own = settings.get("model", network)
    if own == network:
        return dict(settings)
    book, data, method = _book(), str(settings.get("data")), str(settings.get("method"))
    parts = [flatten(book["networks"].get(name, {})) for name in (own, network)]
    if data in book["data"] and method in book["methods"]:  # with what the paper changes for it there
        before, after = (_lay(data, name, method) for name in (own, network))
    else:
        before, after = parts
    kept = {
        name: value
        for name, value in settings.items()
        if not name.startswith("model_options.") and not (name in before and before[name] == value)
    }
    exchanged = {name: after[name] for name in settings if name not in kept and name in after}
    return {**parts[1], **exchanged, **kept}


def exchange_rate(settings: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """What a recipe's learning rate becomes with what is given over it, if that changes it.

    It is for the recipe's own batch, and scaled for another; another optimiser needs a rate of its own.
    """
    below, above = make_settings(settings), make_settings(settings, given)
    if below.lr is None or "lr" in given:
        return {}
    if above.optim.name != below.optim.name:
        return {"lr": None}
    if above.optim.name == "adamw" or above.batch_size == below.batch_size:
        return {}
    return {"lr": below.lr * above.batch_size / below.batch_size}


def count_images(name: str) -> int:
    """Training images of the data set that a recipe's name begins with."""
    book = _book()
    data = max((key for key in book["data"] if name.startswith(f"{key}-")), key=len)
    return int(book["data"][data]["images"])


def _matches(where: Mapping[str, Any], data: str, network: str, method: str) -> bool:
    facts = {"data": data, "network": network, "method": method}
    return all(facts[key] in values for key, values in where.items())


@cache
def _book() -> Any:
    return yaml.safe_load(files("selfcon.paper").joinpath("recipes.yaml").read_text(encoding="utf-8"))
