"""Several processes give the loss and the gradient of one, whatever share of the batch each holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

import selfcon
from selfcon.errors import NonFiniteError, UsageError
from tests.losses.test_methods import CONTRASTIVE

WAYS: dict[str, dict[str, Any]] = {
    "dense": {"implementation": "dense"},
    "tiled": {"implementation": "tiled"},
    "ring": {"gather": "ring"},
}


def batch(name: str) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(1)
    views = selfcon.get_method(name).views
    # The last sample, alone on its process, is the only one of its class.
    labels = torch.tensor([0, 0, 1, 1, 0, 2, 3])
    return torch.randn(7, views, 3, 8, dtype=torch.float64, generator=rng), labels


def temperature() -> Tensor:
    return torch.tensor(0.2, dtype=torch.float64, requires_grad=True)


def work(rank: int, sizes: list[int], folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=len(sizes))
    start = sum(sizes[:rank])
    own = slice(start, start + sizes[rank])
    results: dict[tuple[str, str], Any] = {}
    for name in CONTRASTIVE:
        features, labels = batch(name)
        for way, options in WAYS.items():
            mine, tau = features[own].clone().requires_grad_(), temperature()
            loss = selfcon.get_method(name).loss(mine, labels[own], temperature=tau, alpha=0.5, **options)
            loss.backward()
            results[name, way] = (loss.detach(), mine.grad, tau.grad)
    broken = torch.randn(2, 1, 2, 4) * (float("nan") if rank == 0 else 1.0)
    with pytest.raises(NonFiniteError):
        selfcon.get_method("selfcon").loss(broken, torch.zeros(2, dtype=torch.long))
    first_alone: Any = dist.new_group([0])
    if rank > 0:
        with pytest.raises(UsageError, match=f"Process {rank} is not in the process group"):
            selfcon.get_method("selfcon").loss(
                torch.randn(2, 1, 2, 4), torch.zeros(2, dtype=torch.long), process_group=first_alone
            )
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("sizes", [[4, 3], [1, 5, 1], [2, 2, 2, 1]])
def test_equals_one_process(sizes: list[int], tmp_path: Path) -> None:
    spawn(work, args=(sizes, str(tmp_path)), nprocs=len(sizes))
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(len(sizes))]
    for name in CONTRASTIVE:
        features, labels = batch(name)
        features.requires_grad_()
        tau = temperature()
        loss = selfcon.get_method(name).loss(features, labels, temperature=tau, alpha=0.5)
        loss.backward()
        assert features.grad is not None
        assert tau.grad is not None
        for way in WAYS:
            mean_loss = torch.stack([result[name, way][0] for result in ranks]).mean()
            gradient = torch.cat([result[name, way][1] for result in ranks]) / len(sizes)  # the mean that DDP takes
            of_tau = torch.stack([result[name, way][2] for result in ranks]).mean()
            torch.testing.assert_close(mean_loss, loss.detach(), rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(gradient, features.grad, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(of_tau, tau.grad, rtol=1e-10, atol=1e-12)
