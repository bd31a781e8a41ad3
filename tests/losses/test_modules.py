"""SelfConLoss and SupConLoss as drop-ins."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import selfcon
from selfcon.errors import UsageError


@pytest.mark.slow  # needs pytorch-metric-learning
@pytest.mark.parametrize("temperature", [0.07, 0.1, 0.5])
@pytest.mark.parametrize("features_a_sample", [1, 2, 3])
def test_supcon_equals_pytorch_metric_learning(features_a_sample: int, temperature: float) -> None:
    from pytorch_metric_learning.losses import SupConLoss as Theirs

    labels = torch.arange(8).repeat(3)[torch.randperm(24)]  # every anchor has a positive
    features = torch.randn(24, features_a_sample, 32, dtype=torch.float64)
    ours = selfcon.SupConLoss(temperature=temperature)(features, labels)
    flat = features.transpose(0, 1).flatten(0, 1)
    theirs = Theirs(temperature=temperature)(flat, labels.repeat(features_a_sample))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_the_modules_are_the_methods() -> None:
    labels = torch.tensor([0, 0, 1, 1, 2, 2])
    features = torch.randn(6, 2, 8)
    as_exits, as_views = features[:, None], features[:, :, None]
    torch.testing.assert_close(
        selfcon.SelfConLoss()(features, labels), selfcon.get_method("selfcon").loss(as_exits, labels)
    )
    torch.testing.assert_close(
        selfcon.SupConLoss()(features, labels), selfcon.get_method("supcon").loss(as_views, labels)
    )
    torch.testing.assert_close(selfcon.SupConLoss()(features), selfcon.get_method("simclr").loss(as_views))


def test_released_scale_and_repr() -> None:
    features, labels = torch.randn(4, 2, 8), torch.tensor([0, 0, 1, 1])
    released = selfcon.SupConLoss(0.1, base_temperature=0.07)
    torch.testing.assert_close(released(features, labels), selfcon.SupConLoss(0.1)(features, labels) / 0.7)
    assert repr(released) == "SupConLoss(temperature=0.1, base_temperature=0.07)"


def test_a_learned_temperature_is_a_parameter() -> None:
    features, labels = torch.randn(8, 2, 8, dtype=torch.float64), torch.arange(8) % 3
    learned = selfcon.SupConLoss(0.2, learn_temperature=True)
    assert list(learned.state_dict()) == ["temperature.log_temperature"]
    tau = learned.temperature().detach().double().requires_grad_()  # type: ignore[operator]
    plain = selfcon.get_method("supcon").loss(features[:, :, None], labels, temperature=tau)
    loss = learned(features, labels)
    torch.testing.assert_close(loss, plain)
    loss.backward()
    plain.backward()
    assert tau.grad is not None
    (parameter,) = learned.parameters()
    assert parameter.grad is not None
    torch.testing.assert_close(parameter.grad.double(), tau.grad * tau.detach(), rtol=1e-6, atol=0)
    torch.optim.SGD([parameter], lr=1.0).step()
    assert learned.temperature() > 0  # type: ignore[operator]
    with pytest.raises(UsageError, match="temperature must be a finite number"):
        selfcon.SupConLoss(-0.1, learn_temperature=True)


def test_what_those_who_come_from_supcontrast_are_told() -> None:
    features, labels = torch.randn(4, 2, 8), torch.tensor([0, 0, 1, 1])
    wrong: list[tuple[Callable[[], Any], str]] = [
        (lambda: selfcon.SupConLoss(0.07, "all", 0.07), r"as in SupConLoss\(temperature=0.07, base_temperature=0.07\)"),
        (lambda: selfcon.SelfConLoss(contrast_mode="one"), "leave that out"),
        (lambda: selfcon.SupConLoss()(features, None, torch.eye(4)), r"labels=mask.argmax\(1\)"),
        (lambda: selfcon.SupConLoss()(features[:, 0], labels), r"one feature each is features\[:, None\]"),
        (lambda: selfcon.SupConLoss()(features, [0, 0, 1, 1]), "labels must be a tensor, not list"),  # type: ignore[arg-type]
    ]
    for call, words in wrong:
        with pytest.raises(UsageError, match=words):
            call()
    mask = (labels[:, None] == labels).float()
    assert torch.equal(selfcon.SupConLoss()(features, mask.argmax(1)), selfcon.SupConLoss()(features, labels))


def test_numbers_of_numpy_and_labels_below_zero() -> None:
    features, labels = torch.randn(6, 2, 8), torch.tensor([0, 0, 1, 1, -1, -1])
    plain = selfcon.SupConLoss(0.1)(features, labels)
    torch.testing.assert_close(selfcon.SupConLoss(np.float32(0.1))(features, labels), plain)  # type: ignore[arg-type]
    assert torch.equal(selfcon.SupConLoss(0.1)(features, labels % 3), plain)  # -1 is a class as others are


def test_memory_of_the_modules_is_that_of_the_methods() -> None:
    features, labels = torch.randn(4, 2, 8), torch.tensor([0, 0, 1, 2])
    memory = torch.randn(5, 8), torch.tensor([0, 1, 2, 3, 3])
    expected = selfcon.get_method("supcon").loss(features[:, :, None], labels, memory=memory)
    torch.testing.assert_close(selfcon.SupConLoss()(features, labels, memory=memory), expected)


@pytest.mark.parametrize("shape", [(4, 8), (4, 0, 8), (4, 1, 2, 8)])
def test_wrong_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match=re.escape("shape [B, K, D]") + ".*" + re.escape(f"not {list(shape)}.")):
        selfcon.SelfConLoss()(torch.randn(shape), torch.tensor([0, 0, 1, 1]))
