"""Claim: leaving early saves time, not only multiply-adds.

A calibrated and exported run (`selfcon calibrate --within 1`, `selfcon export --formats onnx,stages`) on its own test
images by onnxruntime on the CPU: model.onnx, which computes every exit, beside the stages with the stored rule, one by
one and in batches; and both in PyTorch on the run's device. A JSON line each.
    python benchmarks/early_exit.py RUN [--images 2000] [--batch-sizes 1,64] [--threads 2]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime as ort
import torch

import selfcon
from selfcon.report.plots import spread
from selfcon.workflows.trained import open_run

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from onnx_early_exit import Stages

Answer = Callable[[np.ndarray], np.ndarray]


def measure(answer: Answer, images: np.ndarray, labels: np.ndarray, batch_size: int) -> dict[str, float]:
    """Milliseconds an image, the best of three rounds, and percent right."""
    batches = np.array_split(images, range(batch_size, len(images), batch_size))
    for batch in batches[:3]:
        answer(batch)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        answers = [answer(batch) for batch in batches]
        times.append(time.perf_counter() - start)
    right = np.concatenate(answers).argmax(1) == labels
    return {"milliseconds": 1000 * min(times) / len(images), "top1": 100 * float(right.mean())}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--batch-sizes", default="1,64")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    run = open_run(options.run, "auto")
    data = run.split("test")
    some = spread(len(data), options.images)
    images = data.pictures(some).numpy().astype(np.float32) / 255
    labels = data.labels.cpu().numpy()[some.numpy()]

    told = ort.SessionOptions()
    told.intra_op_num_threads = options.threads
    whole = ort.InferenceSession(options.run / "export" / "model.onnx", told)
    names = [output.name for output in whole.get_outputs()]
    backbone = names[next(place for place, name in enumerate(names) if "backbone" in name)]
    stages = Stages(options.run / "export", told)
    model = selfcon.load(options.run, str(run.device))
    mean, std = (torch.tensor(run.facts[key], device=run.device)[:, None, None] for key in ("mean", "std"))

    def by_torch(leave: str) -> Answer:
        rule = model.trust.rule_for(None) if leave == "early" else None

        def answer(batch: np.ndarray) -> np.ndarray:
            seen = (torch.from_numpy(batch).to(run.device) - mean) / std
            found: np.ndarray = model.answer(seen, leave, rule).probabilities.cpu().numpy()
            return found

        return answer

    ways: dict[str, Answer] = {
        "onnxruntime, backbone": lambda batch: whole.run([backbone], {whole.get_inputs()[0].name: batch})[0],
        "onnxruntime, stages, leaving early": lambda batch: stages.answer(batch)[0],
        f"PyTorch on {run.device.type}, backbone": by_torch("backbone"),
        f"PyTorch on {run.device.type}, leaving early": by_torch("early"),
    }
    for batch_size in map(int, options.batch_sizes.split(",")):
        for name, answer in ways.items():
            row = {"benchmark": "early_exit", "way": name, "batch_size": batch_size, "images": len(images)}
            print(json.dumps({**row, **measure(answer, images, labels, batch_size)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
