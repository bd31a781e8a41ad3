"""The paper's numbers as data: all there, all with a recipe, all as the source prints them."""

from __future__ import annotations

import re
from collections import Counter
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml

from selfcon.config import make_settings
from selfcon.errors import UsageError
from selfcon.paper.exhibits import SCALES, Cell, choose, get_exhibit, identify, list_exhibits
from selfcon.paper.recipes import list_recipes, load_recipe
from selfcon.paper.verdicts import agreement_of_order, judge

TREE: dict[str, Any] = yaml.safe_load(files("selfcon.paper").joinpath("values.yaml").read_text())


def cells() -> list[Cell]:
    return [cell for name in list_exhibits() for cell in get_exhibit(name).cells]


def test_everything_is_there() -> None:
    tables, figures = [f"T{number}" for number in range(1, 18)], [f"F{number}" for number in range(1, 8)]
    assert list_exhibits() == [*tables, *figures, "text", "robustness", "beyond"]
    for name in ("T4", "robustness"):
        assert (get_exhibit(name).made_by or "").startswith("selfcon transfer")
    for name in ("T15", "T16", "T17", "F3", "F4", "F5", "F6", "F7"):
        assert (get_exhibit(name).made_by or "").startswith("selfcon analyze ")
    with pytest.raises(UsageError, match="Unknown table or figure 'T99'"):
        get_exhibit("T99")


@pytest.mark.medium
def test_every_cell_that_runs_has_settings() -> None:
    known = set(list_recipes())
    for cell in cells():
        if cell.runs:
            assert cell.recipe in known
            for scale in SCALES:
                settings = cell.settings(scale)
                recipe = load_recipe(cell.recipe).settings
                assert settings.method == cell.condition.get("method", recipe["method"])
                if scale != "smoke":
                    wanted = [cell.condition.get(key, recipe[key]) for key in ("data", "model")]
                    assert [settings.data, settings.model] == wanted


def test_recipes_of_ours_build_on_others() -> None:
    best, fast, base = (
        load_recipe(f"cifar100-resnet18-{name}").settings for name in ("best", "minutes", "selfcon-1stage")
    )
    assert best["lr"] == fast["lr"] == base["lr"]
    assert best["exits"] == fast["exits"] != base["exits"]
    assert fast["epochs"] < best["epochs"] < base["epochs"]
    (cell, *_) = get_exhibit("beyond").cells
    assert cell.settings("full") == make_settings(best)
    assert cell.settings("short") == cell.settings("full")  # as long as it is meant to be
    assert cell.is_ours
    assert cell.runs


def test_scales_and_conditions() -> None:
    (cell,) = choose(get_exhibit("T5").cells, ["method=selfcon", "batch_size=256"])
    assert (cell.value, cell.text) == (77.0, "77.0")
    full, short = cell.settings("full"), cell.settings("short")
    assert (full.epochs, full.batch_size, full.lr) == (1000, 256, 0.125)
    assert (short.epochs, short.probe_epochs) == (200, 100)
    (ce,) = choose(get_exhibit("T1").cells, ["method=ce", "data=cifar100", "model=resnet18"])
    assert (ce.value, ce.spread, ce.seeds) == (72.9, 0.1, 3)
    assert (ce.settings("full").epochs, ce.settings("short").epochs) == (500, 100)
    (large,) = choose(get_exhibit("T6").cells, ["data=imagenet", "method=supcon", "lr=1.5"])
    assert (large.settings("full").batch_size, large.settings("full").lr, large.settings("full").epochs) == (
        3072,
        1.5,
        400,
    )
    (several,) = choose(get_exhibit("T7").cells, ["exits=1:fc,2:fc,3:fc", "model=resnet18"])
    assert several.settings("full").exits == "1:fc,2:fc,3:fc"
    with pytest.raises(UsageError, match="--only wants name=value"):
        choose(cells(), ["methods=ce"])
    with pytest.raises(UsageError, match="did you mean 'cifar100'"):
        choose(cells(), ["data=cifar1000", "model=resnet18"])
    assert len(choose(get_exhibit("T6").cells, ["lr=1"])) == 8
    (twice,) = choose(get_exhibit("T6").cells, ["data=imagenet100", "method=supcon", "lr=1"])
    (once,) = [
        cell
        for cell in choose(get_exhibit("T2").cells, ["data=imagenet100", "method=supcon", "model=resnet18"])
        if cell.over is None
    ]
    assert identify(twice.settings("full")) == identify(once.settings("full"))  # SupCon has no exits to differ in


