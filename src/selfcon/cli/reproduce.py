"""The paper's tables and figures: list them, show their numbers, plan and make the runs behind them, compare.

example: selfcon reproduce list
         selfcon reproduce show T1
         selfcon reproduce plan T1 --scale short --only data=cifar100 --only model=resnet18
         selfcon reproduce run T1 --scale smoke
         selfcon reproduce compare T1 --scale smoke
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfcon.cli.parsing import Parser, print_json
from selfcon.cli.settings import add_compile
from selfcon.errors import InputMissingError, StorageError, UsageError, hint_path
from selfcon.progress import as_time, say

if TYPE_CHECKING:
    from selfcon.workflows.reproduce import Comparison

ACTIONS = ("list", "show", "plan", "run", "compare")
_SCALES = {
    "smoke": "the scale smoke, digits for seconds: nothing to compare",
    "short": "a fifth of the paper's epochs (--scale full for all of them)",
    "full": "the paper's number of epochs",
}


def add_arguments(parser: Parser) -> None:
    parser.add_argument("action", choices=ACTIONS, metavar="ACTION", help="list, show, plan, run or compare")
    parser.add_argument(
        "exhibits", nargs="*", metavar="NAME", help="T1 to T17, F1 to F7, text, robustness, beyond, or all"
    )
    parser.add_argument("--scale", default="short", metavar="STR", help="smoke, short or full (default: short)")
    parser.add_argument("--seeds", default="0", metavar="LIST", help="of plan and run, such as 0,1,2 (default: 0)")
    parser.add_argument(
        "--only", action="append", default=[], metavar="K=V,V", help="leave these cells, may be repeated"
    )
    parser.add_argument("--data", action="append", default=[], metavar="NAME=PATH", help="where a data set lies")
    parser.add_argument("--out", type=Path, default=Path("runs/reproduce"), metavar="DIR", help="where runs go")
    parser.add_argument("--results", type=Path, metavar="DIR", help="further finished runs (default: results)")
    parser.add_argument("--device", default="auto", metavar="STR", help="cpu, cuda, ... (default: auto)")
    add_compile(parser)
    parser.add_argument("--json", action="store_true", help="print the result as one JSON document")


def run(options: argparse.Namespace) -> int:
    if options.action == "list":
        return _list(options)
    if not options.exhibits:
        raise UsageError(
            f"selfcon reproduce {options.action} wants to know which: T1, ..., F7, text, robustness, beyond or all."
        )
    from selfcon.errors import unknown_name
    from selfcon.paper.exhibits import SCALES

    if options.scale not in SCALES:
        raise unknown_name("scale", options.scale, SCALES)
    actions = {"show": _show, "plan": _plan, "run": _run, "compare": _compare}
    return actions[options.action](options)


def _named(options: argparse.Namespace) -> list[str]:
    """The exhibits that are meant, each of which there is."""
    from selfcon.paper.exhibits import get_exhibit, list_exhibits

    if not options.exhibits or "all" in options.exhibits:
        return list_exhibits()
    return [get_exhibit(name).name for name in options.exhibits]


def _list(options: argparse.Namespace) -> int:
    from selfcon.paper.exhibits import get_exhibit

    described = [get_exhibit(name).describe() for name in _named(options)]
    if options.json:
        print(json.dumps(described, indent=2))
        return 0
    for each in described:
        waits = f" (waits for {each['waits_for']})" if each["waits_for"] else ""
        waits += f" ({each['made_by']})" if each["made_by"] else ""
        print(f"{each['name']:12s}{each['cells']:4d} numbers  {each['title']}{waits}")
    return 0


def _show(options: argparse.Namespace) -> int:
    from selfcon.paper.exhibits import get_exhibit

    compared = _comparisons(options)
    if options.json:
        print_json({"cells": [each.to_dict() for each in compared]})
        return 0
    for name in _named(options):
        exhibit = get_exhibit(name)
        print(f"{name}: {exhibit.title} ({exhibit.section} of the paper)")
        if any(each.ours for each in compared if each.cell.exhibit == name):
            print(f"  ours, after the bar, at {_SCALES[options.scale]}")
        if name in ("F1", "F2"):
            _draw(name, options.out)
        elif not exhibit.cells:
            print(f"  a picture without numbers: {exhibit.made_by} draws it of your runs")
        for number in sorted({cell.part for cell in exhibit.cells}):
            _print_grid([each for each in compared if (each.cell.exhibit, each.cell.part) == (name, number)])
    return 0


def _print_grid(compared: list[Comparison]) -> None:
    if not compared:
        return
    cell = compared[0].cell
    what = (
        cell.quantity
        + (f", less that of {cell.minus}" if cell.minus else "")
        + (f" / {cell.over}'s" if cell.over else "")
    )
    columns = list(dict.fromkeys(each.cell.column for each in compared))
    rows: dict[str, list[Comparison]] = {}
    for each in compared:
        rows.setdefault(each.cell.row, []).append(each)
    cells = {(each.cell.row, each.cell.column): _text(each) for each in compared}
    widths = [max(len(column), *(len(cells.get((row, column), "")) for row in rows)) + 2 for column in columns]
    first = max(len(row) for row in rows) + 2
    print(f"  {what}{_common(compared)}")
    print("  " + " " * first + "".join(f"{column:>{width}s}" for column, width in zip(columns, widths, strict=True)))
    for row in rows:
        values = (f"{cells.get((row, column), ''):>{width}s}" for column, width in zip(columns, widths, strict=True))
        print(f"  {row:{first}s}" + "".join(values))


def _common(compared: list[Comparison]) -> str:
    """What all cells of a grid share and no heading says."""
    shown = " ".join(f"{each.cell.row} {each.cell.column}" for each in compared)
    conditions = [each.cell.condition for each in compared]
    same = {key: str(value) for key, value in conditions[0].items() if all(one.get(key) == value for one in conditions)}
    told = [value for value in same.values() if value not in shown]
    return f" ({', '.join(told)})" if told else ""


def _text(each: Comparison) -> str:
    return each.cell.text if each.verdict is None else f"{each.cell.text} | {each.verdict.shown_mean}"


def _print_compared(compared: list[Comparison]) -> None:
    """A line a number: where it stands, the paper's, ours, what that means and the folders it comes from."""
    if not compared:
        return
    lines = [("", "", "", "", "paper", "ours", "", "from")]
    for each in compared:
        cell, said = each.cell, each.to_dict()
        ours = each.verdict.shown_mean if each.verdict is not None else ""
        place = (cell.exhibit, cell.row, cell.column, cell.quantity)
        lines.append((*place, cell.text, ours, said["verdict"], ", ".join(sorted(set(said["folders"])))))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        words = (
            f"{word:>{width}s}" if place in (4, 5) else f"{word:{width}s}"
            for place, (word, width) in enumerate(zip(line, widths, strict=True))
            if width
        )
        print("  ".join(words).rstrip())


