"""Several processes give the loss and the gradient of one, whatever share of the batch each holds."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import selfcon
from selfcon.errors import NonFiniteError, UsageError
from selfcon.losses import dense, normalise
from selfcon.losses.gather import join_rows
from selfcon.losses.sets import Contrast
from tests.distributed.processes import start_processes
from tests.losses.test_methods import CONTRASTIVE

WAYS: dict[str, dict[str, Any]] = {
    "dense": {"implementation": "dense"},
    "tiled": {"implementation": "tiled"},
    "ring": {"gather": "ring"},
}
REMEMBERING = ["selfcon-star", "supcon", "simclr"]
ALONE: dict[str, dict[str, Any]] = {"alone": {"gather": False}}
Found = dict[tuple[str, str], tuple[Tensor, Tensor, Tensor]]


def batch(name: str) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(1)
    views = selfcon.get_method(name).views
    # The last sample, alone on its process, is the only one of its class.
    labels = torch.tensor([0, 0, 1, 1, 0, 2, 3])
    return torch.randn(7, views, 3, 8, dtype=torch.float64, generator=rng), labels


def losses(names: Iterable[str], rows: slice, ways: dict[str, dict[str, Any]], **options: Any) -> Found:
    """Loss, gradient of the features and of the temperature, by method and way, over some rows of the batch."""
    found: Found = {}
    for name in names:
        features, labels = batch(name)
        for way, how in ways.items():
            mine = features[rows].clone().requires_grad_()
            tau = torch.tensor(0.2, dtype=torch.float64, requires_grad=True)
            method = selfcon.get_method(name)
            loss = method.loss(mine, labels[rows], temperature=tau, alpha=0.5, **how, **options)
            loss.backward()
            assert mine.grad is not None
            assert tau.grad is not None
            found[name, way] = (loss.detach(), mine.grad, tau.grad)
    return found


def memory_of(rank: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(10 + rank)
    labels = torch.randint(0, 5, (4 + rank,), generator=rng)  # one class more than the batch has
    return torch.randn(4 + rank, 3, 8, dtype=torch.float64, generator=rng), labels


def loss_with_memories(name: str, sizes: list[int]) -> tuple[Tensor, Tensor]:
    """Loss and gradient of the batch where the anchors of each process are contrasted with its own memory."""
    method, (features, labels) = selfcon.get_method(name), batch(name)
    features.requires_grad_()
    whole = features if method.uses_exits else features[:, :, :1]
    each = whole.shape[1] * whole.shape[2]
    sums, counts = [], []
    for rank in range(len(sizes)):
        remembered, known = memory_of(rank)
        remembered = remembered if method.uses_exits else remembered[:, :1]
        groups = labels if method.uses_labels else torch.arange(7)
        beside = known if method.uses_labels else torch.full_like(known, -1)
        exits = torch.arange(whole.shape[2])
        own = slice(sum(sizes[:rank]) * each, sum(sizes[: rank + 1]) * each)
        contrast = Contrast(
            normalise(torch.cat([whole.reshape(-1, 8), remembered.reshape(-1, 8)])),
            torch.cat([groups.repeat_interleave(each), beside.repeat_interleave(len(exits))]),
            torch.cat([exits.repeat(7 * whole.shape[1]), exits.repeat(len(known))]),
            own,
        )
        found = dense.term_sums(contrast, method.terms, 0.2)
        sums.append(found[0])
        counts.append(found[1])
    means = torch.stack(sums).sum(0) / torch.stack(counts).sum(0)
    loss = sum(term.weight(0.5) * mean for term, mean in zip(method.terms, means, strict=True))
    assert isinstance(loss, Tensor)
    (gradient,) = torch.autograd.grad(loss, features)
    return loss.detach(), gradient


def one_stage_loss(rows: slice, **options: Any) -> Tensor:
    features, labels = batch("selfcon")
    logits = {"backbone": features[rows, 0, 0], "exit1": features[rows, 0, 1]}
    output = selfcon.Output(names=list(logits), features={}, logits=logits)
    return selfcon.get_method("ce-sub").loss_from_output(output, labels[rows], **options)


def work(rank: int, sizes: list[int], folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=len(sizes))
    start = sum(sizes[:rank])
    own = slice(start, start + sizes[rank])
    found = {
        "all": losses(CONTRASTIVE, own, WAYS),
        "alone": losses(["selfcon", "simclr"], own, ALONE),
        "one stage": (one_stage_loss(own), one_stage_loss(own, gather=False)),
        "same memory": losses(REMEMBERING, own, WAYS, memory=memory_of(0)),
        "own memory": losses(REMEMBERING, own, WAYS, memory=memory_of(rank)),
    }
    but_the_first: Any = dist.new_group(list(range(1, len(sizes))))
    if rank > 0:
        found["but the first"] = losses(["selfcon", "simclr"], own, WAYS, process_group=but_the_first)
    torch.save(found, f"{folder}/{rank}.pt")
    features, labels = batch("selfcon")
    assert torch.equal(join_rows(features[own].requires_grad_()), features)
    assert torch.equal(join_rows(labels[own]), labels)
    refuse(rank)
    dist.destroy_process_group()


def refuse(rank: int) -> None:
    """What all processes must notice together, so that none waits for the others."""
    labels = torch.zeros(2, dtype=torch.long)
    broken = torch.randn(2, 1, 2, 4) * (float("nan") if rank == 0 else 1.0)
    with pytest.raises(NonFiniteError):
        selfcon.get_method("selfcon").loss(broken, labels)
    assert selfcon.get_method("selfcon").loss(broken, labels, gather="ring").isnan()
    first_alone: Any = dist.new_group([0])
    if rank > 0:
        with pytest.raises(UsageError, match=f"Process {rank} is not in the process group"):
            selfcon.get_method("selfcon").loss(torch.randn(2, 1, 2, 4), labels, process_group=first_alone)


def check_mean(ranks: list[Found], rows: slice, **options: Any) -> None:
    """The mean over processes, as DDP takes it, is the loss of one process with these rows."""
    for (name, way), parts in {key: [found[key] for found in ranks] for key in ranks[0]}.items():
        loss, gradient, of_tau = losses([name], rows, {"": {}}, **options)[name, ""]
        mean_loss = torch.stack([part[0] for part in parts]).mean()
        mean_of_tau = torch.stack([part[2] for part in parts]).mean()
        torch.testing.assert_close(mean_loss, loss, rtol=1e-12, atol=1e-12, msg=f"{name} {way}")
        torch.testing.assert_close(torch.cat([p[1] for p in parts]) / len(parts), gradient, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(mean_of_tau, of_tau, rtol=1e-10, atol=1e-12)


@pytest.mark.medium
@pytest.mark.parametrize("sizes", [[4, 3], [1, 5, 1], [2, 2, 2, 1]])
@pytest.mark.filterwarnings("ignore:no anchor of this batch")
def test_equals_one_process(sizes: list[int], tmp_path: Path) -> None:
    start_processes(work, (sizes, str(tmp_path)), nprocs=len(sizes))
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(len(sizes))]
    check_mean([found["all"] for found in ranks], slice(0, 7))
    check_mean([found["but the first"] for found in ranks[1:]], slice(sizes[0], 7))
    check_mean([found["same memory"] for found in ranks], slice(0, 7), memory=memory_of(0))
    for name, way in ranks[0]["own memory"]:
        parts = [found["own memory"][name, way] for found in ranks]
        loss, gradient = loss_with_memories(name, sizes)
        torch.testing.assert_close(torch.stack([part[0] for part in parts]).mean(), loss, msg=f"{name} {way}")
        torch.testing.assert_close(
            torch.cat([part[1] for part in parts]) / len(parts), gradient, rtol=1e-10, atol=1e-12
        )
    weighed = torch.stack([found["one stage"][0] for found in ranks]).mean()
    torch.testing.assert_close(weighed, one_stage_loss(slice(0, 7)))
    for rank, found in enumerate(ranks):
        own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        check_mean([found["alone"]], own)
        torch.testing.assert_close(found["one stage"][1], one_stage_loss(own))
