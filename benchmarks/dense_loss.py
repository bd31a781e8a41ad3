"""Claim: the dense SupCon loss costs no more than pytorch-metric-learning's, and gives the same value.

Prints a JSON line for each batch size. Both run in turn in one process; times are medians.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

import torch
from pytorch_metric_learning.losses import SupConLoss as Peer
from torch import Tensor

import selfcon


def measure(losses: dict[str, Callable[[], Tensor]], *, repeats: int) -> dict[str, float]:
    """Median milliseconds of forward and backward, the contestants in turn."""
    times: dict[str, list[float]] = {name: [] for name in losses}
    for _ in range(repeats):
        for name, loss in losses.items():
            start = time.perf_counter()
            loss().backward()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times[name].append(1000 * (time.perf_counter() - start))
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ours, peer = selfcon.SupConLoss(temperature=0.1), Peer(temperature=0.1)
    for batch in (256, 1024):
        features = torch.randn(batch, 2, 128, device=device, requires_grad=True)
        labels = torch.randint(0, 100, (batch,), device=device)

        def run_ours(features: Tensor = features, labels: Tensor = labels) -> Tensor:
            loss: Tensor = ours(features, labels)
            return loss

        def run_peer(features: Tensor = features, labels: Tensor = labels) -> Tensor:
            loss: Tensor = peer(features.transpose(0, 1).flatten(0, 1), labels.repeat(2))
            return loss

        times = measure({"selfcon": run_ours, "pytorch-metric-learning": run_peer}, repeats=11)
        print(
            json.dumps(
                {
                    "benchmark": "dense_loss",
                    "device": device,
                    "features": 2 * batch,
                    "milliseconds": {name: round(value, 3) for name, value in times.items()},
                    "ratio": round(times["pytorch-metric-learning"] / times["selfcon"], 2),
                    "difference": abs(run_ours().item() - run_peer().item()),
                }
            )
        )


if __name__ == "__main__":
    main()
