"""Claim: the loss and its gradient at any batch size, in memory for the features alone.

On a GPU: forward and backward of SelfCon (two exits, so N = 2 B features of D = 128) replayed in a CUDA graph, beside
the manner of the released code and pytorch-metric-learning in the same process; on a CPU small sizes without a graph.
A JSON line for each implementation and size: milliseconds, and memory beyond features and their gradient.
    python benchmarks/loss_sizes.py [N ...]
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import selfcon

TAU = 0.1
_SIZES = [512, 1024, 2048, 8192, 32_768, 65_536, 262_144, 1 << 20]


def released_manner(features: Tensor, labels: Tensor) -> Tensor:
    """[B, 2, D]: whole matrices of similarities, masks, exponentials and log-probabilities."""
    z = torch.nn.functional.normalize(features, dim=2).transpose(0, 1).flatten(0, 1)
    same = torch.eq(labels[:, None], labels[None, :]).float().repeat(2, 2)
    logits = z @ z.T / TAU
    logits = logits - logits.max(dim=1, keepdim=True).values.detach()
    others = torch.ones_like(same).fill_diagonal_(0)
    positives = same * others
    log_probabilities = logits - (logits.exp() * others).sum(1, keepdim=True).log()
    return -((positives * log_probabilities).sum(1) / positives.sum(1)).mean()


@dataclass(frozen=True)
class Contestant:
    """A loss, the largest N that it is tried at, and whether it can be replayed: not if it makes the host wait."""

    loss: Callable[[Tensor, Tensor], Tensor]
    largest: int
    replayable: bool = True


def contestants() -> dict[str, Contestant]:
    method = selfcon.get_method("selfcon")

    def ours(name: str) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda x, y: method.loss(x[:, None], y, temperature=TAU, implementation=name)

    found = {
        "selfcon dense": Contestant(ours("dense"), 32_768),
        "selfcon tiled": Contestant(ours("tiled"), 65_536),
        "released manner": Contestant(released_manner, 65_536),
    }
    if torch.cuda.is_available():
        found["selfcon triton"] = Contestant(ours("triton"), 1 << 20)
    try:
        from pytorch_metric_learning.losses import SupConLoss
    except ImportError:
        return found
    peer = SupConLoss(temperature=TAU)
    found["pytorch-metric-learning"] = Contestant(
        lambda x, y: peer(x.transpose(0, 1).flatten(0, 1), y.repeat(2)), 16_384, replayable=False
    )
    return found


def measure(contestant: Contestant, features: Tensor, labels: Tensor) -> tuple[float, float]:
    """Milliseconds of forward and backward, and bytes beyond the features and their gradient."""

    def step() -> None:
        contestant.loss(features, labels).backward()

    features.grad = torch.zeros_like(features)
    if not features.is_cuda:
        step()
        start = time.perf_counter()
        step()
        return 1000 * (time.perf_counter() - start), float("nan")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    memory = torch.cuda.max_memory_allocated() - before
    work: Callable[[], None] = step
    if contestant.replayable:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            step()
        work = graph.replay
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    calls = max(1, min(50, int(0.5 / (time.perf_counter() - start))))
    start = time.perf_counter()
    for _ in range(calls):
        work()
    torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - start) / calls, memory


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = [int(size) for size in sys.argv[1:]] or (_SIZES if device == "cuda" else _SIZES[:3])
    for size in sizes:
        for name, contestant in contestants().items():
            if size > contestant.largest:
                continue
            features = torch.randn(size // 2, 2, 128, device=device, requires_grad=True)
            labels = torch.randint(0, 1000, (size // 2,), device=device)
            try:
                milliseconds, memory = measure(contestant, features, labels)
            except torch.OutOfMemoryError:
                milliseconds, memory = float("nan"), float("nan")
            row = {"N": size, "implementation": name, "ms": milliseconds, "MiB": memory / 2**20}
            row["replayed"] = contestant.replayable and device == "cuda"
            print(json.dumps({"benchmark": "loss_sizes", "device": device, **row}), flush=True)
            del features, labels
            if device == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
