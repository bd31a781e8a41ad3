"""Claim: the batched augmentation makes at least 3 times as many 32-pixel images a second as torchvision's transforms.

Both in one process, in turn, on the CPU; the batched form on a GPU too, where there is one. A JSON line a policy.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

import torch
from PIL import Image
from torchvision import transforms

from selfcon.data.augment import augment, normalise
from selfcon.data.draws import draw
from selfcon.data.policies import POLICIES

COUNT = 1024


def torchvision_pipeline(name: str) -> Callable[[Image.Image], torch.Tensor]:
    """What a training script of this field applies to each image."""
    crop = [transforms.RandomResizedCrop(32, scale=(0.2, 1.0)), transforms.RandomHorizontalFlip()]
    jitter = transforms.RandomApply([transforms.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8)
    steps = {
        "simple": crop,
        "standard": [*crop, jitter, transforms.RandomGrayscale(p=0.2)],
        "randaugment": [transforms.RandAugment(2, 9)],
    }[name]
    pipeline: Callable[[Image.Image], torch.Tensor] = transforms.Compose(
        [*steps, transforms.ToTensor(), transforms.Normalize((0.5,) * 3, (0.25,) * 3)]
    )
    return pipeline


def measure(work: Callable[[int], object], device: str) -> float:
    start = time.perf_counter()
    for epoch in range(3):
        work(epoch)
    if device == "cuda":
        torch.cuda.synchronize()
    return 3 * COUNT / (time.perf_counter() - start)


def main() -> None:
    images = torch.randint(0, 256, (COUNT, 3, 32, 32), dtype=torch.uint8)
    pictures = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in images]
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    for name in ("simple", "standard", "randaugment"):
        policy, pipeline = POLICIES[name], torchvision_pipeline(name)
        rates: dict[str, list[float]] = {"torchvision cpu": [], **{f"selfcon {device}": [] for device in devices}}
        for _ in range(5):
            rates["torchvision cpu"].append(measure(lambda _, run=pipeline: [run(p) for p in pictures], "cpu"))  # type: ignore[misc]
            for device in devices:
                stored, samples = images.to(device), torch.arange(COUNT, device=device)
                half, quarter = torch.full((3,), 0.5, device=device), torch.full((3,), 0.25, device=device)

                def batched(epoch: int) -> torch.Tensor:
                    draws = draw(policy, samples, height=32, width=32, seed=0, epoch=epoch)  # noqa: B023
                    return normalise(augment(stored, policy, draws, 32), half, quarter)  # noqa: B023

                rates[f"selfcon {device}"].append(measure(batched, device))
        medians = {key: statistics.median(values[1:]) for key, values in rates.items()}
        print(
            json.dumps(
                {
                    "benchmark": "augmentation",
                    "policy": name,
                    "images_per_second": {key: round(value) for key, value in medians.items()},
                    "ratio_cpu": round(medians["selfcon cpu"] / medians["torchvision cpu"], 1),
                }
            )
        )


if __name__ == "__main__":
    main()
