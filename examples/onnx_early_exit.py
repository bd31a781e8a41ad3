"""Early exit without PyTorch: the stages that `selfcon export` wrote, run by onnxruntime, each only for who needs it.

selfcon export runs/demo --formats stages
python examples/onnx_early_exit.py runs/demo/export IMAGE...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort
from PIL import Image, ImageOps


def softmax(logits: np.ndarray) -> np.ndarray:
    powers: np.ndarray = np.exp(logits - logits.max(1, keepdims=True))
    parts: np.ndarray = powers / powers.sum(1, keepdims=True)
    return parts


class Stages:
    """The stages of one model and the rule that says when an answer is sure enough (here: by its probability)."""

    def __init__(self, folder: Path, options: ort.SessionOptions | None = None) -> None:
        self.about = json.loads((folder / "stages.json").read_text(encoding="utf-8"))
        if self.about["criterion"] != "confidence":
            sys.exit("This example knows the criterion `confidence` alone.")
        self.sessions = [ort.InferenceSession(folder / name, options) for name in self.about["stages"]]

    def answer(self, images: np.ndarray) -> tuple[np.ndarray, list[str]]:
        """Probabilities [B, C] of images [B, 3, S, S] in [0, 1], and by which answer."""
        rows, x, total = np.arange(len(images)), images, 0.0
        found, names = np.empty((len(images), len(self.about["classes"])), np.float32), [""] * len(images)
        for number, session in enumerate(self.sessions):
            *left, logits = session.run(None, {session.get_inputs()[0].name: x})
            total = total + logits
            probabilities = softmax(total / (number + 1) / self.about["temperatures"][number])
            last = number == len(self.sessions) - 1
            done = np.full(len(rows), True) if last else probabilities.max(1) >= self.about["thresholds"][number]
            found[rows[done]] = probabilities[done]
            for row in rows[done]:
                names[row] = self.about["answers"][number]
            if done.all():
                break
            rows, x, total = rows[~done], left[0][~done], total[~done]
        return found, names


def read(path: str, size: int, shorter_side: int) -> np.ndarray:
    """The middle of an image, after its shorter side was brought to a length; one of just that size is seen whole.

    Sides and corners are rounded as torchvision does, so that no image is a pixel beside what the model was shown.
    """
    image = ImageOps.exif_transpose(Image.open(path))
    if image.mode.startswith("I"):  # grey of 16 bits, which Pillow would clip
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    image = image.convert("RGB")
    if image.size != (size, size):
        short = min(image.size)
        sides = [int(shorter_side * side / short) for side in image.size]
        image = image.resize(sides, Image.Resampling.BILINEAR)
    left, top = (round((side - size) / 2) for side in image.size)
    pixels = np.asarray(image.crop((left, top, left + size, top + size)), np.float32)
    return pixels.transpose(2, 0, 1) / 255


def main() -> None:
    if len(sys.argv) < 3 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    folder, paths = Path(sys.argv[1]), sys.argv[2:]
    stages = Stages(folder)
    sides = (stages.about["image_size"], stages.about["shorter_side"])
    probabilities, names = stages.answer(np.stack([read(path, *sides) for path in paths]))
    for path, each, name in zip(paths, probabilities, names, strict=True):
        print(f"{path}: {stages.about['classes'][each.argmax()]} {100 * each.max():.1f} % ({name})")


if __name__ == "__main__":
    main()
