"""How far to believe a trained run, when to leave it early, and when it had better say nothing.

example: selfcon calibrate runs/birds
         selfcon calibrate runs/birds --within 0.5 --criterion margin --most-wrong 2 --outside cats/
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from selfcon.cli.parsing import Parser, print_json, seed


def add_arguments(parser: Parser) -> None:
    parser.add_argument("run", type=Path, help="the folder of a trained run with classifiers")
    parser.add_argument("--data", metavar="STR", help="held-out images (default: validation images, or half the test)")
    parser.add_argument(
        "--criterion", default="confidence", metavar="STR", help="confidence, margin, entropy or agreement"
    )
    parser.add_argument(
        "--within", type=float, metavar="PERCENT", help="accuracy that early exit may cost (default: 1, if worth it)"
    )
    parser.add_argument("--mean-cost", type=float, metavar="PART", help="instead: of the whole network's multiply-adds")
    parser.add_argument("--as-good-as", metavar="EXIT", help="instead: cheapest of at least its accuracy (backbone)")
    parser.add_argument("--most-wrong", type=float, metavar="PERCENT", help="of answers; others are kept back")
    parser.add_argument("--outside", metavar="STR", help="images of something else, to see them told apart")
    parser.add_argument("--strangers", default="neighbours", metavar="STR", help="neighbours or mahalanobis")
    parser.add_argument("--batch-size", type=int, default=64, help="of the times measured (default: 64)")
    parser.add_argument("--seed", type=seed, default=0, help="of what is held out (default: 0)")
    parser.add_argument("--device", default="auto", metavar="STR", help="cpu, cuda, ... (default: auto)")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON document")


def run(options: argparse.Namespace) -> int:
    from selfcon.workflows import calibrating

    asked = {name: value for name, value in vars(options).items() if name not in ("run", "json")}
    result = calibrating.calibrate(options.run, **asked)
    if options.json:
        print_json(result)
        return 0
    held = result["held_out"]
    chosen, measured = f"{held['chosen_on']} ({held['images']:,})", f"{held['told_of']} ({held['told_images']:,})"
    print(f"chosen on {chosen}, measured on {measured}:")
    for name, answer in result["answers"].items():
        if answer["temperature"] == 1:
            error = f"{answer['ece']:.1f} %, left as it is: no temperature helped on the images it was chosen on"
        else:
            change = f"{answer['ece_before']:.1f} -> {answer['ece']:.1f} %"
            error = f"{change} at temperature {answer['temperature']:.2f}"
        print(f"  {name:12s}{answer['top1']:5.1f} % right, calibration error {error}")
    if early := result.get("early_exit"):
        print("\n".join(f"  {line}" for line in _describe_early_exit(early)))
    for name, each in result.get("silence", {}).get("answers", {}).items():
        print(f"  {name}: {each['answered']:.1f} % are answered, {each['wrong']:.1f} % of the answers are wrong")
    for name, each in result["strangers"]["exits"].items():
        if "auroc" in each:
            print(
                f"  strange images by {name}: AUROC {each['auroc']:.1f} %, called strange are "
                f"{each['outside_called_strange']:.1f} % of them and {each['called_strange']:.1f} % of the run's own"
            )
    if (unknown := result.get("silence", {}).get("outside_unknown")) is not None:
        print(f"  strange images by all exits: {unknown:.1f} % are `unknown`, being strange or too unsure")
    print("pictures: " + ", ".join(result["files"]))
    return 0


def _describe_early_exit(early: Mapping[str, Any]) -> list[str]:
    """Return the lines about early exit, next to the backbone alone."""
    chosen, held, alone = early["chosen"], early["held_out"], early["alone"]
    backbone, before = alone["backbone"], early["held_out_accuracy"]
    if not early["stored"]:
        other = early["compared_with"]
        share = "" if other == "backbone" else f" for {100 * alone[other]['cost'] / backbone['cost']:.0f} %"
        return [
            f"early exit is not worth it for this model: {held['accuracy']:.1f} % correct for "
            f"{100 * held['cost'] / backbone['cost']:.0f} % of the backbone's MACs on the validation images, where the "
            f"{other} alone is {before[other]:.1f} % correct{share}",
            "  No thresholds were stored. Use --within, --mean-cost or --as-good-as to store some anyway.",
        ]
    lines = [
        f"early exit: {_show(chosen)}, {100 * chosen['cost'] / backbone['cost']:.0f} % of the backbone's MACs",
        f"  (backbone alone {_show(backbone)}; ensemble {_show(alone['ensemble'])})",
    ]
    lost, expected = alone["ensemble"]["accuracy"] - chosen["accuracy"], before["ensemble"] - held["accuracy"]
    if "within" in early["target"] and lost > max(early["target"]["within"], expected) + 0.05:
        lines.append(
            f"  That is {lost:.1f} points below the ensemble, but {max(expected, 0):.1f} on the validation images. "
            f"Hold out more images for a better choice."
        )
    return lines


def _show(each: Mapping[str, float]) -> str:
    return f"{each['accuracy']:.1f} % correct, {each['milliseconds']:.2f} ms per image"