def _draw(name: str, out: Path) -> None:
    from selfcon.losses.methods import get_method
    from selfcon.report.drawings import draw_sets, print_sets

    methods = [
        get_method(each) for each in (("supcon", "selfcon") if name == "F1" else ("supcon-s", "selfcon", "selfcon-m"))
    ]
    path = out / f"{name}.png"
    try:
        out.mkdir(parents=True, exist_ok=True)
        path.write_bytes(draw_sets(methods))
    except OSError as error:
        raise StorageError(f"{path} cannot be written ({error.strerror}).") from error
    for method in methods:
        print(f"\n  {method.name}: o the anchor itself, + a positive, - a negative, . not looked at")
        print("\n".join(f"    {line}" for line in print_sets(method)))
    print(f"\n  drawn in {path}")


def _jobs(options: argparse.Namespace) -> list[Any]:
    from selfcon.workflows.reproduce import list_jobs, parse_data, select

    try:
        seeds = [int(seed) for seed in options.seeds.split(",")]
    except ValueError:
        raise UsageError(f"--seeds wants whole numbers such as 0,1,2, not {options.seeds!r}.") from None
    cells = select(_named(options), options.only)
    waiting = [cell.waits_for for cell in cells if cell.waits_for is not None]
    for tool in sorted(set(waiting)):
        say(f"{waiting.count(tool)} of {len(cells)} numbers wait for {tool}")
    made = [cell.made_by for cell in cells if cell.made_by is not None]
    for tool in sorted(set(made)):
        say(f"{made.count(tool)} of {len(cells)} numbers are not of training runs alone: `{tool}` measures them")
    jobs = list_jobs(cells, options.scale, seeds, parse_data(options.data))
    if not jobs:
        say(f"no training run belongs to {' '.join(options.exhibits)}; selfcon reproduce show tells what does")
    return jobs


