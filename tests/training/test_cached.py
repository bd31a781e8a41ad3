"""Training in pieces gives the gradient of the whole batch."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import selfcon
from selfcon.errors import SelfconWarning, UsageError
from selfcon.training.cached import cached_loss, cut_pieces, uses_batch_norm
from tests.workflows.conftest import write_stripes


def network(**options: Any) -> Any:
    torch.manual_seed(0)
    exits = [selfcon.Exit(after=2)]
    net = selfcon.create_model("resnet18", exits=exits, stem="small", width=0.125, norm="group", **options)
    return net.double().train()


def gradients(net: Any) -> Tensor:
    return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


@pytest.mark.parametrize("name", ["selfcon", "supcon", "selfcon-m-star", "selfcon-1stage", "ce"])
@pytest.mark.parametrize("piece", [1, 7, 64])
def test_the_gradient_is_that_of_the_whole_batch(name: str, piece: int) -> None:
    method = selfcon.get_method(name)
    net = network(num_classes=4)
    assert not uses_batch_norm(net)
    images = torch.randn(24 * method.views, 3, 16, 16, dtype=torch.float64)
    loss = partial(method.loss_from_output, labels=torch.arange(24) % 4)
    whole = loss(net(images))
    whole.backward()
    expected = gradients(net)
    net.zero_grad(set_to_none=True)
    pieces = cached_loss(net, images, loss, views=method.views, piece=piece)
    (2 * pieces).backward()
    torch.testing.assert_close(pieces.detach(), whole.detach(), rtol=1e-12, atol=0)
    assert (gradients(net) - 2 * expected).norm() <= 1e-6 * expected.norm()


def test_random_numbers_are_those_of_the_first_time() -> None:
    net = network(drop_rate=0.5)
    images = torch.randn(8, 3, 16, 16, dtype=torch.float64)
    loss = partial(selfcon.get_method("selfcon").loss_from_output, labels=torch.arange(8) % 2)
    torch.manual_seed(5)
    pieces = cached_loss(net, images, loss, views=1, piece=4)
    after = torch.get_rng_state()
    pieces.backward()
    assert torch.equal(torch.get_rng_state(), after)  # going back in time left no trace
    ours = gradients(net)
    net.zero_grad(set_to_none=True)
    torch.manual_seed(5)
    outputs = [net(images[:4]), net(images[4:])]
    joined = {name: torch.cat([output.projections[name] for output in outputs]) for name in net.names}
    expected = loss(selfcon.networks.multi_exit.Output(net.names, {}, joined))
    expected.backward()
    torch.testing.assert_close(pieces.detach(), expected.detach())
    assert (ours - gradients(net)).norm() <= 1e-10 * ours.norm()


def test_running_statistics_are_updated_once() -> None:
    torch.manual_seed(0)
    net = selfcon.create_model("resnet18", exits=[selfcon.Exit(after=2)], stem="small", width=0.125)
    loss = partial(selfcon.get_method("selfcon").loss_from_output, labels=torch.arange(8) % 2)
    cached_loss(net, torch.randn(8, 3, 16, 16), loss, views=1, piece=4).backward()
    assert int(net.get_buffer("encoder.bn1.num_batches_tracked")) == 2


@pytest.mark.medium
def test_as_a_setting(tmp_path: Any) -> None:
    write_stripes(tmp_path / "x.npz")
    keys: dict[str, Any] = {"data": str(tmp_path / "x.npz"), "width": 0.125, "epochs": 1, "device": "cpu"}
    keys |= {"probe.epochs": 1, "batch_size": 48}
    whole = selfcon.fit(out=tmp_path / "whole", norm="group", **keys)
    pieces = selfcon.fit(out=tmp_path / "pieces", norm="group", micro_batch=16, **keys)
    assert pieces["accuracy"] == whole["accuracy"]
    selfcon.fit(out=tmp_path / "all", micro_batch=48, **keys)  # a piece that is the whole batch is none: no warning
    with pytest.warns(SelfconWarning, match="--norm group makes pieces exact"):
        selfcon.fit(out=tmp_path / "bn", micro_batch=16, **keys)
    with pytest.raises(UsageError, match="norm"):
        selfcon.create_model("resnet18", norm="grup")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("samples", "piece", "shares"),
    [
        (57, 8, None),
        (7, 3, None),
        (993, 32, None),
        (4, 4, (4, 5)),
        (5, 4, (4, 5)),
        (12, 4, (11, 12)),
        (11, 4, (11, 12)),
    ],
)
def test_pieces_are_of_nearly_the_same_size(
    monkeypatch: pytest.MonkeyPatch, samples: int, piece: int, shares: tuple[int, int] | None
) -> None:
    taken: list[slice] = []
    monkeypatch.setattr("selfcon.training.cached._Cached.apply", lambda *given: taken.extend(given[-1]))
    cached_loss(None, torch.zeros(samples, 1), lambda output: None, views=1, piece=piece, shares=shares)  # type: ignore[arg-type, return-value]
    sizes = [each.stop - each.start for each in taken]
    assert sum(sizes) == samples
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) <= piece
    assert len(sizes) == -(-(shares or (0, samples))[1] // piece)


def test_all_processes_make_as_many_pieces() -> None:
    for most in range(2, 40):
        for piece in range(1, 9):
            counts = {len(list(cut_pieces(samples, piece, (most - 1, most)))) for samples in (most - 1, most)}
            assert len(counts) == 1


def test_networks_of_vectors_look_at_one_sample_alone_too() -> None:
    net = selfcon.create_model("levit_128s", exits=[], norm="group", num_classes=3, image_size=224)
    assert not uses_batch_norm(net)
    images = torch.randn(2, 3, 224, 224)
    both, first = (net.train()(each).logits["backbone"] for each in (images, images[:1]))
    torch.testing.assert_close(both[:1], first, rtol=1e-3, atol=1e-4)
    assert (both[0] - both[1]).abs().max() > 1e-3
