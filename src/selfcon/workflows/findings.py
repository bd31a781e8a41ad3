"""What other verbs left in run folders, as numbers of the paper's cells."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from selfcon.paper.exhibits import CORRUPTION, INFORMATION, TRANSFER, Cell

DATA_OF_SIZE = {32: "cifar100", 64: "tiny-imagenet", 224: "imagenet100"}
_COSTS = {
    "parameters": ("parameters", 1e-6),
    "multiply-adds": ("multiply_adds", 1e-9),
    "memory": ("memory_bytes", 2.0**-30),
    "time": ("seconds", 1.0),
}  # by what the quantities of Tables 15 and 16 begin with

_SCENES = {"segmentation mIoU": ("segment", "miou"), "detection mAP": ("detect", "map")}
_CORRUPTION = {"mCE": "mce", "relative mCE": "relative_mce"}


def found_in(folder: Path, cell: Cell) -> float | None:
    """The number of a cell that its verb left in the folder of a run, if there is one."""
    readers = {INFORMATION: _information, TRANSFER: _transfer, CORRUPTION: _corruption}
    return readers[str(cell.made_by)](folder, cell)


def _information(folder: Path, cell: Cell) -> float | None:
    for run in _read(folder / "analysis" / "information.json").get("runs", ()):
        for each in run["estimates"]:
            if all(each[key] == cell.condition[key] for key in ("estimator", "between")):
                return float(each["nats"])
    return None


def _transfer(folder: Path, cell: Cell) -> float | None:
    """Of the run's own encoder, whatever else was tried: the backbone, as the paper has it."""
    wanted = str(cell.condition["transfer"])
    if cell.quantity not in _SCENES:
        for path in sorted(folder.glob(f"transfer/classify-{wanted}-*/classify.json")):
            found = _read(path)
            if "linear" in found and not found["method"].startswith("none"):
                return float(found["linear"]["accuracy"]["backbone"][found["metric"]])
        return None
    task, number = _SCENES[cell.quantity]
    if (task, wanted) == ("detect", "voc2007"):
        number = "map50"
    for path in sorted(folder.glob(f"transfer/{task}-*/results.json")):
        found = _read(path)
        if found["data"].lower().startswith(wanted) and not found["method"].startswith("none"):
            return float(found[number])
    return None


def _corruption(folder: Path, cell: Cell) -> float | None:
    found = _read(folder / "transfer" / "corruption.json")
    number = found.get("summary", {}).get("backbone", {}).get(_CORRUPTION[cell.quantity])
    return None if number is None else float(number)


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def find_costs(folders: Sequence[Path]) -> dict[Path, list[dict[str, Any]]]:
    """What `selfcon analyze cost` left in these folders, or in `analysis` below them."""
    files = [path for folder in folders for path in (*folder.glob("cost*.json"), folder / "analysis" / "cost.json")]
    found = {path: json.loads(path.read_text(encoding="utf-8")) for path in files if path.is_file()}
    return {path: each["rows"] for path, each in found.items() if each.get("width") == 1.0}


def costs_of(cell: Cell, costs: Mapping[Path, Sequence[Mapping[str, Any]]]) -> Iterator[tuple[Path, float]]:
    """The number of a cell in each file of costs that has it."""
    key, unit = _COSTS[cell.quantity.partition(",")[0]]
    for path, rows in costs.items():
        for row in rows:
            there = {**row, "data": DATA_OF_SIZE.get(row["image_size"])}
            wanted = {name: value for name, value in cell.condition.items() if name in there}
            if row[key] is not None and all(there[name] == value for name, value in wanted.items()):
                yield path, row[key] * unit
                break