def _plan(options: argparse.Namespace) -> int:
    from selfcon.workflows.reproduce import plan

    rows: list[dict[str, Any]] = []
    for job, cost in plan(_jobs(options), options.device):
        rows.append({"run": job.folder, "for": list(job.exhibits), "seconds": cost.seconds, "bytes": cost.peak_bytes})
        if not options.json:
            print(
                f"{job.folder:56s}{as_time(cost.seconds):>9s}{cost.peak_bytes / 1e9:8.1f} GB  {' '.join(job.exhibits)}"
            )
    total = sum(row["seconds"] for row in rows)
    if options.json:
        print_json({"runs": rows, "seconds": total})
    else:
        runs = "1 run" if len(rows) == 1 else f"{len(rows)} runs"
        print(f"{runs}, about {as_time(total)} in all on this machine, without compiling")
    return 0


def _run(options: argparse.Namespace) -> int:
    from selfcon.workflows.reproduce import run as run_jobs
    from selfcon.workflows.task import Running

    jobs = _jobs(options)
    failed = run_jobs(
        jobs, options.out / options.scale, Running.choose(device=options.device, compile=options.compile, log=())
    )
    if not options.json:
        same = " ".join(f"--data {pair}" for pair in options.data)
        words = (
            "selfcon reproduce compare",
            *options.exhibits,
            f"--scale {options.scale}",
            f"--out {options.out}",
            same,
        )
        next_step = f"; next: {' '.join(filter(None, words))}" if jobs and not failed else ""
        print(f"{len(jobs) - len(failed)} of {len(jobs)} runs are done{next_step}")
    else:
        print_json({"runs": len(jobs), "failed": {job.folder: str(error) for job, error in failed}})
    return failed[0][1].exit_code if failed else 0


def _folders(options: argparse.Namespace) -> list[Path]:
    """Where finished runs are looked for."""
    return [options.out / options.scale, options.results or Path("results")]


def _comparisons(options: argparse.Namespace) -> list[Comparison]:
    from selfcon.workflows.findings import find_costs
    from selfcon.workflows.reproduce import compare, find_runs, parse_data, select

    if options.results is not None and not options.results.is_dir():
        there = options.results.exists()
        hint = ", which is a file." if there else hint_path(options.results)
        raise InputMissingError(f"There is no folder {options.results}{hint}")
    folders = _folders(options)
    runs = find_runs(folders, parse_data(options.data))
    return compare(select(_named(options), options.only), options.scale, runs, find_costs([Path(), *folders]))


def _compare(options: argparse.Namespace) -> int:
    from selfcon.workflows.reproduce import compare_orders, describe_order

    if options.scale == "smoke":
        say(
            "note: runs of the scale smoke train on the digits for seconds, whatever the table is of; there is nothing "
            "to compare"
        )
    compared = _comparisons(options)
    orders = compare_orders(compared)
    if options.json:
        print_json({"cells": [each.to_dict() for each in compared], "orders": orders})
        return 0
    for name in dict.fromkeys(each.cell.exhibit for each in compared):
        _print_compared([each for each in compared if each.ours and each.cell.exhibit == name])
    for order in orders:
        what, paper, ours = describe_order(order)
        print(f"{order['exhibit']}: {what}\n    paper: {paper}\n    ours:  {ours}")
    missing = sum(not each.ours for each in compared)
    print(
        f"{len(compared) - missing} of {len(compared)} numbers are measured, those of training at scale "
        f"{options.scale}."
    )
    if missing == len(compared):
        print(f"None of the runs in {' or '.join(map(str, _folders(options)))} is one of them; --results names others.")
    return 0
