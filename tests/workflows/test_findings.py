"""What verbs left in run folders fills the paper's cells."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from selfcon.paper.exhibits import Cell, get_exhibit
from selfcon.workflows.findings import found_in


def cell_of(exhibit: str, quantity: str, **condition: str) -> Cell:
    (cell,) = (
        cell
        for cell in get_exhibit(exhibit).cells
        if cell.quantity == quantity and cell.condition.items() >= {"method": "selfcon", **condition}.items()
    )
    return cell


def write(path: Path, what: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(what))


def linear(method: str, accuracy: float) -> dict[str, Any]:
    values = {"top1": 0.0, "mean_per_class": accuracy}
    return {"method": method, "metric": "mean_per_class", "linear": {"accuracy": {"backbone": values}}}


def test_accuracy_elsewhere(tmp_path: Path) -> None:
    cell = cell_of("T4", "transfer accuracy", transfer="flowers102")
    assert found_in(tmp_path, cell) is None
    write(tmp_path / "transfer" / "classify-flowers102-0" / "classify.json", linear("selfcon", 81.5))
    write(tmp_path / "transfer" / "classify-flowers102-random-0" / "classify.json", linear("none: fresh weights", 9.0))
    assert found_in(tmp_path, cell) == 81.5
    assert found_in(tmp_path, cell_of("T4", "transfer accuracy", transfer="mit67")) is None


@pytest.mark.parametrize(
    ("quantity", "transfer", "task", "data", "expected"),
    [
        ("segmentation mIoU", "voc2012", "segment", "VOC2012", 3.0),
        ("detection mAP", "voc2007", "detect", "VOC2007", 2.0),
        ("detection mAP", "coco", "detect", "coco", 1.0),
    ],
)
def test_scenes(tmp_path: Path, quantity: str, transfer: str, task: str, data: str, expected: float) -> None:
    numbers = {"map": 1.0, "map50": 2.0, "miou": 3.0}
    found = {"data": data, "method": "selfcon", **numbers}
    cell = cell_of("T4", quantity, transfer=transfer)
    write(tmp_path / "transfer" / f"{task}-a-random-0" / "results.json", {**found, "method": "none: fresh weights"})
    assert found_in(tmp_path, cell) is None
    write(tmp_path / "transfer" / f"{task}-b-encoder-0" / "results.json", found)
    assert found_in(tmp_path, cell) == expected


def test_corruption(tmp_path: Path) -> None:
    path, cell = tmp_path / "transfer" / "corruption.json", cell_of("robustness", "relative mCE")
    write(path, {"summary": {"backbone": {"mean_error": 40.0, "relative_error": 10.0}}})
    assert found_in(tmp_path, cell) is None  # of other images than ImageNet-C's
    write(path, {"summary": {"backbone": {"mce": 70.0, "relative_mce": 90.0}}})
    assert found_in(tmp_path, cell) == 90.0
