"""Claim: gathering, the memory of a process grows with the number of processes; in a ring it soon does not.

Loss and gradient of SelfCon in 2, 4 and 8 processes of this machine (gloo, CPU), each with the same number of features;
gathered and in a ring, each time in fresh processes. A JSON line for each: megabytes by which the memory of the largest
process grew beyond what a small batch takes.
    python benchmarks/ring_memory.py [features of a process] [D]
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

import selfcon


def work(rank: int, size: int, features: int, dimension: int, way: str, folder: str) -> None:  # noqa: PLR0917 - for spawn
    """One process: its share of the features, and what it cost."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size)
    method, options = (
        selfcon.get_method("selfcon"),
        {"gather": "ring"} if way == "ring" else {"implementation": "tiled"},
    )

    def step(count: int) -> None:
        x = torch.randn(count // 2, 1, 2, dimension, requires_grad=True)
        method.loss(x, torch.arange(count // 2) % 100, **options).backward()  # type: ignore[arg-type]

    step(64)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step(features)
    every: list[float] = [0.0] * size
    dist.all_gather_object(every, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
    if rank == 0:
        row = {"benchmark": "ring_memory", "way": way, "processes": size, "features_each": features, "D": dimension}
        print(json.dumps({**row, "MB": round(max(every), 1)}), flush=True)
    dist.destroy_process_group()


def main() -> None:
    features, dimension = (int(value) for value in (*sys.argv[1:], *("1024", "2048")[len(sys.argv) - 1 :]))
    for size in (2, 4, 8):
        for way in ("gather", "ring"):
            with tempfile.TemporaryDirectory() as folder:
                spawn(work, (size, features, dimension, way, folder), nprocs=size)


if __name__ == "__main__":
    main()
