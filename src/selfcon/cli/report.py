"""One page to share, about one run or many.

example: selfcon report runs/birds
         selfcon report runs/* --out compare.html
         selfcon report runs/birds --watch
         selfcon report runs/* --json
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from selfcon.cli.parsing import Parser, print_json
from selfcon.cli.results import print_table
from selfcon.errors import printable

if TYPE_CHECKING:
    from selfcon.report.page import RunPage

_USUAL = 10.0


def add_arguments(parser: Parser) -> None:
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs, done or under way")
    parser.add_argument("--out", type=Path, metavar="FILE", help="(default: RUN/report.html, of many report.html)")
    parser.add_argument(
        "--watch",
        type=float,
        nargs="?",
        const=_USUAL,
        metavar="SECONDS",
        help=f"write it again every {_USUAL:.0f} seconds until all runs are done; an open page follows",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the tables of runs and of seeds as one JSON document"
    )


def run(options: argparse.Namespace) -> int:
    from selfcon.report.page import compare_runs, tabulate_runs, tabulate_seeds
    from selfcon.report.seeds import group_by_seed
    from selfcon.workflows.reporting import write_report

    told: list[Path] = []

    def tell(path: Path, pages: Sequence[RunPage]) -> None:
        if not told and options.json:
            table = tabulate_runs(pages)
            rows = (dict(zip(table.header, row, strict=True)) for row in table.rows)
            runs = [
                {name: page.settings.get(name, value) for name, value in row.items()}
                for row, page in zip(rows, pages, strict=True)
            ]
            print_json({"report": str(path), "runs": runs, "seeds": [each.to_dict() for each in group_by_seed(pages)]})
        elif not told:
            if len(pages) > 1:
                table, same = compare_runs(pages)
                print_table(table.header, table.as_text())
                print(f"The same in all runs: {printable(same)}.\n" if same else "")
            if seeds := tabulate_seeds(pages):
                print_table(seeds.header, seeds.as_text())
                print()
            print(f"Report: {path}", flush=True)
        told.append(path)

    write_report(options.runs, out=options.out, watch=options.watch, after_each=tell)
    return 0
