"""How far to believe a trained run, when to leave it early, and when it had better say nothing.

example: selfcon calibrate runs/birds
         selfcon calibrate runs/birds --within 0.5 --criterion margin --most-wrong 2 --outside cats/
"""

from __future__ import annotations

import argparse
from pathlib import Path

from selfcon.cli.parsing import Parser, print_json, seed


def add_arguments(parser: Parser) -> None:
    parser.add_argument("run", type=Path, help="the folder of a trained run with classifiers")
    parser.add_argument("--data", metavar="STR", help="held-out images (default: validation images, or half the test)")
    parser.add_argument(
        "--criterion", default="confidence", metavar="STR", help="confidence, margin, entropy or agreement"
    )
    parser.add_argument("--within", type=float, metavar="PERCENT", help="accuracy that early answers may cost (1)")
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
        chosen, whole, backbone = early["chosen"], early["alone"]["ensemble"], early["alone"]["backbone"]
        print(
            f"  leaving early: {chosen['accuracy']:.1f} % right for {100 * chosen['cost']:.0f} % of the multiply-adds "
            f"({100 * chosen['cost'] / backbone['cost']:.0f} % of the backbone's alone), "
            f"{chosen['milliseconds']:.2f} instead of {whole['milliseconds']:.2f} ms an image"
        )
        lost = result["answers"]["ensemble"]["top1"] - chosen["accuracy"]
        most = 1.0 if options.within is None else options.within
        if options.mean_cost is None and options.as_good_as is None and lost > most + 0.05:
            print(
                f"    that is {lost:.1f} below the ensemble here, where on the images that it was chosen on it was at "
                f"most {most:g}: more of those would tell better"
            )
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
