"""A model of what a step costs on 1 to 1,024 GPUs: network, gathered features, averaged gradients, loss.

    python benchmarks/scale_model.py [--batch-per-gpu 1024] [--rate 92700] [--parameters 11.9e6] [--bandwidth 400e9] ...

Defaults are what was measured of ResNet-18 on CIFAR-100 on one H200, and links of 400 GB/s within a machine of 8 GPUs
and 50 GB/s a GPU between machines. Collectives are taken as rings: a process sends (W-1)/W of the gathered bytes, and
twice that of the averaged gradients. The gradients' average can hide behind the backward pass; both cases are printed.
A JSON line for each number of GPUs.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """What a step consists of, on how many GPUs."""

    gpus: int
    batch_per_gpu: int
    rate: float  # images a second of the network and its updates on one GPU, without the loss
    parameters: float
    features_per_image: int  # views times exits
    dimension: int
    loss_flops: float  # a second, in the loss
    inside: float  # bytes a second between the GPUs of a machine
    between: float  # and between machines, for each GPU
    gpus_per_machine: int

    @property
    def bandwidth(self) -> float:
        return self.inside if self.gpus <= self.gpus_per_machine else self.between

    @property
    def features(self) -> int:
        return self.gpus * self.batch_per_gpu * self.features_per_image

    def seconds(self) -> dict[str, float]:
        """Of each part, for one process."""
        sent = (self.gpus - 1) / self.gpus
        gathered = sent * self.features * self.dimension * 4 / self.bandwidth
        own = self.features / self.gpus
        return {
            "network": self.batch_per_gpu / self.rate,
            # features forward, their gradients back: an all-gather and an all-reduce
            "gather": 3 * gathered,
            "gradients": 2 * sent * self.parameters * 4 / self.bandwidth,
            "loss": 6 * own * self.features * self.dimension / self.loss_flops,
        }


def describe(case: Case) -> dict[str, float]:
    """Rates and efficiency, with the gradients' average hidden behind the backward pass or not."""
    parts = case.seconds()
    images = case.gpus * case.batch_per_gpu
    in_turn = sum(parts.values())
    hidden = in_turn - min(parts["gradients"], parts["network"] * 2 / 3)
    return {
        "gpus": case.gpus,
        "global_batch": images,
        **{f"{name}_ms": round(1000 * value, 3) for name, value in parts.items()},
        "images_per_second": round(images / in_turn),
        "images_per_second_hidden": round(images / hidden),
        "efficiency": round(case.batch_per_gpu / case.rate / in_turn, 3),
        "efficiency_hidden": round(case.batch_per_gpu / case.rate / hidden, 3),
        "gathered_MB": round(case.features * case.dimension * 4 / 1e6, 1),
        "ring_MB": round(3 * case.features / case.gpus * case.dimension * 4 / 1e6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-per-gpu", type=int, default=1024)
    parser.add_argument("--rate", type=float, default=92_700)
    parser.add_argument("--parameters", type=float, default=11.9e6)
    parser.add_argument("--features-per-image", type=int, default=2)
    parser.add_argument("--dimension", type=int, default=128)
    parser.add_argument("--loss-flops", type=float, default=150e12)
    parser.add_argument("--inside", type=float, default=400e9)
    parser.add_argument("--between", type=float, default=50e9)
    parser.add_argument("--gpus-per-machine", type=int, default=8)
    options = vars(parser.parse_args())
    for power in range(11):
        print(json.dumps(describe(Case(gpus=2**power, **options))))


if __name__ == "__main__":
    main()
