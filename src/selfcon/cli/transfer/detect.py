"""Object detection on a run's encoder: RetinaNet trained on Pascal VOC or COCO, measured by mAP.

example: selfcon transfer detect runs/imagenette --data /data/VOCdevkit/VOC2007
"""

from __future__ import annotations

import argparse
from pathlib import Path

from selfcon.cli.parsing import Parser, print_json
from selfcon.cli.transfer.common import SCENES, WHERE, add_scenes, told


def add_arguments(parser: Parser) -> None:
    add_scenes(parser, "detect", sides="the longer side", image_size=384, epochs=30, lr=2e-4)


def run(options: argparse.Namespace) -> int:
    from selfcon.workflows import scenes

    result = scenes.detect(options.run, **told(options, *SCENES, *WHERE, "overwrite", "trust"))
    if options.json:
        print_json(result)
        return 0
    numbers = f"mAP {result['map']:.1f} %, at IoU 0.5 {result['map50']:.1f} %"
    print(f"{result['encoder']} ({result['method']}) on {result['data']}: {numbers}")
    print(f"predictions drawn in {Path(result['out']) / 'predictions.png'}")
    return 0
