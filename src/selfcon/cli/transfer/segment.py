"""Semantic segmentation on a run's encoder: DeepLabV3+ trained on Pascal VOC or COCO, measured by mIoU.

example: selfcon transfer segment runs/imagenette --data /data/VOCdevkit/VOC2012
"""

from __future__ import annotations

import argparse
from pathlib import Path

from selfcon.cli.parsing import Parser, print_json
from selfcon.cli.transfer.common import SCENES, WHERE, add_scenes, told


def add_arguments(parser: Parser) -> None:
    add_scenes(parser, "segment", sides="crops", image_size=256, epochs=50, lr=5e-4)


def run(options: argparse.Namespace) -> int:
    from selfcon.workflows import scenes

    result = scenes.segment(options.run, **told(options, *SCENES, *WHERE, "overwrite", "trust"))
    if options.json:
        print_json(result)
        return 0
    print(f"{result['encoder']} ({result['method']}) on {result['data']}: mIoU {result['miou']:.1f} %")
    best = sorted(result["iou"].items(), key=lambda item: -item[1])[:5]
    print("  " + ", ".join(f"{name} {value:.0f}" for name, value in best))
    print(f"predictions drawn in {Path(result['out']) / 'predictions.png'}")
    return 0
