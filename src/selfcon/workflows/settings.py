"""From a recipe and what was given over it to settings, and every mistake in them at once. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from selfcon.config import Settings, flatten, make_settings
from selfcon.data.policies import get_policy
from selfcon.errors import UsageError
from selfcon.losses.methods import get_method
from selfcon.networks.exits import parse_exits
from selfcon.networks.names import NAMED
from selfcon.paper.recipes import exchange_network, exchange_rate, load_recipe
from selfcon.progress import say

DEFAULT_RECIPE = "digits"


def collect_settings(
    recipe: str | None, given: Mapping[str, Any], wrong: Sequence[str] = (), *, tell: bool = True
) -> Settings:
    """Settings from a recipe and what was given over it; for the digits, their recipe is the ground.

    A recipe's learning rate is for its own batch and optimiser: another batch size scales it, another optimiser takes
    its own, unless a rate is given too. Another network does not take over what the recipe has for its own. `wrong` is
    what the caller has to complain about, told together with what is found here. What is worth a note is told, unless
    somebody has.
    """
    if recipe is None and given.get("data", DEFAULT_RECIPE) == DEFAULT_RECIPE:
        recipe = DEFAULT_RECIPE
        if "data" in given and tell:
            say("note: what is not given is of the recipe digits, which `selfcon fit --recipe digits --help-all` lists")
    ground = dict(load_recipe(recipe).settings) if recipe is not None else {}
    model = str(given.get("model", ground.get("model")))
    ground = exchange_network(ground, model)
    if recipe == DEFAULT_RECIPE and model.partition(".")[0] not in NAMED:
        ground.pop("width", None)  # which only those have
    wrong = [*wrong, *(f"In {recipe}: {sentence}" for sentence in _try(lambda: make_settings(ground))[1])]
    if not wrong:
        settings, wrong = _try(lambda: make_settings(ground, given, exchange_rate(ground, given)))
    else:
        wrong += _try(lambda: make_settings(given))[1]
    # Names that only other parts know are looked at too, so that all mistakes are told at once.
    for known, name in ((get_method, "method"), (get_policy, "augment.policy"), (parse_exits, "exits")):
        value = {**ground, **flatten(given)}.get(name)
        if value is not None:
            wrong += _try(lambda known=known, value=value: known(value))[1]  # type: ignore[misc]
    if wrong:
        raise UsageError(" ".join(sentence if sentence.endswith(("?", ".")) else f"{sentence}." for sentence in wrong))
    assert isinstance(settings, Settings)
    if tell:
        _tell_idle(settings, flatten(given))
    return settings


def default_folder(settings: Settings) -> Path:
    """Return the run directory that is used if none is given: runs/DATA-MODEL-METHOD."""
    name = Path(settings.data).stem or settings.data
    return Path("runs") / f"{name}-{settings.model}-{settings.method}"


def _tell_idle(settings: Settings, given: Mapping[str, Any]) -> None:
    """What was asked for and changes nothing, by the method."""
    method = get_method(settings.method)
    if given.get("exits") and not method.uses_exits and parse_exits(settings.exits):
        say(f"note: {method.name} is of the backbone alone: exits are not used")
    contrasts = method.one_stage is None or method.one_stage.contrast
    if "loss.temperature" in given and not contrasts:
        say(f"note: {method.name} contrasts nothing: its loss has no temperature")
    if "loss.alpha" in given and method.has_terms and all(term.share == "whole" for term in method.terms):
        say(f"note: the loss of {method.name} has no alpha")


def _try(work: Callable[[], Any]) -> tuple[Any, list[str]]:
    try:
        return work(), []
    except UsageError as error:
        return None, [str(error)]
