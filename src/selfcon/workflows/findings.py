"""What other verbs left in run folders, as numbers of the paper's cells."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from selfcon.losses.methods import get_method
from selfcon.paper.exhibits import CORRUPTION, INFORMATION, TRANSFER, Cell
from selfcon.paper.recipes import load_recipe
from selfcon.progress import say

_DATA_OF_SIZE = {32: "cifar100", 64: "tiny-imagenet", 224: "imagenet100"}
_COSTS = {
    "parameters": ("parameters", 1e-6),
    "multiply-adds": ("multiply_adds", 1e-9),
    "memory": ("memory_bytes", 2.0**-30),
    "time": ("seconds", 1.0),
}  # by what the quantities of Tables 15 and 16 begin with

_SCENES = {"segmentation mIoU": ("segment", "miou"), "detection mAP": ("detect", "map")}
_FEWEST_TESTED = 1000  # each of these data sets tests on more
_CORRUPTION = {"mCE": "mce", "relative mCE": "relative_mce"}


def found_in(folder: Path, cell: Cell) -> float | None:
    """The number of a cell that its verb left in the folder of a run, if there is one."""
    readers = {INFORMATION: _information, TRANSFER: _transfer, CORRUPTION: _corruption}
    return readers[str(cell.made_by)](folder, cell)


def _information(folder: Path, cell: Cell) -> float | None:
    for run in read_facts(folder / "analysis" / "information.json").get("runs", ()):
        for each in run["estimates"]:
            if all(each[key] == cell.condition[key] for key in ("estimator", "between")):
                return float(each["nats"])
    return None


def _transfer(folder: Path, cell: Cell) -> float | None:
    """Of the run's own encoder, whatever else was tried: the backbone, as the paper has it; the mean over seeds."""
    wanted = str(cell.condition["transfer"])
    if cell.quantity not in _SCENES:
        found = _of_whole_data(folder.glob("transfer/classify-*/classify.json"), wanted, "images")
        own = read_facts(folder / "model.json").get("image_size")
        found = [each for each in found if each["data"] == wanted and each.get("image_size", own) == own]
        numbers = [float(each["linear"]["accuracy"]["backbone"][each["metric"]]) for each in found if "linear" in each]
    else:
        task, number = _SCENES[cell.quantity]
        if (task, wanted) == ("detect", "voc2007"):
            number = "map50"
        found = _of_whole_data(folder.glob(f"transfer/{task}-*/results.json"), wanted, "scenes")
        numbers = [float(each[number]) for each in found]
    return statistics.fmean(numbers) if numbers else None


def _of_whole_data(paths: Iterable[Path], wanted: str, counted: str) -> list[dict[str, Any]]:
    """What was found on this data set with trained weights; a small part of a data set is not it."""
    found = [read_facts(path) for path in sorted(paths)]
    return [
        each
        for each in found
        if each.get("data", "").lower().startswith(wanted)
        and each[counted]["test"] >= _FEWEST_TESTED
        and not each["method"].startswith("none")
    ]


def _corruption(folder: Path, cell: Cell) -> float | None:
    found = read_facts(folder / "transfer" / "corruption.json")
    number = found.get("summary", {}).get("backbone", {}).get(_CORRUPTION[cell.quantity])
    return None if number is None else float(number)


def read_facts(path: Path) -> dict[str, Any]:
    """What a file holds; nothing where there is none, or one that no verb of ours wrote."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        say(f"note: {path} is left out: it is not what selfcon writes")
        return {}
    return found


def find_costs(folders: Sequence[Path]) -> dict[Path, list[dict[str, Any]]]:
    """What `selfcon analyze cost` left in these folders, or in `analysis` below them; sooner folders first."""
    files = [path for folder in folders for path in (*folder.glob("cost*.json"), folder / "analysis" / "cost.json")]
    found = {path: read_facts(path) for path in files}
    as_in_paper = {path: each for path, each in found.items() if each.get("width") == 1.0 and not each.get("network")}
    return {path: each["rows"] for path, each in as_in_paper.items() if "rows" in each}


def cost_of(cell: Cell, costs: Mapping[Path, Sequence[Mapping[str, Any]]]) -> dict[Path, float]:
    """The number of a cell in the first file of costs that has it: two of them would be two machines, not two seeds."""
    key, unit = _COSTS[cell.quantity.partition(",")[0]]
    for path, rows in costs.items():
        for row in rows:
            if row[key] is not None and is_of(row, cell):
                return {path: row[key] * unit}
    return {}


def is_of(row: Mapping[str, Any], cell: Cell) -> bool:
    """Whether a row of costs is of what a cell of the paper is of, sub-networks included."""
    recipe = load_recipe(cell.recipe).settings
    wanted = {**cell.condition, "exits": recipe["exits"] if get_method(recipe["method"]).uses_exits else "none"}
    there = {**row, "data": _DATA_OF_SIZE.get(row["image_size"])}
    return all(there[name] == value for name, value in wanted.items() if name in there)
