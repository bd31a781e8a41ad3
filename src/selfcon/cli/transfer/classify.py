"""What a run's encoder is worth on other classes: linear evaluation, nearest neighbours, full fine-tuning.

example: selfcon transfer classify runs/imagenette --data cub --data-root /data
         selfcon transfer classify runs/imagenette --data my-birds --modes linear,knn,finetune
"""

from __future__ import annotations

import argparse

from selfcon.cli.parsing import Parser, listed, print_json, seed
from selfcon.cli.transfer.common import WHERE, add_encoder, add_output, add_training, told


def add_arguments(parser: Parser) -> None:
    add_encoder(parser)
    parser.add_argument("--data", required=True, metavar="STR", help="a folder, a file or a name (cub, ...)")
    parser.add_argument("--data-root", default="data", metavar="DIR", help="where named data sets lie (default: data)")
    parser.add_argument(
        "--modes", type=listed, default=["linear", "knn"], metavar="LIST", help="of linear, knn, finetune (linear,knn)"
    )
    parser.add_argument("--image-size", type=int, metavar="INT", help="(default: the run's)")
    add_training(parser, epochs=30, batch_size=64)
    parser.add_argument("--k", type=int, default=20, help="neighbours (default: 20)")
    parser.add_argument("--seed", type=seed, default=0, help="of what is held out (default: 0)")
    add_output(parser, "RUN/transfer/classify-DATA-SEED")


def run(options: argparse.Namespace) -> int:
    from selfcon.workflows import transfer

    features = ("data", "data_root", "modes", "random", "image_size", "k", "seed", "trust")
    result = transfer.classify(options.run, **told(options, *features, "epochs", "batch_size", "overwrite", *WHERE))
    if options.json:
        print_json(result)
        return 0
    metric = result["metric"]
    print(f"{result['encoder']} ({result['method']}) on {result['data']}, {metric.replace('_', ' ')} in %:")
    for mode in options.modes:
        values = (f"{name} {each[metric]:.1f}" for name, each in result[mode]["accuracy"].items())
        print(f"  {mode:10s}{', '.join(values)}")
    print(f"written to {result['out']}")
    return 0
