"""What a run's encoder is worth on other classes: linear evaluation, nearest neighbours, full fine-tuning.

example: selfcon transfer classify runs/imagenette --data cub --data-root /data
         selfcon transfer classify runs/imagenette --data my-birds --modes linear,knn,finetune
"""

from __future__ import annotations

import argparse
from pathlib import Path

from selfcon.cli.parsing import Parser, listed, print_json


def add_arguments(parser: Parser) -> None:
    parser.add_argument("run", type=Path, help="the folder of a trained run")
    parser.add_argument("--data", required=True, metavar="STR", help="a folder, a file or a name (cub, ...)")
    parser.add_argument("--data-root", default="data", metavar="DIR", help="where named data sets lie (default: data)")
    parser.add_argument(
        "--modes", type=listed, default=["linear", "knn"], metavar="LIST", help="of linear, knn, finetune (linear,knn)"
    )
    parser.add_argument("--random", action="store_true", help="the run's network with fresh weights, for comparison")
    parser.add_argument("--image-size", type=int, metavar="INT", help="(default: the run's)")
    parser.add_argument("--epochs", type=int, default=30, help="of fine-tuning (default: 30)")
    parser.add_argument("--batch-size", type=int, default=64, help="of fine-tuning (default: 64)")
    parser.add_argument("--k", type=int, default=20, help="neighbours (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="of what is held out (default: 0)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="(default: RUN/transfer/DATA-SEED)")
    parser.add_argument("--device", default="auto", metavar="STR", help="cpu, cuda, ... (default: auto)")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON document")


def run(options: argparse.Namespace) -> int:
    from selfcon.workflows import transfer

    result = transfer.classify(
        options.run,
        data=options.data,
        data_root=options.data_root,
        modes=options.modes,
        random=options.random,
        image_size=options.image_size,
        epochs=options.epochs,
        batch_size=options.batch_size,
        k=options.k,
        seed=options.seed,
        out=options.out,
        device=options.device,
    )
    if options.json:
        print_json(result)
        return 0
    metric = result["metric"]
    print(f"{result['encoder']} ({result['method']}) on {result['data']}, {metric.replace('_', ' ')} in %:")
    for mode in options.modes:
        key = metric if mode != "finetune" else "top1"
        values = (f"{name} {each[key]:.1f}" for name, each in result[mode]["accuracy"].items())
        print(f"  {mode:10s}{', '.join(values)}")
    print(f"written to {result['out']}")
    return 0
