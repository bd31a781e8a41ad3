"""Claim: the loss and its gradient at any batch size, in memory for the features alone.

On a GPU: forward and backward of SelfCon (two exits, so N = 2 B features of D = 128) replayed in a CUDA graph, beside
the manner of the released code and pytorch-metric-learning in the same process; on a CPU small sizes without a graph.
A JSON line for each implementation and size: milliseconds, and memory beyond features and their gradient.
    python benchmarks/loss_sizes.py [largest N]
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

import selfcon

TAU = 0.1


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


def contestants() -> dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int]]:
    """Each with the largest N that it is tried at."""
    method = selfcon.get_method("selfcon")

    def ours(name: str) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda x, y: method.loss(x[:, None], y, temperature=TAU, implementation=name)

    found: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int]] = {
        "selfcon dense": (ours("dense"), 32_768),
        "selfcon tiled": (ours("tiled"), 262_144),
        "released manner": (released_manner, 65_536),
    }
    if torch.cuda.is_available():
        found["selfcon triton"] = (ours("triton"), 1 << 20)
    try:
        from pytorch_metric_learning.losses import SupConLoss
    except ImportError:
        return found
    peer = SupConLoss(temperature=TAU)
    found["pytorch-metric-learning"] = (
        lambda x, y: peer(x.transpose(0, 1).flatten(0, 1), y.repeat(2)),
        16_384,
    )
    return found


def measure(loss: Callable[[Tensor, Tensor], Tensor], features: Tensor, labels: Tensor) -> tuple[float, float, bool]:
    """Milliseconds of forward and backward, bytes beyond the features and their gradient, whether it was replayed."""

    def step() -> None:
        loss(features, labels).backward()

    features.grad = torch.zeros_like(features)
    if not features.is_cuda:
        step()
        start = time.perf_counter()
        step()
        return 1000 * (time.perf_counter() - start), float("nan"), False
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
    replayed = False
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            step()
        work, replayed = graph.replay, True
    except RuntimeError:
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    calls = max(1, min(50, int(0.5 / (time.perf_counter() - start))))
    start = time.perf_counter()
    for _ in range(calls):
        work()
    torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - start) / calls, memory, replayed


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    largest = int(sys.argv[1]) if len(sys.argv) > 1 else (1 << 20 if device == "cuda" else 4096)
    size = 2048
    while size <= largest:
        for name, (loss, limit) in contestants().items():
            if size > limit:
                continue
            features = torch.randn(size // 2, 2, 128, device=device, requires_grad=True)
            labels = torch.randint(0, 1000, (size // 2,), device=device)
            try:
                milliseconds, memory, replayed = measure(loss, features, labels)
            except torch.OutOfMemoryError:
                milliseconds, memory, replayed = float("nan"), float("nan"), False
            row = {"N": size, "implementation": name, "ms": milliseconds, "MiB": memory / 2**20, "replayed": replayed}
            print(json.dumps({"benchmark": "loss_sizes", "device": device, **row}), flush=True)
            del features, labels
            if device == "cuda":
                torch.cuda.empty_cache()
        size *= 4 if size < 16_384 or size >= 65_536 else 2


if __name__ == "__main__":
    main()