def test_numbers_keep_their_last_zeros() -> None:
    texts = {cell.text for cell in get_exhibit("T15").cells if cell.quantity.startswith("parameters")}
    assert texts == {"11.50", "11.89", "16.43"}


def test_one_experiment_one_name() -> None:
    (once,) = choose(get_exhibit("T1").cells, ["method=selfcon", "data=cifar100", "model=resnet18"])
    (again,) = choose(get_exhibit("T5").cells, ["method=selfcon", "batch_size=1024"])
    settings = once.settings("full")
    assert identify(settings) == identify(again.settings("full", seed=3))
    assert identify(settings) == identify(settings.model_copy(update={"data": "/somewhere/cifar100.npz"}))
    assert identify(settings) != identify(once.settings("short"))


def source() -> str:
    import os

    folder = os.environ.get("SELFCON_TEST_DATA")
    path = Path(folder) / ".." / "paper" / "selfcon-aaai23.tex" if folder else Path("nowhere")
    if not path.is_file():
        pytest.skip("the paper's source is not at hand")
    return path.read_text()


_TABLES = [name for name in TREE if name.startswith("T")]


@pytest.mark.parametrize("name", _TABLES)
def test_the_numbers_are_those_of_the_source(name: str) -> None:
    tables = re.findall(r"\\begin\{table\*?\}.*?\\end\{table\*?\}", source(), re.DOTALL)
    assert len(tables) == 17
    (table,) = [text for text in tables if f"\\label{{{TREE[name]['label']}}}" in text]
    assert tables.index(table) == int(name[1:]) - 1
    bodies = " ".join(re.findall(r"\\begin\{tabular\}.*?\\end\{tabular\}", table, re.DOTALL))
    bodies = re.sub(r"\\multirow\{[-\d.]+\}", "", bodies)
    printed = Counter(float(number) for number in re.findall(r"\d+\.\d+", bodies))

    ours: Counter[float] = Counter()
    for cell in get_exhibit(name).cells:
        ours.update([cell.value, *([cell.spread] if cell.spread is not None else [])])
    heads = {
        (str({**TREE[name].get("common", {}), **part.get("common", {})}), value)
        for part in TREE[name]["parts"]
        for column in part["columns"]
        for key, value in column.items()
        if key in ("lr", "loss.alpha")
    }
    ours.update(value for _, value in heads)
    assert ours == printed


def test_the_numbers_of_the_text_are_in_the_source() -> None:
    text = source()
    for cell in [*get_exhibit("text").cells, *get_exhibit("robustness").cells]:
        number = abs(cell.value)
        assert (f"{number:g}" in text) or (cell.over is not None and f"{100 * number:.0f}\\%" in text), cell


def test_verdicts() -> None:
    near = judge(75.4, 0.1, 3, [75.3])
    assert near.agrees
    assert "within the spread" in str(near)
    far = judge(75.4, 0.1, 3, [73.3])
    assert far.agrees is False
    assert str(far).startswith("-2.1, where chance gives ±")
    assert judge(75.4, None, 1, [75.0]).agrees is None
    several = judge(75.4, None, 1, [75.0, 75.6, 75.3])
    assert several.agrees
    assert several.spread == pytest.approx(0.3)
    # Three of three seeds with the paper's own spread: t(0.975, 4) * sqrt(0.01 * 2/3), but for rounding.
    margin = judge(75.4, 0.1, 3, [75.3, 75.4, 75.5]).margin
    assert margin == pytest.approx(2.776 * (0.01 * 2 / 3 + 0.05**2 / 3) ** 0.5, rel=1e-3)
    assert judge(0.59, None, 1, [0.70, 0.705, 0.71], decimals=2).agrees is False
    shown = {value: judge(0.7, None, 1, [value]).shown_mean for value in (0.0384, 0.61, 75.04, 0.0)}
    assert shown == {0.0384: "0.038", 0.61: "0.6", 75.04: "75.0", 0.0: "0.0"}
    assert judge(73.0, 0.0, 3, [73.15]).agrees  # ±0.0 may be ±0.04
    aside = judge(75.4, 0.1, 3, [75.3], aside="after a fifth of the epochs")
    assert aside.agrees is None
    assert str(aside) == "-0.1 after a fifth of the epochs (n=1)"
    assert agreement_of_order([1, 2, 3], [10, 10, 10]) is None
    assert agreement_of_order([1, 2, 3], [10, 20, 30]) == 1
    assert agreement_of_order([1, 2, 3], [30, 20, 10]) == -1
