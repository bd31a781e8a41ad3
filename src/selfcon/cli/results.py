"""How results are shown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from selfcon.cli.parsing import print_json
from selfcon.errors import name_some, printable
from selfcon.evaluation.answers import distinct, final_answer
from selfcon.progress import speaks


def show_result(result: dict[str, Any], folder: Path, *, as_json: bool) -> None:
    """The accuracy by exit and where the report is; or everything as JSON."""
    if as_json:
        print_json(result)
        return
    if not speaks():
        return
    if result.get("already_done"):
        print(f"{folder} is done already; --overwrite starts anew.")
    if "accuracy" in result:
        held_out = result.get("held_out_accuracy", {})
        shown = {
            name: values | ({"held_out": held_out[name]["top1"]} if name in held_out else {})
            for name, values in result["accuracy"].items()
        }
        print("\n".join([*accuracy_lines(shown), *never_lines(result)]))
        print(f"Report: {folder / 'report.html'}")
    else:
        print(f"The encoder is in {folder}; next: selfcon probe {folder}")


def accuracy_lines(accuracy: dict[str, dict[str, float]]) -> list[str]:
    """A table: a row an exit."""
    columns = {
        "top1": "top 1",
        "top5": "top 5",
        "mean_per_class": "mean of classes",
        "held_out": "held-out images",
        "train_top1": "training images",
    }
    shown = [key for key in columns if any(key in values for values in accuracy.values())]
    lines = ["accuracy, %".ljust(14) + "".join(f"{columns[key]:>17s}" for key in shown)]
    for name, values in distinct(accuracy).items():
        lines.append(f"  {name:12s}" + "".join(f"{values[key]:17.1f}" if key in values else " " * 17 for key in shown))
    return lines


def never_lines(result: dict[str, Any]) -> list[str]:
    """Return a line with the classes that are never predicted, if there are any."""
    never = result.get("never_guessed", [])
    if not never:
        return []
    return [f"never predicted by the {final_answer(result['accuracy'])}: {printable(name_some(never))}"]


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table as wide as what stands in it; the first column to the left."""
    lines = [[printable(str(cell)) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for first, *others in lines:
        cells = (cell.rjust(width + 3) for cell, width in zip(others, widths[1:], strict=True))
        print(first.ljust(widths[0]) + "".join(cells))
