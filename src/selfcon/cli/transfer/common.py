"""Options that several verbs of `selfcon transfer` take."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from selfcon.cli.parsing import Parser, seed


def add_encoder(parser: Parser) -> None:
    """Whose encoder it is about."""
    parser.add_argument("run", metavar="ENCODER", help="the folder of a trained run, or timm:NAME=FILE for its weights")
    parser.add_argument("--random", action="store_true", help="its network with fresh weights, for comparison")
    parser.add_argument("--trust", action="store_true", help="read weights that are no safetensors file")


def add_output(parser: Parser, usual: str) -> None:
    """Where it runs and where results go."""
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"(default: {usual})")
    parser.add_argument("--device", default="auto", metavar="STR", help="cpu, cuda, ... (default: auto)")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON document")


def add_training(parser: Parser, *, epochs: int, batch_size: int) -> None:
    """How long networks are trained."""
    parser.add_argument("--epochs", type=int, default=epochs, help=f"of training (default: {epochs})")
    parser.add_argument("--batch-size", type=int, default=batch_size, help=f"of training (default: {batch_size})")
    parser.add_argument("--overwrite", action="store_true", help="start anew in a folder that holds another run")


def add_scenes(parser: Parser, task: str, *, sides: str, image_size: int, epochs: int, lr: float) -> None:
    """All that training on scenes can be told."""
    add_encoder(parser)
    parser.add_argument("--data", required=True, metavar="DIR", help="VOCdevkit, VOC2012 or VOC2007, or COCO's folder")
    parser.add_argument(
        "--image-size", type=int, default=image_size, metavar="INT", help=f"of {sides} (default: {image_size})"
    )
    add_training(parser, epochs=epochs, batch_size=8)
    parser.add_argument("--lr", type=float, default=lr, help=f"of AdamW (default: {lr:g})")
    parser.add_argument("--skip-broken", action="store_true", help="leave out what is wrong instead of stopping")
    parser.add_argument("--seed", type=seed, default=0, help="(default: 0)")
    add_output(parser, f"RUN/transfer/{task}-DATA-...")


def told(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Those options as arguments of a function."""
    return {name: getattr(options, name) for name in names}


SCENES = ("data", "image_size", "epochs", "batch_size", "lr", "random", "skip_broken", "seed")
WHERE = ("out", "device")
