"""Write results/index.json from the folders beside this file, and the tables in README.md and docs/results.md from it.

A table stands between `<!-- results: T1 short -->` and `<!-- end of results -->`: the name of an exhibit of the paper
and a scale. `make results` writes; with --check nothing is written and a difference is an error.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from selfcon.config import make_settings, read_yaml
from selfcon.paper.exhibits import get_exhibit, identify, label
from selfcon.workflows.reproduce import Comparison, compare, compare_orders, describe_order, find_runs

HERE = Path(__file__).parent
FILES = ("config.yaml", "metrics.jsonl", "results.json", "environment.json")
PAGES = (HERE.parent / "README.md", HERE.parent / "docs" / "results.md")
_BLOCK = re.compile(r"(<!-- results: (\S+) (\S+) -->\n).*?(<!-- end of results -->)", re.DOTALL)


def build_index() -> list[dict[str, Any]]:
    """Every measured cell in a line."""
    lines = []
    for folder in sorted(path for path in HERE.iterdir() if path.is_dir() and not path.name.startswith("__")):
        missing = [name for name in FILES if not (folder / name).is_file()]
        if missing:
            raise SystemExit(f"{folder.name} lacks {', '.join(missing)}")
        result = json.loads((folder / "results.json").read_text(encoding="utf-8"))
        environment = json.loads((folder / "environment.json").read_text(encoding="utf-8"))
        lines.append(
            {
                "folder": folder.name,
                "experiment": identify(make_settings(read_yaml(folder / "config.yaml"))),
                **{key: result[key] for key in ("method", "model", "data", "epochs", "seed")},
                "top1": {name: round(values["top1"], 2) for name, values in result["accuracy"].items()},
                "seconds": round(result["seconds"]),
                "hardware": environment["gpu"] or "CPU",
                "date": environment["date"],
                "command": " ".join(environment["command"]),
            }
        )
    return lines


def make_table(exhibit: str, scale: str) -> str:
    """What was measured of an exhibit, as Markdown."""
    compared = compare(get_exhibit(exhibit).cells, scale, find_runs([HERE]))
    measured = [each for each in compared if each.ours]
    if not measured:
        return "Nothing was measured yet.\n"
    lines = ["| | | paper | ours | seeds | verdict |", "|---|---|---|---|---|---|"]
    lines += dict.fromkeys(map(_row, measured))  # the paper has some rows twice
    for order in compare_orders(compared):
        what, paper, ours = describe_order(order)
        lines += ["", f"Order of methods ({what}). Paper: {paper}. Ours: {ours}."]
    return "\n".join(lines) + "\n"


def _row(each: Comparison) -> str:
    cell, verdict = each.cell, each.verdict
    assert verdict is not None
    spread = "" if verdict.spread is None else f" ± {verdict.spread:.1f}"
    link = f"[{verdict.shown_mean}{spread}](results/{each.folders[0].name})"
    link += "".join(f" [also](results/{folder.name})" for folder in each.folders[1:])
    what = cell.quantity + (f", less that of {cell.minus}" if cell.minus else "")
    what += f" / {cell.over}'s" if cell.over else ""
    name = next(key for key in ("method", "recipe") if key in cell.condition)
    rest = label({key: value for key, value in cell.condition.items() if key != name})
    where = ", ".join(filter(None, (rest, what)))
    parts = (cell.condition[name], where, cell.text.replace("±", " ± "), link, verdict.n, verdict)
    return f"| {' | '.join(map(str, parts))} |"


def fill(page: Path) -> str:
    """A page with its tables made anew; links are relative to it."""
    up = "" if page.parent == HERE.parent else "../"

    def table(match: re.Match[str]) -> str:
        text = make_table(match[2], match[3]).replace("](results/", f"]({up}results/")
        return f"{match[1]}\n{text}\n{match[4]}"

    return _BLOCK.sub(table, page.read_text(encoding="utf-8"))


def main() -> None:
    wanted = {HERE / "index.json": json.dumps(build_index(), indent=1) + "\n", **{page: fill(page) for page in PAGES}}
    for path, text in wanted.items():
        if "--check" in sys.argv:
            if path.read_text(encoding="utf-8") != text:
                raise SystemExit(f"{path.name} is not what results/ says: run `make results`.")
        else:
            path.write_text(text)


if __name__ == "__main__":
    main()
