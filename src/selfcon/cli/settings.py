"""Options of the verbs that train: the common settings as short flags, every other one by its dotted name."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

from selfcon.cli.meanings import MEANINGS
from selfcon.cli.parsing import Parser
from selfcon.errors import UsageError, unknown_name

FLAGS = {
    # flag: (setting, type, what --help says)
    "--data": ("data", str, "name, folder, .npz or packed file"),
    "--data-root": ("data_root", str, "where named data sets lie"),
    "--val-fraction": ("val_fraction", float, "share of train held out for choices"),
    "--bad-images": ("bad_images", str, "error, or skip up to 0.1 %%"),
    "--image-size": ("image_size", int, "side in pixels (default: what all images have)"),
    "--model": ("model", str, "a network of selfcon or timm (default: resnet18)"),
    "--width": ("width", float, "share of its channels (default: 1.0)"),
    "--init": ("weights", str, "weights to begin with: a file, a run, or timm"),
    "--exits": ("exits", str, "such as 1:fc,2:same (default: 2:fc)"),
    "--method": ("method", str, "supcon, ce, ... (default: selfcon)"),
    "--epochs": ("epochs", int, "times through the training images (default: 100)"),
    "--batch-size": ("batch_size", int, "images in a step (default: 256)"),
    "--micro-batch": ("micro_batch", int, "samples in the network at a time"),
    "--lr": ("lr", float, "learning rate (default: what suits optimiser and batch)"),
    "--seed": ("seed", int, "or several, 0,1,2: a run for each (default: 0)"),
}

_MEANT = {
    "arch": "--model",
    "augmentation": "--augment.policy",
    "backbone": "--model",
    "config": "--recipe",
    "dataset": "--data",
    "learning_rate": "--lr",
    "momentum": "--optim.momentum",
    "network": "--model",
    "optimizer": "--optim.name",
    "output": "--out",
    "pretrained": "--init",
    "temperature": "--loss.temperature",
    "weight_decay": "--optim.weight_decay",
    "weights": "--init",
}
"""What others call some of them."""


def add_settings(parser: Parser) -> None:
    """The common flags, short enough for a screen."""
    for flag, (setting, kind, text) in FLAGS.items():
        parser.add_argument(flag, dest=setting, metavar=kind.__name__.upper(), default=None, help=text)
    parser.add_argument(
        "--recipe", metavar="NAME", help="defaults of an experiment of the paper or of ours, or a FILE.yaml"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="the run folder (default: runs/DATA-MODEL-METHOD)")
    parser.add_argument("--overwrite", action="store_true", help="start anew in that folder")
    add_running(parser)
    add_compile(parser)
    parser.add_argument("--deterministic", action="store_true", help="the same bits each time on this machine")
    parser.add_argument("--trust", action="store_true", help="let --init be a pickle (.pth); its code is not run")
    parser.add_argument("--help-all", action="store_true", help="every setting, and with --recipe its value there")


def add_running(parser: Parser) -> None:
    """What every verb takes that runs a network."""
    parser.add_argument("--device", default="auto", metavar="STR", help="cpu, cuda, cuda:1, ... (default: auto)")
    parser.add_argument("--log", default="", metavar="STR", help="tensorboard, wandb")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON document")


def add_compile(parser: Parser) -> None:
    """For verbs that train."""
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="compile the step on a GPU (default: if the stage is long)",
    )


def read_settings(options: argparse.Namespace, unknown: list[str]) -> tuple[dict[str, Any], list[str]]:
    """The settings that were given, by dotted name, and what is wrong with how; their values are not looked at yet."""
    from selfcon.config import NAMES

    given: dict[str, Any] = {}
    wrong: list[str] = []
    for setting, kind, _ in FLAGS.values():
        text = getattr(options, setting)
        if text is not None:
            given[setting] = text if kind is str else parse_value(text)
    known = {*map(flag_of, NAMES), *FLAGS, *(f"--{name.replace('_', '-')}" for name in vars(options) if name != "run")}
    words = list(unknown)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            hint = "." if "data" in given else f"; did you mean --data {word}?"
            wrong.append(f"No option takes the word {word!r}{hint}")
            continue
        written, equals, value = word.removeprefix("--").partition("=")
        name = written.replace("-", "_")
        if name not in NAMES and not name.startswith("model_options."):
            error = unknown_name("option", f"--{written}", known)
            if name in _MEANT:
                error = UsageError(f"Unknown option '--{written}'; did you mean {_MEANT[name]!r}?")
            wrong.append(str(error))
            if not equals and words and not words[0].startswith("--"):
                words.pop(0)  # what was meant as its value
            continue
        if not equals:
            if not words:
                wrong.append(f"--{written} needs a value.")
                continue
            value = words.pop(0)
        given[name] = parse_value(value)
    return given, wrong


def parse_value(text: str) -> Any:
    """A value as YAML would read it, and 0.5,1.0 as the list that it is meant to be; everything else is text."""
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError):  # such as a date that is none
        return text
    if not isinstance(value, str):
        return value
    parts = [_parse_number(part) for part in value.split(",")]
    if None in parts:
        return value
    return parts if len(parts) > 1 else parts[0]


def _parse_number(text: str) -> float | int | None:
    for kind in (int, float):  # YAML wants a dot in 1e-4
        try:
            return kind(text)
        except ValueError:
            continue
    return None


def show_all_settings(recipe: str | None = None, *, data: str | None = None) -> None:
    """Every setting with its default, or what a recipe makes of it; some data have a recipe of their own."""
    from selfcon.config import Settings, choices_of_settings, flatten
    from selfcon.workflows.settings import DEFAULT_RECIPE, collect_settings

    chosen, choices = Settings(), choices_of_settings()
    if recipe is None and data == DEFAULT_RECIPE:
        recipe = DEFAULT_RECIPE
    if recipe is not None:
        chosen = collect_settings(recipe, {})
    for name, value in flatten(chosen.model_dump(mode="json")).items():
        among = f" ({', '.join(choices[name])})" if name in choices else ""
        text = MEANINGS.get(name, "an option of the network") + among
        sys.stdout.write(f"  {flag_of(name):32s}{value!s:12s}  {text}\n")


def flag_of(setting: str) -> str:
    """How a setting is written on the command line."""
    if setting == "weights":
        return "--init"
    return f"--{setting}" if "." in setting else f"--{setting.replace('_', '-')}"
