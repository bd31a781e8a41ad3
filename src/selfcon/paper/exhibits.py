"""The paper's tables, figures and numbers as data: `values.yaml` in memory.

An exhibit is a table, a figure or the numbers of the text; a cell is one number of it with its condition. A cell knows
the settings that reproduce it, at three scales.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from selfcon.config import NAMES, Settings, flatten, make_settings
from selfcon.errors import UsageError, unknown_name
from selfcon.paper.recipes import load_recipe

SCALES = {
    "smoke": "one epoch of narrow networks on the digits: proves the path",
    "short": "a fifth of the paper's epochs",
    "full": "the paper's epochs",
}
_SMOKE = {
    "data": "digits",
    "width": 0.125,
    "epochs": 1,
    "probe.epochs": 1,
    "precision": "fp32",
    "watch.knn_every": 0,
}
COST, INFORMATION = "selfcon analyze cost", "selfcon analyze information"
TRANSFER, CORRUPTION = "selfcon transfer", "selfcon transfer corruption"
"""Commands that measure numbers of the paper."""
_WITHOUT_EXITS = ("ce", "supcon", "supcon-s", "simclr")
# What a run may differ in and still be the same experiment.
_NO_MATTER = ("data_root", "class_list", "bad_images", "seed", "keep_epochs")


@dataclass(frozen=True)
class Cell:
    """One number of the paper."""

    exhibit: str
    quantity: str
    condition: Mapping[str, Any]
    text: str  # as the paper prints it
    value: float
    spread: float | None
    seeds: int
    minus: str | None = None  # the number is a difference from this method's
    over: str | None = None  # or a multiple of it
    waits_for: str | None = None  # a tool that is not there yet
    made_by: str | None = None  # the command that measures it
    part: int = 0  # which grid of the exhibit, and where in it
    row: str = ""
    column: str = ""

    @property
    def is_ours(self) -> bool:
        """Whether its recipe is one of ours, and the number what it is to beat."""
        return "recipe" in self.condition

    @property
    def recipe(self) -> str:
        return _recipe_of(self.condition)

    @property
    def runs(self) -> bool:
        """Whether it takes training runs, and is no number by definition."""
        trained = self.waits_for is None and self.made_by != COST
        return trained and (self.over is None or self.over != self.condition.get("method"))

    def settings(self, scale: str, *, seed: int = 0, method: str | None = None) -> Settings:
        """What to run for it; `method` for another one under the same condition."""
        condition = dict(self.condition)
        if method is not None:
            condition["method"] = method
        ground = load_recipe(_recipe_of(condition)).settings
        if condition.get("method") in _WITHOUT_EXITS:
            condition.pop("exits", None)
        given = {
            key: value for key, value in condition.items() if key in NAMES and key not in ("data", "model", "method")
        }
        if "batch_size" in given and "lr" not in given:  # the rate goes with the batch
            given["lr"] = ground["lr"] * given["batch_size"] / ground["batch_size"]
        length = "full" if self.is_ours and scale == "short" else scale  # ours are as long as they are meant to be
        return make_settings(ground, given, scaled(make_settings(ground, given), length), {"seed": seed})


@dataclass(frozen=True)
class Exhibit:
    """A table, a figure, or numbers of the text."""

    name: str
    title: str
    section: str
    label: str | None
    waits_for: str | None
    made_by: str | None
    cells: tuple[Cell, ...]

    def describe(self) -> dict[str, Any]:
        kind = {"T": "table", "F": "figure"}.get(self.name[0], "text")
        return {
            "name": self.name,
            "kind": kind,
            "title": self.title,
            "where": self.section,
            "cells": len(self.cells),
            "waits_for": self.waits_for,
            "made_by": self.made_by,
        }


def list_exhibits() -> list[str]:
    """All names: T1 to T17, F1 to F7, text, robustness, beyond."""
    return list(_book())


def get_exhibit(name: str) -> Exhibit:
    """The exhibit of that name."""
    if name not in _book():
        raise unknown_name("table or figure", name, _book())
    return _book()[name]


def scaled(settings: Settings, scale: str) -> dict[str, Any]:
    """What a scale changes about settings."""
    if scale not in SCALES:
        raise unknown_name("scale", scale, SCALES)
    if scale == "smoke":
        return {**_SMOKE, "image_size": 32 if settings.model == "vgg16_bn" else 16}  # VGG halves its images five times
    return {"epochs": math.ceil(settings.epochs / 5)} if scale == "short" else {}


def identify(settings: Settings, data: str | None = None) -> str:
    """A name for an experiment: equal for equal settings, whatever the seed and wherever the data lie.

    `data` is the name of the data set where the path does not tell it.
    """
    usual = {**flatten(Settings().model_dump(mode="json")), "schedule.kind": "cosine"}  # as when names were first given
    flat = {
        key: value
        for key, value in flatten(settings.model_dump(mode="json")).items()
        # What is as usual is left out, so that a name outlives settings that are added later.
        if value != usual.get(key) and key not in _NO_MATTER and not key.startswith("watch.")
    }
    flat["data"] = data = data or Path(settings.data).stem
    digest = hashlib.sha256(json.dumps(flat, sort_keys=True).encode()).hexdigest()[:8]
    return f"{data}-{settings.model}-{settings.method}-{digest}"


def choose(cells: Sequence[Cell], only: Sequence[str]) -> list[Cell]:
    """Those cells whose condition is among `name=value,value`, for each of these."""
    every = cells
    for wish in only:
        name, equals, values = wish.partition("=")
        known = {key for cell in every for key in cell.condition}
        if not equals or name not in known:
            raise UsageError(f"--only wants name=value with one of {', '.join(sorted(known))}, not {wish!r}.")
        there = {_plain(cell.condition[name]) for cell in every if name in cell.condition}
        wanted = [_plain(value) for value in (values.split(",") if name != "exits" else [values])]
        for value in wanted:
            if value not in there:
                raise unknown_name(name, value, there)
        cells = [cell for cell in cells if name in cell.condition and _plain(cell.condition[name]) in wanted]
    return list(cells)


def _plain(value: Any) -> str:
    """Numbers as numbers: 1 is 1.0."""
    try:
        return f"{float(value):g}"
    except ValueError:
        return str(value)


class _Printed(float):
    """A number that knows how it is written: 11.50 has two decimals."""

    text: str


class _Loader(yaml.SafeLoader):
    """YAML whose numbers keep their last zeros."""

    def construct_printed(self, node: yaml.ScalarNode) -> _Printed:
        number = _Printed(self.construct_yaml_float(node))
        number.text = node.value
        return number


_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_printed)


@cache
def _book() -> dict[str, Exhibit]:
    text = files("selfcon.paper").joinpath("values.yaml").read_text(encoding="utf-8")
    tree = yaml.load(text, _Loader)  # noqa: S506 - it is a SafeLoader
    return {name: _exhibit(name, entry) for name, entry in tree.items()}


def _exhibit(name: str, entry: Mapping[str, Any]) -> Exhibit:
    cells = []
    for number, part in enumerate(entry.get("parts", ())):
        common = {**entry.get("common", {}), **part.get("common", {})}
        for condition, *values in part["rows"]:
            if len(values) != len(part["columns"]):
                raise ValueError(f"{name}: {len(values)} values for {len(part['columns'])} columns")
            for column, value in zip(part["columns"], values, strict=True):
                printed = str(getattr(value, "text", value))
                mean, _, spread = printed.partition("±")
                cells.append(
                    Cell(
                        exhibit=name,
                        quantity=part["quantity"],
                        condition={**common, **column, **condition},
                        text=printed,
                        value=float(mean),
                        spread=float(spread) if spread else None,
                        seeds=entry.get("seeds", 1) if spread else 1,
                        minus=part.get("minus"),
                        over=part.get("over"),
                        waits_for=part.get("waits_for", _tool(entry, part, "waits_for")),
                        made_by=_tool(entry, part, "made_by"),
                        part=number,
                        row=label(condition),
                        column=label(column),
                    )
                )
    tools = (entry.get("waits_for"), entry.get("made_by"))
    return Exhibit(name, entry["title"], entry["section"], entry.get("label"), *tools, tuple(cells))


def label(condition: Mapping[str, Any]) -> str:
    """What a row or column is about: names as they are, numbers with what they are."""
    return ", ".join(
        str(value) if isinstance(value, str) else f"{name.rpartition('.')[2]} {value}"
        for name, value in condition.items()
    )


def _recipe_of(condition: Mapping[str, Any]) -> str:
    """A recipe of the paper by what it is made of, or one of ours by its name."""
    named = condition.get("recipe")
    return str(named) if named else "-".join(str(condition[key]) for key in ("data", "model", "method"))


def _tool(entry: Mapping[str, Any], part: Mapping[str, Any], kind: str) -> str | None:
    """Plain accuracies need no further tool, in whichever table they stand."""
    return None if part["quantity"] in ("backbone", "exit", "ensemble") else entry.get(kind)
