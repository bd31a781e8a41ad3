"""Decode a data set once into one file that opens at once, or write it as WebDataset's tar files.

example: selfcon data pack cifar100 cifar100.pack, and --data cifar100.pack from then on
         selfcon data pack imagenet imagenet.pack --data-root /data --max-side 256
         selfcon data pack photos photos-shards --shards 10000
"""

from __future__ import annotations

import argparse
from pathlib import Path

from selfcon.cli.parsing import Parser, add_data_arguments, print_json
from selfcon.errors import UsageError


def add_arguments(parser: Parser) -> None:
    parser.add_argument("data", help="a name (digits, cifar100, ...), a folder or an .npz")
    parser.add_argument("out", type=Path, help="the file to write; with --shards, the folder")
    parser.add_argument("--max-side", type=int, metavar="PIXELS", help="make images small whose longer side is more")
    parser.add_argument(
        "--encoded", action="store_true", help="keep JPEG files as they are: smaller, and decoded when read"
    )
    parser.add_argument("--shards", type=int, metavar="IMAGES", help="tar files of so many images each")
    add_data_arguments(parser)
    parser.add_argument(
        "--bad-images",
        default="error",
        metavar="HOW",
        help="error: stop at the first (default); skip up to 0.1 %%",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the file if it is there (not a folder)")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON document")


def run(options: argparse.Namespace) -> int:
    import selfcon.data

    if options.shards is not None and options.overwrite:
        raise UsageError("--overwrite replaces a file, never a folder: choose another name for the shards.")
    if options.shards is not None and (options.max_side is not None or options.encoded):
        raise UsageError("--max-side and --encoded are for one packed file, not for --shards.")
    if options.out.suffix.lower() == ".npz":
        raise UsageError(f"{options.out} would be taken for an .npz: choose another ending, such as .pack.")
    if options.shards is None and options.out.exists() and not options.overwrite:
        raise UsageError(f"{options.out} is already there: choose another name, or replace it with --overwrite.")
    source = selfcon.data.load(
        options.data,
        root=options.data_root,
        class_list=options.class_list,
        seed=options.seed,
        download=options.download,
        bad_images=options.bad_images,
    )
    if options.shards is None:
        files = [selfcon.data.pack(source, options.out, max_side=options.max_side, encoded=options.encoded)]
    else:
        files = sorted(selfcon.data.write_shards(source, options.out, options.shards).glob("*.tar"))
    images = {split: len(images) for split, images in source.splits().items()}
    size = sum(file.stat().st_size for file in files)
    if options.json:
        print_json(
            {
                "file": str(options.out),
                "files": len(files),
                "bytes": size,
                "classes": len(source.classes),
                "images": images,
            }
        )
    else:
        counts = " and ".join(f"{count:,} {split}" for split, count in images.items())
        where = options.out if options.shards is None else f"{len(files)} tar files in {options.out}"
        print(f"Packed {counts} images of {len(source.classes)} classes into {where} ({size / 1e6:,.1f} MB).")
        print(f"Use it as: --data {options.out}")
    return 0
