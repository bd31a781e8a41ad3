"""Read every image of a data set; show classes, counts, sizes and what is wrong; draw a contact sheet.

example: selfcon data check my-birds
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from selfcon.cli.parsing import Parser, add_data_arguments, print_json
from selfcon.errors import printable

if TYPE_CHECKING:
    from selfcon.data import Audit

_MOST_SHOWN = 20


def add_arguments(parser: Parser) -> None:
    parser.add_argument("data", help="a name (digits, cifar100, ...), a folder, an .npz or a packed file")
    add_data_arguments(parser)
    parser.add_argument("--sheet", type=Path, metavar="FILE", help="the contact sheet (default: NAME-sheet.png)")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON document")


def run(options: argparse.Namespace) -> int:
    import selfcon.data

    audit, source = selfcon.data.check(
        options.data,
        root=options.data_root,
        class_list=options.class_list,
        seed=options.seed,
        download=options.download,
    )
    sheet = options.sheet or Path(f"{_file_name(source.name)}-sheet.png")
    if options.json:
        print_json(audit.to_dict() | {"sheet": str(sheet)})
    else:
        print("\n".join(map(printable, _lines(audit))))
    selfcon.data.draw_contact_sheet(source, sheet)
    if not options.json:
        print(printable(f"Contact sheet: {sheet}"))
    return audit.exit_code


def _lines(audit: Audit) -> list[str]:
    lines = [f"{audit.name}: {len(audit.classes)} {'class' if len(audit.classes) == 1 else 'classes'}"]
    for split, count in audit.images.items():
        (low_name, low), (high_name, high) = audit.smallest_class[split], audit.largest_class[split]
        span = f"{low:,} of each class" if low == high else f"{low:,} ({low_name}) to {high:,} ({high_name}) of a class"
        lines.append(f"  {split:6s}{count:9,} images, {span}")
    if audit.sizes:
        common, (narrow, wide), (flat, high) = (audit.sizes[key] for key in ("most_common", "width", "height"))
        size = f"{common['width']} x {common['height']}"
        if audit.sizes["different"] == 1:
            lines.append(f"  all of {size} pixels")
        else:
            lines.append(
                f"  {audit.sizes['different']:,} sizes: {narrow} to {wide} wide, {flat} to {high} high; "
                f"most often {size} ({common['images']:,})"
            )
    lines += [f"  wrong: {sentence}" for sentence in audit.problems]
    lines += [f"  note: {sentence}" for sentence in [*audit.notes, *audit.warnings]]
    lines += [f"    {sentence}" for sentence in audit.unreadable[:_MOST_SHOWN]]
    if len(audit.unreadable) > _MOST_SHOWN:
        lines.append(f"    and {len(audit.unreadable) - _MOST_SHOWN} more: --json lists them all")
    lines.append("This data set cannot be used as it is." if audit.problems else "This data set can be used.")
    return lines


def _file_name(name: str) -> str:
    """A name without what a path could trip over."""
    return "".join(letter if letter.isalnum() or letter in "-_. " else "_" for letter in name).strip(". ") or "data"
