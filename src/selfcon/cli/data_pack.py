"""Decode a data set once into one file that opens at once.

example: selfcon data pack cifar100 cifar100.pack
         and --data cifar100.pack from then on
"""

from __future__ import annotations

import argparse
from pathlib import Path

from selfcon.cli.parsing import Parser, add_data_arguments, print_json
from selfcon.errors import UsageError


def add_arguments(parser: Parser) -> None:
    parser.add_argument("data", help="a name (digits, cifar100, ...), a folder or an .npz")
    parser.add_argument("out", type=Path, help="the file to write")
    add_data_arguments(parser)
    parser.add_argument(
        "--bad-images",
        default="error",
        metavar="HOW",
        help="error: stop at the first (default); skip: leave out up to 0.1 %%",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the file if it is there")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON document")


def run(options: argparse.Namespace) -> int:
    import selfcon.data

    if options.out.suffix.lower() == ".npz":
        raise UsageError(f"{options.out} would be taken for an .npz: choose another ending, such as .pack.")
    if options.out.exists() and not options.overwrite:
        raise UsageError(f"{options.out} is already there: choose another name, or replace it with --overwrite.")
    source = selfcon.data.load(
        options.data,
        root=options.data_root,
        class_list=options.class_list,
        seed=options.seed,
        download=options.download,
        bad_images=options.bad_images,
    )
    selfcon.data.pack(source, options.out)
    images = {split: len(images) for split, images in source.splits().items()}
    size = options.out.stat().st_size
    if options.json:
        print_json({"file": str(options.out), "bytes": size, "classes": len(source.classes), "images": images})
    else:
        counts = " and ".join(f"{count:,} {split}" for split, count in images.items())
        print(f"Packed {counts} images of {len(source.classes)} classes into {options.out} ({size / 1e6:,.1f} MB).")
        print(f"Use it as: --data {options.out}")
    return 0
