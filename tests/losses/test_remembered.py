"""Memory: features that are contrasted with, and are no anchors."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import selfcon
from selfcon.errors import NonFiniteError, SelfconWarning, UsageError
from selfcon.losses import Tally
from tests.losses import oracle
from tests.losses.test_methods import CONTRASTIVE


def some(name: str, samples: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    method = selfcon.get_method(name)
    exits = 3 if method.uses_exits else 1
    shape = (samples, method.views, exits, 6)
    return torch.randn(shape, dtype=torch.float64, generator=rng), torch.randint(0, 4, (samples,), generator=rng)


@pytest.mark.parametrize("implementation", ["dense", "tiled"])
@pytest.mark.parametrize("name", CONTRASTIVE)
def test_memory_equals_the_loops(name: str, implementation: str) -> None:
    rng = torch.Generator().manual_seed(CONTRASTIVE.index(name))
    for case in range(12):
        features, labels = some(name, 1 + case % 6, rng)
        remembered, known = torch.randn(1 + case, 3, 6, dtype=torch.float64, generator=rng), torch.arange(1 + case) % 5
        if case % 3 == 0:
            remembered = remembered[:, 0]  # of the backbone
        whole = remembered[:, None] if remembered.ndim == 2 else remembered
        ours, theirs = features.clone().requires_grad_(), features.clone().requires_grad_()
        held = remembered.clone().requires_grad_()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SelfconWarning)  # some batches have no positive
            loss = selfcon.get_method(name).loss(
                ours, labels, temperature=0.3, alpha=0.7, implementation=implementation, memory=(held, known)
            )
        expected = oracle.loss(name, theirs, labels, temperature=0.3, alpha=0.7, memory=(whole, known))
        loss.backward()
        expected.backward()
        assert ours.grad is not None
        assert theirs.grad is not None
        assert abs(loss.item() - expected.item()) <= 1e-10 * max(1, abs(expected.item()))
        assert (ours.grad - theirs.grad).abs().max() <= 1e-10 * max(1, float(theirs.grad.abs().max()))
        assert held.grad is None


@pytest.mark.parametrize("implementation", ["dense", "tiled"])
@pytest.mark.parametrize("name", ["selfcon-star", "simclr"])
def test_the_temperature_has_its_gradient(name: str, implementation: str) -> None:
    features, labels = some(name, 5, torch.Generator().manual_seed(0))
    memory = torch.randn(7, 6, dtype=torch.float64), torch.arange(7) % 3

    def loss(tau: Tensor) -> Tensor:
        method = selfcon.get_method(name)
        return method.loss(features, labels, temperature=tau, implementation=implementation, memory=memory)

    tau = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(loss, tau)


def test_a_memory_makes_positives_and_is_not_counted() -> None:
    """A class that comes once in a batch has an anchor where it is remembered."""
    features, labels, method = torch.randn(3, 1, 1, 8), torch.arange(3), selfcon.get_method("supcon-s")
    tally = Tally()
    loss = method.loss(features, labels, memory=(torch.randn(2, 8), torch.tensor([0, 7])), tally=tally)
    assert loss > 0
    assert (tally.anchors, tally.left_out) == (3, 2)


def test_an_empty_memory_and_half_precision() -> None:
    features, labels = torch.randn(4, 1, 2, 8), torch.tensor([0, 0, 1, 1])
    method = selfcon.get_method("selfcon")
    nothing = torch.zeros(0, 8), torch.zeros(0, dtype=torch.long)
    assert torch.equal(method.loss(features, labels, memory=nothing), method.loss(features, labels))
    remembered = torch.randn(5, 8).bfloat16()
    same = [
        method.loss(features, labels, memory=(each, labels[[0, 1, 2, 3, 0]]))
        for each in (remembered, remembered.float())
    ]
    assert torch.equal(same[0], same[1])


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        (torch.zeros(3, 8), "two things"),
        ((torch.zeros(3, 7), torch.zeros(3).long()), r"shape \[M, 8\] or \[M, E, 8\], not \[3, 7\]"),
        (([1.0], None), "not list"),
        ((torch.zeros(3, 8).long(), torch.zeros(3).long()), "floating point"),
        ((torch.zeros(3, 8), None), "memory needs labels"),
        ((torch.zeros(3, 8), torch.zeros(2).long()), r"labels of memory must have the shape \[3\]"),
        ((torch.zeros(3, 8, device="meta"), torch.zeros(3).long()), "memory is on meta"),
    ],
)
@pytest.mark.parametrize("name", ["selfcon", "supcon-s"])
def test_what_is_no_memory(name: str, memory: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        selfcon.get_method(name).loss(torch.randn(4, 1, 2, 8), torch.tensor([0, 0, 1, 1]), memory=memory)


def test_a_memory_that_is_not_finite() -> None:
    memory = torch.full((3, 8), torch.nan), torch.zeros(3).long()
    with pytest.raises(NonFiniteError, match="features of memory hold NaN or infinity in 3 of 3 samples"):
        selfcon.get_method("selfcon").loss(torch.randn(4, 1, 2, 8), torch.tensor([0, 0, 1, 1]), memory=memory)
