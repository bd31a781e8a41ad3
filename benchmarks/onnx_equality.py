"""Claim: exported models give the answers of the model, every exit, in any batch.

For each of the named networks at full width, with an exit: model.onnx and the stages, run by onnxruntime on images of a
data set one by one and in batches of 64, beside PyTorch. A JSON line a network: the largest difference of a logit, as a
part of the largest logit, and how often the likeliest class is the same.
    python benchmarks/onnx_equality.py DATA [--images 1000] [--image-size 32] [--models resnet18,...]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch

import selfcon
from selfcon.data.resident import make_resident
from selfcon.deploy.export import export_onnx, export_stages
from selfcon.deploy.trust import Trust

EXITS = {"vgg16_bn": 3}


def differ(found: np.ndarray, expected: torch.Tensor) -> tuple[float, float]:
    scale = max(1.0, float(expected.abs().max()))
    same = float((found.argmax(1) == expected.argmax(1).numpy()).mean())
    return float(np.abs(found - expected.numpy()).max()) / scale, same


def run_stages(folder: Path, images: np.ndarray) -> list[np.ndarray]:
    logits, x = [], images
    for name in json.loads((folder / "stages.json").read_text(encoding="utf-8"))["stages"]:
        session = ort.InferenceSession(folder / name)
        *left, answer = session.run(None, {session.get_inputs()[0].name: x})
        logits.append(answer)
        x = left[0] if left else x
    return logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data")
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--image-size", type=int, default=32)
    parser.add_argument("--models", default=",".join(selfcon.list_models()))
    options = parser.parse_args()
    source = selfcon.data.load(options.data)
    data = make_resident(source.test.take(np.arange(options.images)), size=options.image_size)
    facts: dict[str, Any] = {"mean": data.mean.tolist(), "std": data.std.tolist(), "image_size": options.image_size}
    facts["classes"] = list(source.classes)
    images = data.pixels.float() / 255
    for name in options.models.split(","):
        start = time.perf_counter()
        torch.manual_seed(0)
        leave = selfcon.Exit(EXITS.get(name, 2))
        size, classes = options.image_size, len(source.classes)
        net = selfcon.create_model(name, exits=[leave], image_size=size, num_classes=classes)
        with torch.no_grad():  # statistics of these images, so that no layer is idle
            net.train()
            net((images[:256] - data.mean.view(3, 1, 1)) / data.std.view(3, 1, 1))
            net.eval()
            seen = (images - data.mean.view(3, 1, 1)) / data.std.view(3, 1, 1)
            parts = [net(part).logits for part in seen.split(64)]
        expected = {key: torch.cat([part[key] for part in parts]) for key in net.names}
        worst, agree = 0.0, 1.0
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            export_onnx(net, facts, Trust(), folder)
            export_stages(net, facts, Trust(), folder)
            session = ort.InferenceSession(folder / "model.onnx")
            for batch in (1, 64):
                out = [session.run(None, {"images": part.numpy()}) for part in images.split(batch)]
                for place_of, key in enumerate(net.names):
                    apart, same = differ(np.concatenate([each[place_of] for each in out]), expected[key])
                    worst, agree = max(worst, apart), min(agree, same)
            for key, found in zip([*net.names[1:], "backbone"], run_stages(folder, images[:64].numpy()), strict=True):
                apart, same = differ(found, expected[key][:64])
                worst, agree = max(worst, apart), min(agree, same)
        row = {"model": name, "images": options.images, "worst": worst, "same_answers": agree}
        print(
            json.dumps({"benchmark": "onnx_equality", **row, "seconds": round(time.perf_counter() - start)}), flush=True
        )


if __name__ == "__main__":
    main()
