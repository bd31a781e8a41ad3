"""Finite input gives a finite loss and gradient, in every precision and for degenerate vectors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import selfcon
from selfcon.errors import UsageError
from selfcon.losses import normalise
from tests.losses.test_methods import CONTRASTIVE

LABELS = torch.tensor([0, 0, 1, 1, 2, 2])


def degenerate(kind: str, views: int) -> Tensor:
    features = torch.randn(6, views, 3, 16)
    if kind == "duplicate":
        return features[:1].expand(6, -1, -1, -1).clone()
    if kind == "opposite":
        features[3:] = -features[:3]
    if kind == "zero":
        features[::2] = 0
    if kind == "all zero":
        features[:] = 0
    if kind == "huge":
        features *= 1e38 / features.abs().max()
    if kind == "tiny":
        features *= 1e-30
    if kind == "short":
        features *= 1e-5
    return features


@pytest.mark.medium
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["random", "duplicate", "opposite", "zero", "all zero", "huge", "tiny", "short"])
def test_loss_and_gradient_are_finite(kind: str, dtype: torch.dtype) -> None:
    for name in CONTRASTIVE:
        method = selfcon.get_method(name)
        features = degenerate(kind, method.views)
        if dtype == torch.float16:
            features = features.clamp(-6e4, 6e4)
        features = features.to(dtype).requires_grad_()
        for temperature in (0.02, 0.1, 5.0) if dtype == torch.float16 else (1e-6, 0.02, 0.1, 5.0):
            loss = method.loss(features, LABELS, temperature=temperature)
            (gradient,) = torch.autograd.grad(loss, features)
            assert loss.dtype == torch.float32
            assert loss.isfinite()
            assert gradient.isfinite().all()


def test_half_precision_is_raised_before_anything_is_computed() -> None:
    features = torch.randn(6, 1, 2, 16).bfloat16()
    method = selfcon.get_method("selfcon")
    assert torch.equal(method.loss(features, LABELS), method.loss(features.float(), LABELS))
    assert method.loss(features.double(), LABELS).dtype == torch.float64


def test_autocast_does_not_reach_into_the_loss() -> None:
    features = torch.randn(6, 1, 2, 16)
    method = selfcon.get_method("selfcon")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = method.loss(features, LABELS)
    assert torch.equal(inside, method.loss(features, LABELS))


def test_a_zero_vector_stays_zero_and_gets_no_gradient() -> None:
    features = torch.randn(6, 1, 2, 16)
    features[0] = 0
    features.requires_grad_()
    assert normalise(features)[0].abs().sum() == 0
    loss = selfcon.get_method("selfcon").loss(features, LABELS)
    (gradient,) = torch.autograd.grad(loss, features)
    assert gradient[0].abs().sum() == 0
    assert gradient[1:].abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_what_is_too_short_for_a_direction(dtype: torch.dtype) -> None:
    shortest = {torch.float64: 1.4916681462400413e-154, torch.float16: 2.0**-14}.get(dtype, 2.0**-63)
    at_it = torch.tensor([0.0, shortest, -shortest], dtype=dtype)
    assert normalise(at_it).abs().sum() == 0
    torch.testing.assert_close(normalise(at_it * 1.01).double(), at_it.sign().double() / 2**0.5)


def test_nan_stays_visible_where_nothing_is_checked() -> None:
    assert normalise(torch.tensor([float("nan"), 1.0])).isnan().all()


def test_a_loss_can_be_differentiated_twice_and_by_functions() -> None:
    method, features = selfcon.get_method("selfcon"), torch.randn(6, 1, 2, 4, dtype=torch.float64)

    def loss(x: Tensor) -> Tensor:
        return method.loss(x, LABELS, implementation="dense")

    assert torch.autograd.gradgradcheck(loss, features.clone().requires_grad_())
    x = features.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(x), x)
    torch.testing.assert_close(torch.func.grad(loss)(features), expected)
    torch.testing.assert_close(torch.func.vmap(normalise)(features), normalise(features))


def test_a_second_derivative_that_is_not_known_is_refused() -> None:
    x = torch.randn(6, 1, 2, 4, dtype=torch.float64, requires_grad=True)
    tau = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    loss = selfcon.get_method("selfcon").loss(x, LABELS, implementation="tiled", temperature=tau)
    first = torch.autograd.grad(loss, (x, tau), create_graph=True)
    for asked in (x, tau):
        for known in first:
            with pytest.raises(UsageError, match="implementation='dense' for a second"):
                torch.autograd.grad(known.square().sum(), asked, retain_graph=True)
