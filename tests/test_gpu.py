"""What must hold on a GPU; these tests run where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import selfcon
from selfcon.data.augment import augment
from selfcon.data.policies import POLICIES, draw
from selfcon.data.random import permute
from selfcon.losses import Tally
from tests.losses.test_methods import CONTRASTIVE

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]


@contextmanager
def no_waiting() -> Iterator[None]:
    """Anything that makes the host wait for the GPU is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", CONTRASTIVE)
def test_losses_equal_the_cpus_and_never_wait(name: str) -> None:
    method = selfcon.get_method(name)
    features = torch.randn(32, method.views, 3, 64, dtype=torch.float64)
    labels = torch.randint(0, 5, (32,))
    on_gpu, gpu_labels, tally = features.cuda().requires_grad_(), labels.cuda(), Tally()
    method.loss(on_gpu, gpu_labels, tally=tally)  # sets up the library
    with no_waiting():
        loss = method.loss(on_gpu, gpu_labels, tally=tally)
        (gradient,) = torch.autograd.grad(loss, on_gpu)
    features.requires_grad_()
    expected = method.loss(features, labels)
    (expected_gradient,) = torch.autograd.grad(expected, features)
    torch.testing.assert_close(loss.cpu(), expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gradient.cpu(), expected_gradient, rtol=1e-9, atol=1e-11)
    assert tally.anchors > 0


def test_a_loss_in_a_cuda_graph() -> None:
    method, tally = selfcon.get_method("selfcon-star"), Tally()
    features, labels = torch.randn(64, 1, 2, 32, device="cuda", requires_grad=True), torch.arange(64).cuda() % 7
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            method.loss(features, labels, tally=tally).backward()
    torch.cuda.current_stream().wait_stream(stream)
    features.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = method.loss(features, labels, tally=tally)
        loss.backward()
    before = tally.anchors
    with torch.no_grad():
        features.copy_(torch.randn_like(features))
    graph.replay()
    torch.testing.assert_close(loss.detach(), method.loss(features, labels).detach())
    assert tally.anchors == before + 128


@pytest.mark.parametrize("name", POLICIES)
def test_augmentation_and_its_draws_equal_the_cpus(name: str) -> None:
    images = torch.randint(0, 256, (500, 3, 32, 32), dtype=torch.uint8)
    policy, samples = POLICIES[name], torch.randperm(50_000)[:500]
    keys = {"height": 32, "width": 32, "seed": 5, "epoch": 9}
    here, there = draw(policy, samples, **keys), draw(policy, samples.cuda(), **keys)
    for part in vars(here):
        torch.testing.assert_close(getattr(there, part).cpu(), getattr(here, part), rtol=0, atol=1e-7)
    ours, expected = augment(images.cuda(), policy, there, 32).cpu(), augment(images, policy, here, 32)
    difference = (ours - expected).abs()
    if policy.randaugment:
        assert (difference > 2e-3).float().mean() < 0.005
    else:
        assert difference.max() < 2e-3


def test_the_order_of_samples_is_the_cpus() -> None:
    assert torch.equal(permute(50_000, seed=3, epoch=4, device="cuda").cpu(), permute(50_000, seed=3, epoch=4))
