"""What verbs left in run folders fills the paper's cells."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from selfcon.paper.exhibits import Cell, get_exhibit
from selfcon.workflows.findings import cost_of, find_costs, found_in
from selfcon.workflows.reproduce import find_runs


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
    found = {"data": "flowers102", "images": {"train": 2040, "test": 6149}, "method": method}
    return {**found, "metric": "mean_per_class", "linear": {"accuracy": {"backbone": values}}}


def test_accuracy_elsewhere(tmp_path: Path) -> None:
    cell = cell_of("T4", "transfer accuracy", transfer="flowers102")
    assert found_in(tmp_path, cell) is None
    write(tmp_path / "transfer" / "classify-flowers102-0" / "classify.json", linear("selfcon", 81.5))
    write(tmp_path / "transfer" / "classify-flowers102-random-0" / "classify.json", linear("none: fresh weights", 9.0))
    assert found_in(tmp_path, cell) == 81.5
    assert found_in(tmp_path, cell_of("T4", "transfer accuracy", transfer="mit67")) is None
    write(tmp_path / "transfer" / "classify-flowers102-1" / "classify.json", linear("selfcon", 82.5))
    assert found_in(tmp_path, cell) == 82.0
    part = {**linear("selfcon", 20.0), "images": {"train": 100, "test": 100}}
    write(tmp_path / "transfer" / "classify-flowers102-part-0" / "classify.json", part)
    other = {**linear("selfcon", 20.0), "data": "flowers102-small"}
    write(tmp_path / "transfer" / "classify-flowers102-small-0" / "classify.json", other)
    assert found_in(tmp_path, cell) == 82.0
    write(tmp_path / "model.json", {"image_size": 224})
    smaller = {**linear("selfcon", 20.0), "image_size": 64}
    write(tmp_path / "transfer" / "classify-flowers102-64px-0" / "classify.json", smaller)
    assert found_in(tmp_path, cell) == 82.0
    (tmp_path / "transfer" / "classify-flowers102-2").mkdir()
    (tmp_path / "transfer" / "classify-flowers102-2" / "classify.json").write_text('{"data": ')  # half written
    assert found_in(tmp_path, cell) == 82.0


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
    found = {"data": data, "method": "selfcon", "scenes": {"train": 2000, "test": 1449}, **numbers}
    cell = cell_of("T4", quantity, transfer=transfer)
    write(tmp_path / "transfer" / f"{task}-a-random-0" / "results.json", {**found, "method": "none: fresh weights"})
    assert found_in(tmp_path, cell) is None
    write(tmp_path / "transfer" / f"{task}-b-encoder-0" / "results.json", found)
    assert found_in(tmp_path, cell) == expected
    few = dict.fromkeys(numbers, 50.0) | {"scenes": {"train": 110, "test": 55}}
    write(tmp_path / "transfer" / f"{task}-c-encoder-0" / "results.json", {**found, **few})
    assert found_in(tmp_path, cell) == expected


def test_what_nobody_of_ours_wrote_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "cost-notes.json", ["a list"])
    write(tmp_path / "one" / "results.json", {"accuracy": {}})
    (tmp_path / "one" / "config.yaml").write_text("of_another_version: 1\n")
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "results.json").write_text('{"accuracy": ')
    assert find_costs([tmp_path]) == {}
    assert find_runs([tmp_path]) == {}
    said = capsys.readouterr().err
    assert [name for name in ("cost-notes.json", "one", "two") if f"/{name}" in said] == [
        "cost-notes.json",
        "one",
        "two",
    ]


def test_costs_of_another_network_or_machine_are_not_mixed_in() -> None:
    (cell,) = (
        cell
        for cell in get_exhibit("T15").cells
        if cell.condition.items() >= {"method": "selfcon", "data": "cifar100", "batch_size": 256}.items()
        and cell.quantity.startswith("time")
    )
    row = {
        "model": "resnet18",
        "method": "selfcon",
        "image_size": 32,
        "batch_size": 256,
        "exits": "2:fc",
        "seconds": 0.1,
    }
    files = {
        Path("other-exits"): [{**row, "exits": "1:same", "seconds": 9.0}],
        Path("here"): [row],
        Path("elsewhere"): [{**row, "seconds": 7.0}],
    }
    assert cost_of(cell, files) == {Path("here"): 0.1}


def test_corruption(tmp_path: Path) -> None:
    path, cell = tmp_path / "transfer" / "corruption.json", cell_of("robustness", "relative mCE")
    write(path, {"summary": {"backbone": {"mean_error": 40.0, "relative_error": 10.0}}})
    assert found_in(tmp_path, cell) is None  # of other images than ImageNet-C's
    write(path, {"summary": {"backbone": {"mce": 70.0, "relative_mce": 90.0}}})
    assert found_in(tmp_path, cell) == 90.0
