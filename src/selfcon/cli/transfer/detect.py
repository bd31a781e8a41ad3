"""Object detection on a run's encoder: RetinaNet trained on Pascal VOC or COCO, measured by mAP.

example: selfcon transfer detect runs/imagenette --data /data/VOCdevkit/VOC2007
"""

from __future__ import annotations

import argparse
from pathlib import Path

from selfcon.cli.parsing import Parser, print_json


def add_arguments(parser: Parser) -> None:
    parser.add_argument("run", type=Path, help="the folder of a trained run")
    parser.add_argument("--data", required=True, metavar="DIR", help="VOCdevkit, VOC2012 or VOC2007, or COCO's folder")
    parser.add_argument("--image-size", type=int, default=384, metavar="INT", help="of the longer side (default: 384)")
    parser.add_argument("--epochs", type=int, default=30, help="(default: 30)")
    parser.add_argument("--batch-size", type=int, default=8, help="(default: 8)")
    parser.add_argument("--lr", type=float, default=2e-4, help="of AdamW (default: 0.0002)")
    parser.add_argument("--random", action="store_true", help="the run's network with fresh weights, for comparison")
    parser.add_argument("--skip-broken", action="store_true", help="leave out what is wrong instead of stopping")
    parser.add_argument("--seed", type=int, default=0, help="(default: 0)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="(default: RUN/transfer/detect-DATA-...)")
    parser.add_argument("--overwrite", action="store_true", help="start anew in a folder that holds another run")
    parser.add_argument("--device", default="auto", metavar="STR", help="cpu, cuda, ... (default: auto)")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON document")


def run(options: argparse.Namespace) -> int:
    from selfcon.workflows import transfer

    result = transfer.detect(
        options.run,
        data=options.data,
        image_size=options.image_size,
        epochs=options.epochs,
        batch_size=options.batch_size,
        lr=options.lr,
        random=options.random,
        skip_broken=options.skip_broken,
        seed=options.seed,
        out=options.out,
        overwrite=options.overwrite,
        device=options.device,
    )
    if options.json:
        print_json(result)
        return 0
    numbers = f"mAP {result['map']:.1f} %, at IoU 0.5 {result['map50']:.1f} %"
    print(f"{result['encoder']} ({result['method']}) on {result['data']}: {numbers}")
    print(f"predictions drawn in {Path(result['out']) / 'predictions.png'}")
    return 0
