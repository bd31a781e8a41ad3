"""What a loss must not depend on: the order of the batch, the names of the labels, the axes of the feature space."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import selfcon
from tests.losses.test_methods import CONTRASTIVE

pytestmark = pytest.mark.filterwarnings(
    "ignore:no anchor of this batch", "ignore:this loss has anchors at sub-networks"
)

MANY = int(os.environ.get("SELFCON_CASES", "150"))


@st.composite
def batches(draw: st.DrawFn) -> tuple[str, Tensor, Tensor, torch.Generator]:
    name = draw(st.sampled_from(CONTRASTIVE))
    method = selfcon.get_method(name)
    samples, exits, dim = draw(st.integers(1, 10)), draw(st.integers(1, 3)), draw(st.integers(2, 8))
    labels = torch.tensor(draw(st.lists(st.integers(-3, 3), min_size=samples, max_size=samples)))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    return name, torch.randn(samples, method.views, exits, dim, dtype=torch.float64, generator=rng), labels, rng


def same(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@settings(max_examples=MANY, deadline=None)
@given(batches())
def test_order_of_the_batch(batch: tuple[str, Tensor, Tensor, torch.Generator]) -> None:
    name, features, labels, rng = batch
    order = torch.randperm(len(labels), generator=rng)
    method = selfcon.get_method(name)
    same(method.loss(features[order], labels[order]), method.loss(features, labels))


@settings(max_examples=MANY, deadline=None)
@given(batches())
def test_names_of_the_labels(batch: tuple[str, Tensor, Tensor, torch.Generator]) -> None:
    name, features, labels, rng = batch
    names = torch.randperm(1000, generator=rng)[:7] - 500
    method = selfcon.get_method(name)
    same(method.loss(features, names[labels + 3]), method.loss(features, labels))


@settings(max_examples=MANY, deadline=None)
@given(batches())
def test_rotation_and_length_of_the_features(batch: tuple[str, Tensor, Tensor, torch.Generator]) -> None:
    name, features, labels, rng = batch
    dim = features.shape[-1]
    rotation, _ = torch.linalg.qr(torch.randn(dim, dim, dtype=torch.float64, generator=rng))
    lengths = torch.rand(*features.shape[:-1], 1, dtype=torch.float64, generator=rng) + 0.1
    method = selfcon.get_method(name)
    same(method.loss(features @ rotation * lengths, labels), method.loss(features, labels))
