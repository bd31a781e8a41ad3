"""SelfConLoss and SupConLoss as drop-ins."""

from __future__ import annotations

import re

import pytest
import torch

import selfcon
from selfcon.errors import UsageError


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


@pytest.mark.parametrize("shape", [(4, 8), (4, 0, 8), (4, 1, 2, 8)])
def test_wrong_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match=re.escape("shape [B, K, D]") + ".*" + re.escape(f"not {list(shape)}.")):
        selfcon.SelfConLoss()(torch.randn(shape), torch.tensor([0, 0, 1, 1]))
