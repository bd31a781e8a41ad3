"""Claim: `selfcon predict` is no slower than a plain loop for single images, and faster for batches.

On the images of a folder: the model of a run, asked through `selfcon.load(RUN).stream`, beside what most scripts do
with the same network and image size (Pillow and torchvision's transforms image by image, batch by batch), alternating
in one process. A JSON line for each batch size.
    python benchmarks/predict_speed.py RUN FOLDER [--images 1000] [--batch-sizes 1,64]
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torchvision.transforms as tvt
from PIL import Image

import selfcon
from selfcon.networks.multi_exit import MultiExitNetwork
from selfcon.training.artifact import load_model
from selfcon.workflows.inference import find_images

ROUNDS = 3


def plain_loop(net: MultiExitNetwork, facts: dict[str, Any], files: list[Path], batch_size: int) -> Iterator[int]:
    size = facts["image_size"]
    shorter = round(size * 256 / 224) if facts.get("streamed") else size
    transform = tvt.Compose(
        [tvt.Resize(shorter), tvt.CenterCrop(size), tvt.ToTensor(), tvt.Normalize(facts["mean"], facts["std"])]
    )
    with torch.no_grad():
        for first in range(0, len(files), batch_size):
            part = files[first : first + batch_size]
            images = torch.stack([transform(Image.open(path).convert("RGB")) for path in part])
            logits = net(images).logits
            yield from torch.stack(list(logits.values())).mean(0).softmax(1).argmax(1).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--batch-sizes", default="1,64")
    options = parser.parse_args()
    files = list(itertools.islice(itertools.cycle(find_images([options.folder])), options.images))
    model = selfcon.load(options.run, "cpu")
    net, facts = load_model(options.run)
    for batch_size in map(int, options.batch_sizes.split(",")):
        times: dict[str, list[float]] = {"selfcon": [], "plain loop": []}
        agree = 0.0
        for _ in range(ROUNDS):
            start = time.perf_counter()
            ours = [answer.classes[0] for answer in model.stream(files, batch_size=batch_size)]  # type: ignore[union-attr]
            times["selfcon"].append(time.perf_counter() - start)
            start = time.perf_counter()
            theirs = [model.classes[guess] for guess in plain_loop(net, facts, files, batch_size)]
            times["plain loop"].append(time.perf_counter() - start)
            agree = sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(files)
        row = {name: round(len(files) / statistics.median(spent), 1) for name, spent in times.items()}
        ratios = [b / a for a, b in zip(times["selfcon"], times["plain loop"], strict=True)]
        print(
            json.dumps(
                {
                    "benchmark": "predict_speed",
                    "batch_size": batch_size,
                    "images_per_second": row,
                    "ratio": round(statistics.median(ratios), 2),
                    "same_answers": round(agree, 4),
                    "threads": torch.get_num_threads(),
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
